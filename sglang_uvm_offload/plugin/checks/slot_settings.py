"""``--expert-offload-slots``: whether this launch can have slots."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from sglang_uvm_offload.config import AUTO, RequestedConfig
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.plugin.slots.runners import no_slots

logger = logging.getLogger(__name__)

_SLOTS = flag_name("slots")


def possible(config: RequestedConfig, cfg: Any, model_config: Any) -> RequestedConfig:
    """``config``, without slots if ``auto`` finds that none are possible. Raises ``FlagError`` for a number in that case."""
    if config.slots == 0:
        return config
    reason = no_slots(cfg, model_config)
    if reason is None:
        return config
    if config.slots is not None:
        raise FlagError([f"{_SLOTS} {config.slots}: {reason}; leave it out"])
    logger.info("%s %s: no slots: %s", _SLOTS, AUTO, reason)
    return dataclasses.replace(config, slots=0)
