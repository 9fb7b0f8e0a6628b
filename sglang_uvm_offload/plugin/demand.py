"""Whether offloading was asked for, as far as a process knows before it has read its arguments.

A launcher that accepted the flags says so to the processes it starts; they must offload, or end.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)

_VARIABLE = "SGLANG_UVM_OFFLOAD_DEMANDED"


def tell_children(enabled: bool) -> None:
    if enabled:
        os.environ[_VARIABLE] = "1"
    else:
        os.environ.pop(_VARIABLE, None)


def unmet(reason: str) -> None:
    """The plugin does not work here: end the process if it was started to offload, else say that it serves without."""
    message = f"sglang-uvm-offload {reason}"
    if os.environ.get(_VARIABLE):
        raise SystemExit(message)
    logger.warning("%s. Expert offloading is not available; without its flags SGLang serves as usual.", message)
