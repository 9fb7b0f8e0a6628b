"""Measures the link between this server's GPUs and host memory, when its experts are loaded and no step runs yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from sglang.srt.distributed.parallel_state import get_world_group

from sglang_uvm_offload.cuda.device import DriverError, gpu_ids, visible_gpus
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.memory import kept_links
from sglang_uvm_offload.memory.link import (
    ALONE_SECONDS,
    TIMED,
    TOGETHER_SECONDS,
    LinkRates,
    LinkStatus,
    LinkTimer,
    MeasuredLink,
    Offloaded,
)
from sglang_uvm_offload.plan.inputs import Assumptions
from sglang_uvm_offload.plan.measured_link import expected_rates
from sglang_uvm_offload.plugin.rank.backend import Emulated

logger = logging.getLogger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Of a machine, the same in all of its containers."""


class _Measured(NamedTuple):
    """By one rank. None: it has nothing to measure, or failed."""

    host: str
    gpu: str
    alone: LinkRates | None
    together: LinkRates | None


def measure(backend: Emulated, gpu: int, layers: Sequence[ExpertLayer]) -> LinkStatus | None:
    """The link as all ranks of this server on this machine measure it, None where no rank can. It is kept for later launches.
    Every rank must call it at the same point, whatever it has loaded. ``gpu``: that of this process."""
    if not backend.on_cuda:
        return None
    world = get_world_group()
    timer = _timer(backend, layers)
    alone = None
    for turn in range(world.world_size):
        if turn == world.rank_in_group:
            alone = _rates(timer, ALONE_SECONDS, lambda: None)
        world.barrier()
    together = _rates(timer, TOGETHER_SECONDS, world.barrier) if world.world_size > 1 else alone
    if timer is not None:
        timer.close()
    own = _Measured(_host(), _id(gpu), alone, together)
    here = [one for one in world.all_gather_object(own) if one.host == own.host and one.alone and one.together]
    if not here:
        return None
    found = MeasuredLink(
        len(here),
        LinkRates.slowest([one.alone for one in here if one.alone]),
        LinkRates.slowest([one.together for one in here if one.together]),
    )
    expected = _expected(gpu)
    status = LinkStatus(found, expected * Assumptions.read_efficiency, found.why_slow(expected))
    if own == here[0]:
        _tell(status)
        _keep(sorted({one.gpu for one in here}), found)
    return status


def _timer(backend: Emulated, layers: Sequence[ExpertLayer]) -> LinkTimer | None:
    offloaded = [Offloaded(t.offloaded_blocks(), t.layout.expert_bytes) for layer in layers for t in layer.tensors]
    if not any(one.blocks.size for one in offloaded):
        return None
    try:
        return backend.link_timer(offloaded)
    except RuntimeError as error:  # for want of VRAM
        logger.warning("Expert offload: the link is not measured: %s", error)
        return None


def _rates(timer: LinkTimer | None, seconds: float, barrier: Callable[[], object]) -> LinkRates | None:
    """Calls ``barrier`` as often on each rank, whatever fails: the others wait there."""
    left = TIMED

    def wait() -> None:
        nonlocal left
        left -= 1
        barrier()

    try:
        return None if timer is None else timer.rates(seconds, wait)
    except RuntimeError as error:  # of the driver: serving meets it too, if it matters there
        logger.warning("Expert offload: the link is not measured: %s", error)
        return None
    finally:
        while left:
            wait()


def _host() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _id(gpu: int) -> str:
    try:
        return gpu_ids([gpu])[0]
    except DriverError:  # peers wait for this rank
        return ""


def _expected(gpu: int) -> float:
    """Of the copy engine, 1e9 bytes a second; 0 if this GPU's is unknown."""
    return dict(enumerate(expected_rates(visible_gpus()))).get(gpu, 0.0)


def _tell(status: LinkStatus) -> None:
    logger.info("Expert offload: %s: %s", status.verdict(), status.measured.described())
    for reason in status.because:
        logger.warning("Expert offload: reads of offloaded experts are slow: %s", reason)


def _keep(gpus: Sequence[str], link: MeasuredLink) -> None:
    try:
        kept_links.keep(gpus, link)
    except OSError as error:
        logger.warning("Expert offload: the measured link is not kept for later launches: %s", error)
