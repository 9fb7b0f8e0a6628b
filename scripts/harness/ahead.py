"""Servers whose processes are started side by side, before the turn of each.

A start goes mostly into importing SGLang, twice, on one core. After that a server stops here: it has neither touched the GPU
nor measured its memory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from scripts.harness.server import Server

IMPORTED = "Init parallel begin."
"""SGLang's first rank logs it once all is imported."""


def start_ahead(servers: Iterable[Server], seconds: float) -> None:
    """Start them, and stop each where it has imported SGLang; ``with`` lets it go on. One that is not there after ``seconds``,
    or has ended, is given up: ``with`` starts it anew."""
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
