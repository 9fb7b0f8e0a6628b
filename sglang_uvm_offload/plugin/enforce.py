"""Whether offloading was asked for, as far as a process knows before it has read its arguments.

A launcher that accepted the flags says so to the processes it starts; they must offload, or end.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from typing import NoReturn

logger = logging.getLogger(__name__)

_VARIABLE = "SGLANG_UVM_OFFLOAD_DEMANDED"


def mark_children(enabled: bool) -> None:
    """Called in the launcher: processes that it starts from now on are to offload, or not."""
    if enabled:
        os.environ[_VARIABLE] = "1"
    else:
        os.environ.pop(_VARIABLE, None)


def fail(reason: str) -> None:
    """The plugin does not work here: end the process if it was started to offload, else say that it serves without."""
    message = f"sglang-uvm-offload {reason}"
    if os.environ.get(_VARIABLE):
        end(message)
    logger.warning("%s. Expert offloading is not available; without its flags SGLang serves as usual.", message)


def end(message: str) -> NoReturn:
    """End this process with the reason. One that SGLang started ends at once: what runs when Python exits can wait for threads
    and peers that no longer answer, and the launcher would wait with it."""
    if multiprocessing.parent_process() is None:
        raise SystemExit(message)
    print(message, file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(1)
