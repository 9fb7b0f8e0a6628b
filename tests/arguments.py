"""Resolves SGLang's arguments as a launch on a GPU machine does: with SGLang's own code, over the stand-in driver."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

LOOP = """
import base64, json, os, pickle, sys
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from sglang.srt import server_args
from sglang.srt.plugins import load_plugins
load_plugins()
before = dict(os.environ)
for line in sys.stdin:
    os.environ.clear()
    os.environ.update(before)
    try:
        made = server_args.prepare_server_args(json.loads(line))
        made.resolve_once()
        made._environment = {name: value for name, value in os.environ.items() if before.get(name) != value}
        reply = base64.b64encode(pickle.dumps(made)).decode()
    except (Exception, SystemExit) as error:
        reply = f"!{type(error).__name__}: {error}"
    print(reply.replace(chr(10), " "), file=replies, flush=True)
"""


class Arguments:
    """``arguments("--model-path", folder, "--tp-size", "2")`` returns the arguments as SGLang's children get them, with the
    variables that SGLang set for them in ``_environment``. One process resolves all, over the stand-in that ``env`` sets up."""

    def __init__(self, env: Mapping[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(LOOP)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def close(self) -> None:
        self._process.communicate()

    def __call__(self, *words: object) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([str(word) for word in words]) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline().strip()
        if not reply or reply.startswith("!"):
            raise ValueError(f"SGLang refuses {words}: {reply[1:] or 'its process ended'}")
        return pickle.loads(base64.b64decode(reply))
