"""The machine to plan for: this one, a preset, or one described by its figures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.memory.link import LinkRates
from sglang_uvm_offload.plan.gpus import GPUS, kind_of, known_gpu
from sglang_uvm_offload.plan.links import Link

GIB = 1 << 30

EXAMPLES = ("8xH20", "4x4090", "1xH200", "2xA100-80GB", "1x5090", "1xGH200", "1xSPARK")
PRESET_HOST_GIB = {"8xH20": 1500, "1xH200": 512}
"""Assumed host RAM of these machines without ``--host-gb``. They are sold with less and with more."""
HOST_GIB_PER_GPU = 128
DESKTOP_HOST_GIB = 192
"""Assumed host RAM per GPU of other machines, and of a desktop (four modules of 48 GB)."""
DESKTOP_GPUS = 2
"""The most GPUs that fit in a desktop."""

DDR5_4800_GBPS = 38.4
"""One channel: 4800 MT/s of 8 bytes."""
SERVER_HOST_GBPS = 16 * DDR5_4800_GBPS
"""Host memory of a machine with 8 GPUs: two CPUs of 8 channels (H200 systems of MLPerf Inference
v4.1 have two Xeon 8480C). Assumed."""
WORKSTATION_HOST_GBPS = 8 * DDR5_4800_GBPS
"""The same of a machine with several GPUs that are also sold for desktops: one server CPU of 8 channels. Assumed."""
DESKTOP_HOST_GBPS = 2 * 44.8
"""A desktop's two channels of DDR5-5600. Assumed."""


FIGURES = {
    **{"gpus": "gpus", "vram_gb": "vram_bytes", "host_gb": "host_bytes"},
    **{name: name for name in ("link_gbps", "hbm_gbps", "tflops", "host_gbps")},
}
"""The figures that describe a machine without a preset: flag names, and the ``Machine`` field that each sets."""
_REQUIRED = [f"--{name.replace('_', '-')}" for name in FIGURES if name != "host_gbps"]


class MachineError(ValueError):
    """The description of a machine is invalid. The message says what to give."""


@dataclass(frozen=True)
class Machine:
    """``gpus`` equal GPUs and the host RAM that they share, in bytes and 1e9 bytes per second."""

    name: str
    gpus: int
    vram_bytes: int
    """Total memory of one GPU, as in nvidia-smi."""
    host_bytes: int
    """Host RAM that the server may use; on this machine, the RAM available now."""
    link_gbps: float
    hbm_gbps: float
    tflops: float
    source: str
    host_gbps: float = 0.0
    """Nominal rate of all host memory together; 0 if unknown."""
    one_memory: bool = False
    """Whether GPU and CPU share one memory, so that an offloaded expert takes as much of it as a resident one."""
    available_bytes: int = 0
    """The part of that shared memory that GPU and CPU may use together; 0: VRAM plus host RAM."""
    read_gbps: float = 0.0
    """The rate of zero-copy reads of host memory; 0: a share of ``link_gbps``."""
    link: Link | None = None
    """Published rates of links of this kind; None if ``link_gbps`` is this machine's own."""
    measured: LinkRates | None = None
    """Rates that a server has measured while all its GPUs read; ``link_gbps`` is then the copy engine's rate."""
    host_gbps_assumed: bool = False

    @property
    def slowest(self) -> Machine | None:
        """This machine with the slowest published link of its kind; None if none is known."""
        return dataclasses.replace(self, read_gbps=self.link.slowest, link=None) if self.link and self.link.slowest else None

    @property
    def pool_bytes(self) -> int:
        """The memory that GPUs and host share, where they share one."""
        return self.available_bytes or self.vram_bytes + self.host_bytes


def preset(name: str) -> Machine:
    """The machine for a name such as ``8xH20``, a count of a known GPU. Raises ``MachineError``, which lists the known GPUs."""
    match = re.fullmatch(r"(\d{1,3})x([\w-]+)", name, flags=re.IGNORECASE)
    kind = kind_of(match.group(2)) if match else None
    if match is None or kind is None or not int(match.group(1)):
        raise MachineError(
            f"--machine {name!r}: {_meant(name)}must be a count, an x and a GPU, such as {', '.join(EXAMPLES[:3])}; known are "
            f"{', '.join(GPUS)}; describe another machine by {', '.join(_REQUIRED[:-1])} and {_REQUIRED[-1]}"
        )
    gpus, gpu = int(match.group(1)), GPUS[kind]
    name = f"{gpus}x{kind}"
    desktop = gpu.desktop and gpus <= DESKTOP_GPUS
    host = PRESET_HOST_GIB.get(name, DESKTOP_HOST_GIB if desktop else (gpu.host_gib or HOST_GIB_PER_GPU) * gpus)
    host_gbps = DESKTOP_HOST_GBPS if desktop else WORKSTATION_HOST_GBPS if gpu.desktop else SERVER_HOST_GBPS
    host_gbps = gpu.host_gbps * gpus or host_gbps
    return Machine(
        name,
        gpus,
        gpu.memory_mib << 20,
        host * GIB,
        gpu.link_gbps,
        gpu.hbm_gbps,
        gpu.tflops,
        f"{gpu.source}; host RAM of {host} GiB{'' if gpu.host_gbps else f' at {host_gbps:.0f} GB/s'} assumed",
        host_gbps,
        gpu.one_memory,
        link=gpu.link,
        host_gbps_assumed=not gpu.host_gbps,
    )


def _meant(name: str) -> str:
    """The nearest machine to a misspelt name, as the start of a sentence; "" if there is none."""
    count, gpu = re.fullmatch(r"(?:(\d{1,3})\s*x)?(.*)", name, flags=re.IGNORECASE | re.DOTALL).groups()  # type: ignore[union-attr]
    gpu = re.sub(r"NVIDIA-|GEFORCE-", "", "-".join(gpu.upper().split()))
    near = kind_of(gpu) or next(iter(get_close_matches(gpu, GPUS, 1)), None)
    return f"did you mean {int(count or 1) or 1}x{near}? It " if near else ""


def of_gpus(gpus: Sequence[tuple[str, int]], integrated: bool = False) -> Machine:
    """This machine, from the name and the bytes of each of its GPUs. ``integrated``: so says the driver of them, because their
    memory is the host's. Rates are 0 if the first is not in ``GPUS``. Raises ``MachineError`` if there is no GPU."""
    if not gpus:
        raise MachineError(
            "this machine has no CUDA GPU: name a machine, such as --machine 8xH20, or describe one by " + ", ".join(_REQUIRED)
        )
    name = gpus[0][0]
    known, host = known_gpu(name, gpus[0][1]), host_available()
    one_memory = integrated or (known is not None and known.one_memory)
    return Machine(
        f"{len(gpus)} x {name}",
        len(gpus),
        min(nbytes for _, nbytes in gpus),
        host,
        known.link_gbps if known else 0,
        known.hbm_gbps if known else 0,
        known.tflops if known else 0,
        "this machine" + (f"; rates: {known.source}" if known else ""),
        known.host_gbps * len(gpus) if known else 0,
        one_memory,
        host if one_memory else 0,
        link=known.link if known else None,
    )


def describe(base: Machine | None, figures: Mapping[str, float | None]) -> Machine:
    """``base`` with the given ``FIGURES`` (GiB, and 1e9 bytes a second) in place of its own. Without ``base``, all but
    ``host_gbps`` are required."""
    values: dict[str, Any] = {
        FIGURES[name]: int(value * GIB) if name in ("vram_gb", "host_gb") else value
        for name, value in figures.items()
        if value is not None
    }
    if base is None:
        base = Machine("given by its figures", 0, 0, 0, 0, 0, 0, "given")
    elif values:
        base = dataclasses.replace(base, name=f"{base.name}, adjusted", source=f"{base.source}; as given: {', '.join(values)}")
    machine = dataclasses.replace(base, **values)
    if "host_gbps" in values:
        machine = dataclasses.replace(machine, host_gbps_assumed=False)
    if "link_gbps" in values:
        machine = dataclasses.replace(machine, link=None, measured=None)
    missing = [flag for flag, field in zip(_REQUIRED, FIGURES.values(), strict=False) if not getattr(machine, field) > 0]
    if missing:
        raise MachineError(f"{', '.join(missing)}: not known for this machine; give numbers above 0")
    return machine
