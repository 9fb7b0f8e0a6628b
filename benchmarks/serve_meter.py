"""Measures what a server uses: host RAM and CPU time of its process tree, and VRAM."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time

import psutil

MIB = 1 << 20


def tree(pid: int) -> list[psutil.Process]:
    """Returns the process and its descendants; empty if the process is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def host_bytes(pid: int) -> int:
    """Returns the tree's proportional set size. It excludes host pages of managed memory, which belong to the driver. On a GPU
    machine, the drop in ``available_bytes`` is the better figure."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total


def available_bytes() -> int:
    return int(psutil.virtual_memory().available)


def vram_bytes() -> int | None:
    """Returns VRAM in use on the first GPU, by any process; None if nvidia-smi does not answer."""
    answer = _nvidia_smi("--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0")
    number = answer.split("\n")[0].strip()
    return int(number) * MIB if number.isdecimal() else None


def _nvidia_smi(*arguments: str) -> str:
    tool = shutil.which("nvidia-smi")
    if not tool:
        return ""
    answer = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=30)
    return answer.stdout if answer.returncode == 0 else ""


class Bill:
    """What a server uses beyond what was in use before it started."""

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
