"""Runs SGLang's argument code on many launches in a separate process, and reads the results.

A case is ``{"argv": [...]}`` or ``{"engine": {...}}``, optionally with ``"resolve": true``. A result is
``{"exit": code or null, "error": text, "flags": {...}}``.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nursery import Nurseries, Nursery

BLACKWELL = {"STANDIN_ATTRIBUTE_75": "10"}
"""The stand-in's GPU as one of compute capability 10.0."""


def launched(cases: Mapping[str, dict[str, Any]], python: Nursery | Nurseries, **env: str) -> dict[str, dict[str, Any]]:
    """Returns each case's result. All run in one process, because importing SGLang takes most of the time."""
    from scripts.harness.server import gathered  # not needed in that process

    jobs = [case | ({"engine": gathered(case["engine"])} if "engine" in case else {}) for case in cases.values()]
    program = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from launches import run_all
        print("RESULT", run_all({json.dumps(jobs)!r}))
    """
    ended = python.run(program, **env)
    assert ended.code == 0, ended.err[-4000:]
    return dict(zip(cases, json.loads(ended.out.rpartition("RESULT ")[2]), strict=True))


def run_all(cases: str) -> str:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return json.dumps([run(case) for case in json.loads(cases)])


def run(case: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt import server_args

    code, errors = None, io.StringIO()
    flags: dict[str, Any] = {}
    with contextlib.redirect_stderr(errors):
        try:
            argv = case.get("argv")
            made = server_args.prepare_server_args(argv) if argv else server_args.ServerArgs(**case["engine"])
            if case.get("resolve"):
                made.resolve_once()
            made = pickle.loads(pickle.dumps(made))
            shown = ("expert_offload_", "mem_fraction_static", "disable_flashinfer_autotune")
            flags = {name: value for name, value in made.resolved_dict().items() if name.startswith(shown)}
        except SystemExit as exit:
            code = exit.code
        except ValueError as error:
            print(f"{type(error).__name__}: {error}", file=errors)
    return {"exit": code, "error": errors.getvalue(), "flags": flags}
