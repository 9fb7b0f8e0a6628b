"""What a server takes of its machine: host RAM and CPU time of its process tree, VRAM, and how busy GPU and link are."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

MIB = 1 << 20


def tree(pid: int) -> list[psutil.Process]:
    """The process and all its descendants; empty once it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def host_bytes(pid: int) -> int:
    """Proportional set size of the tree. Host pages of managed memory belong to the driver and are not in it: where there is a
    GPU, what the machine lost (``available_bytes`` before and after) is the better figure."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total


def available_bytes() -> int:
    return int(psutil.virtual_memory().available)


def cpu_seconds(pid: int) -> float:
    """CPU time of the tree so far. Children that ended and were waited for count with their parents."""
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def vram_bytes() -> int | None:
    """VRAM in use on the first GPU, by whoever; None where no nvidia-smi answers."""
    answer = _nvidia_smi("--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0")
    number = answer.split("\n")[0].strip()
    return int(number) * MIB if number.isdecimal() else None


def _nvidia_smi(*arguments: str) -> str:
    tool = shutil.which("nvidia-smi")
    if not tool:
        return ""
    answer = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=30)
    return answer.stdout if answer.returncode == 0 else ""


@contextlib.contextmanager
def busy() -> Iterator[dict[str, float]]:
    """Inside the block: samples of the first GPU, one a second. After it, the dict holds the medians of ``parse_dmon``; empty
    where there is no nvidia-smi, or the block was too short for a sample."""
    found: dict[str, float] = {}
    tool = shutil.which("nvidia-smi")
    if not tool:
        yield found
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "dmon"
        sampler = subprocess.Popen([tool, "dmon", "-i", "0", "-s", "ut", "-d", "1", "-f", str(out)], stdout=subprocess.DEVNULL)
        try:
            yield found
        finally:
            sampler.terminate()
            sampler.wait(10)
            found |= parse_dmon(out.read_text() if out.exists() else "")


def parse_dmon(text: str) -> dict[str, float]:
    """``sm_percent`` (share of time in which a kernel ran), ``link_in_mbps`` and ``link_out_mbps`` (MB/s over PCIe to and from
    the GPU): medians of the samples between the first and the last, which the work may fill only partly."""
    columns: list[str] = []
    samples: list[dict[str, float]] = []
    for line in text.splitlines():
        words = line.lstrip("#").split()
        if line.startswith("#"):
            columns = words if "gpu" in words else columns
        elif len(words) == len(columns):
            samples.append({name: float(word) for name, word in zip(columns, words, strict=True) if word.isdecimal()})
    kept = samples[1:-1]
    names = {"sm": "sm_percent", "rxpci": "link_in_mbps", "txpci": "link_out_mbps"}
    return {
        ours: statistics.median(sample[name] for sample in kept)
        for name, ours in names.items()
        if kept and all(name in sample for sample in kept)
    }


class Bill:
    """What a server takes beyond what the machine had taken before it was started."""

    def __init__(self) -> None:
        self.available = available_bytes()
        self.vram = vram_bytes()
        self.started = time.monotonic()

    def startup_seconds(self) -> float:
        return time.monotonic() - self.started

    def memory(self, pid: int) -> dict[str, int | None]:
        vram = vram_bytes()
        return {
            "host_pss_bytes": host_bytes(pid),
            "host_available_lost_bytes": self.available - available_bytes(),
            "vram_bytes": None if vram is None or self.vram is None else vram - self.vram,
        }
