"""``--expert-offload-slots``: whether this launch can have slots, and how many."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from sglang_uvm_offload.config import AUTO, UNRESOLVED, OffloadConfig
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.plugin.slot_runners import no_slots
from sglang_uvm_offload.sizing.slots import slots_of

logger = logging.getLogger(__name__)

_SLOTS, _N = flag_name("slots"), flag_name("num_resident")


def possible(config: OffloadConfig, cfg: Any, model_config: Any) -> OffloadConfig:
    """``config``, without slots where ``auto`` finds that none are possible. Raises ``FlagError`` if a number was given then,
    or ``auto`` beside a number of residents."""
    if not config.slots:
        return config
    reason = no_slots(cfg, model_config)
    if config.slots == UNRESOLVED:
        if reason is not None:
            logger.info("%s %s: no slots: %s", _SLOTS, AUTO, reason)
            return dataclasses.replace(config, slots=0)
        if not config.auto:
            raise FlagError([f"{_SLOTS} {AUTO}: divides what {_N} {AUTO} finds room for; give a number beside a number"])
    elif reason is not None:
        raise FlagError([f"{_SLOTS} {config.slots}: {reason}; leave it out"])
    return config


def divided(config: OffloadConfig, num_experts: int) -> OffloadConfig:
    """``config`` after ``--expert-offload-num-resident auto`` has found room for ``num_resident`` experts a layer: slots take
    some of it. Raises ``FlagError`` if a given number does not fit."""
    rows = config.num_resident
    slots = slots_of(rows, num_experts) if config.slots == UNRESOLVED else config.slots
    if rows >= num_experts or not slots:
        return dataclasses.replace(config, slots=0)
    if slots > rows:
        raise FlagError([f"{_SLOTS} {slots}: {rows} rows a layer fit in VRAM; give at most as many, or {AUTO}"])
    logger.info("%s: of %d rows a layer in VRAM, %d are slots and %d residents", _SLOTS, rows, slots, rows - slots)
    return dataclasses.replace(config, slots=slots, num_resident=rows - slots)
