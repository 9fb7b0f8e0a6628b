"""Ends a process that must offload but cannot.

A launcher that accepted the flags sets an environment variable for its child processes. It tells them, before they read their
arguments, to exit if they cannot offload.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from sglang_uvm_offload.flags import flag_name

logger = logging.getLogger(__name__)

_VARIABLE = "SGLANG_UVM_OFFLOAD_DEMANDED"
_FLAGS = flag_name("")


def mark_children(enabled: bool) -> None:
    """Set in the launcher whether the processes that it starts from now on must offload."""
    if enabled:
        os.environ[_VARIABLE] = "1"
    else:
        os.environ.pop(_VARIABLE, None)


def fail(reason: str) -> None:
    """Report that the plugin does not work in this process: end it if it must offload, else log a warning."""
    message = f"sglang-uvm-offload {reason}"
    if os.environ.get(_VARIABLE):
        end(message)
    logger.warning("%s. Expert offloading is unavailable; SGLang serves as usual without its flags.", message)


def fail_to_register(error: Exception) -> None:
    """Report that the plugin could not add its flags. End a command that uses one, before SGLang calls the flag unknown."""
    from sglang_uvm_offload.plugin import hook_points

    reason = "\n  - ".join([f"cannot register with this SGLang: {type(error).__name__}: {error}", *hook_points.problems()])
    if any(argument.startswith(_FLAGS) for argument in sys.argv):
        end(f"sglang-uvm-offload {reason}")
    fail(reason)


def end(message: str, before_exit: Callable[[], object] = lambda: None) -> NoReturn:
    """Print ``message``, call ``before_exit``, and end this process. A process that SGLang started exits at once: Python's exit
    handlers may wait for threads and peers that no longer respond, and the launcher would hang with them."""
    if multiprocessing.parent_process() is None:
        raise SystemExit(message)
    print(message, file=sys.stderr, flush=True)
    before_exit()
    leave()


def leave() -> NoReturn:
    """End this process at once, after a peer has printed the reason."""
    logging.shutdown()
    os._exit(1)
