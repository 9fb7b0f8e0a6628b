"""A program that starts SGLang through several entry points ("doors"), one after the other, and records their answers.

    doors.py RESULT '{"values": {...}, "visits": [["engine", "arguments first", {}], ...]}'

A visit names a door, an order of imports, and arguments to add to ``values``. RESULT receives the token ids of each visit.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.harness.patience import patience

PROMPT = "hello world"
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def visit(door: str, order: str, values: dict[str, Any]) -> list[int]:
    from sglang.srt.plugins import load_plugins

    if order == "plugins first":
        load_plugins()
    from sglang.srt.server_args import ServerArgs

    made = ServerArgs(**values)
    if order == "arguments first":
        load_plugins()
    with DOORS[door](made) as ask:
        return ask()["output_ids"]


@contextlib.contextmanager
def engine(server_args: Any) -> Iterator[Any]:
    from sglang.srt.entrypoints.engine import Engine

    entered = Engine(server_args=server_args)
    try:
        yield lambda: entered.generate(PROMPT, GREEDY)
    finally:
        entered.shutdown()


@contextlib.contextmanager
def child(server_args: Any) -> Iterator[Any]:
    from sglang.srt.entrypoints.http_server import launch_server

    server = multiprocessing.Process(target=launch_server, args=(server_args,))
    server.start()
    try:
        yield lambda: asked(server_args.port, server.is_alive)
    finally:
        server.kill()
        server.join()


DOORS: dict[str, Any] = {"engine": engine, "child": child}


def asked(port: int, alive: Any = lambda: True) -> dict[str, Any]:
    """Returns the server's answer as soon as it gives one."""
    body = json.dumps({"text": PROMPT, "sampling_params": GREEDY}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
    end = time.monotonic() + patience(120)
    while alive() and time.monotonic() < end:
        try:
            with urllib.request.urlopen(request, timeout=patience(60)) as answer:
                return dict(json.load(answer))
        except urllib.error.URLError:
            time.sleep(0.2)
    raise TimeoutError("the server does not answer, or has ended")


def serve_here(values: dict[str, Any], result: Path) -> None:
    """Runs ``launch_server`` in this process, which ends with the answer."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    def ask() -> None:
        result.write_text(json.dumps([asked(values["port"])["output_ids"]]))
        os._exit(0)

    made = ServerArgs(**values)
    load_plugins()
    threading.Thread(target=ask, daemon=True).start()
    launch_server(made)


def main(result: Path, values: dict[str, Any], visits: list[Any]) -> None:
    if visits == ["here"]:
        serve_here(values, result)
    result.write_text(json.dumps([visit(door, order, {**values, **more}) for door, order, more in visits]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
