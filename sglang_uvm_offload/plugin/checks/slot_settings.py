"""``--expert-offload-slots``: whether this launch can have slots."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from sglang_uvm_offload.config import AUTO, RequestedConfig
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.plugin.slots.runners import no_slots

logger = logging.getLogger(__name__)

_SLOTS, _N = flag_name("slots"), flag_name("num_resident")


def possible(config: RequestedConfig, cfg: Any, model_config: Any) -> RequestedConfig:
    """``config``, without slots if ``auto`` finds that none are possible. Raises ``FlagError`` for a number in that case, or
    for ``auto`` with a number of residents."""
    if config.slots == 0:
        return config
    reason = no_slots(cfg, model_config)
    if config.slots is None:
        if reason is not None:
            logger.info("%s %s: no slots: %s", _SLOTS, AUTO, reason)
            return dataclasses.replace(config, slots=0)
        if config.num_resident is not None:
            raise FlagError([f"{_SLOTS} {AUTO}: needs {_N} {AUTO}, whose result it divides; give a number or auto for both"])
    elif reason is not None:
        raise FlagError([f"{_SLOTS} {config.slots}: {reason}; leave it out"])
    return config
