"""Starts servers side by side, ahead of their turn.

Most of a start is spent on importing SGLang, twice, on one core. Each server is stopped (SIGSTOP) after that, before it touches
the GPU or measures its memory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from scripts.harness.server import Server

IMPORTED = "Init parallel begin."
"""The first rank logs this when it has imported SGLang."""


def start_ahead(servers: Iterable[Server], seconds: float) -> None:
    """Start ``servers``, and stop each when it has imported SGLang; entering its ``with`` block resumes it. A server that ends
    or takes longer than ``seconds`` is killed, and ``with`` starts it again."""
    waiting = list(servers)
    for server in waiting:
        server.process = server.start()
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        for server in [*waiting]:
            assert server.process is not None
            if IMPORTED in server.log:
                os.killpg(server.process.pid, signal.SIGSTOP)
                waiting.remove(server)
            elif server.process.poll() is not None:
                waiting.remove(server)
                server.give_up()
        time.sleep(0.02)
    for server in waiting:
        server.give_up()
