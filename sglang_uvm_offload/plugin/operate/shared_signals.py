"""Keeps a process alive while the server saves, after a signal that a terminal (Ctrl-C) or a service manager sent to every
process of the server. The launcher got it too; it has the ranks save, then ends them."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from sglang_uvm_offload.files.autosave import LAST_SECONDS

_DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def outlive() -> None:
    """Outlive the first SIGINT or SIGTERM by ``LAST_SECONDS``, as long as a launcher waits for saves; a second one ends the
    process at once. Handlers that someone else has set stay. Does nothing outside the main thread, where Python cannot set
    handlers."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) == default:
            signal.signal(number, _postpone)


def _postpone(number: int, frame: FrameType | None) -> None:
    signal.signal(number, _DEFAULTS[number])
    timer = threading.Timer(LAST_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
