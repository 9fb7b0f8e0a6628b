"""Measures the link between this server's GPUs and host memory, after loading and before the first step."""

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
"""Identifies a machine: all of its containers read the same id."""


class _Measured(NamedTuple):
    """One rank's measurement. Rates are None if it has nothing offloaded, or failed."""

    host: str
    gpu: str
    alone: LinkRates | None
    together: LinkRates | None


def measure(backend: Emulated, gpu: int, layers: Sequence[ExpertLayer]) -> LinkStatus | None:
    """Measure the link with all ranks of this server on this machine, and save the result for later launches. Returns None if
    no rank can measure. All ranks must call this at the same point. ``gpu`` is the GPU of this process."""
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
    except RuntimeError as error:  # out of VRAM
        logger.warning("Expert offload: cannot measure the link: %s", error)
        return None


def _rates(timer: LinkTimer | None, seconds: float, barrier: Callable[[], object]) -> LinkRates | None:
    """The measured rates; None if nothing can be measured. Each rank calls ``barrier`` equally often even after a failure,
    because the others wait there."""
    left = TIMED

    def wait() -> None:
        nonlocal left
        left -= 1
        barrier()

    try:
        return None if timer is None else timer.rates(seconds, wait)
    except RuntimeError as error:  # from the driver; if it matters, serving will fail on it too
        logger.warning("Expert offload: cannot measure the link: %s", error)
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
    except DriverError:  # do not raise: peers wait for this rank
        return ""


def _expected(gpu: int) -> float:
    """The expected copy engine rate in 1e9 bytes/s; 0 if unknown for this GPU."""
    return dict(enumerate(expected_rates(visible_gpus()))).get(gpu, 0.0)


def _tell(status: LinkStatus) -> None:
    logger.info("Expert offload: %s: %s", status.verdict(), status.measured.described())
    for reason in status.because:
        logger.warning("Expert offload: reads of offloaded experts are slow: %s", reason)


def _keep(gpus: Sequence[str], link: MeasuredLink) -> None:
    try:
        kept_links.keep(gpus, link)
    except OSError as error:
        logger.warning("Expert offload: cannot save the measured link for later launches: %s", error)
