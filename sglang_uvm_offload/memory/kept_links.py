"""Saved link measurements of this machine's GPUs, for later launches and for plans."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sglang_uvm_offload.files import cache, reading
from sglang_uvm_offload.memory.link import MeasuredLink

FOLDER = "links"
LARGEST = 1 << 20
"""The largest file that is read, in bytes."""


@dataclass(frozen=True)
class KeptLink:
    """A saved measurement. ``gpus`` are the ids of the GPUs measured together, ``at`` the time in seconds since the epoch."""

    gpus: tuple[str, ...]
    at: float
    link: MeasuredLink


def keep(gpus: Collection[str], link: MeasuredLink) -> None:
    """Save a measurement, replacing an older one of the same GPUs. Raises ``OSError``."""
    kept = KeptLink(tuple(sorted(gpus)), time.time(), link)
    name = hashlib.sha256(" ".join(kept.gpus).encode()).hexdigest()[:20]
    cache.replace(cache.private_folder(FOLDER) / f"{name}.json", msgspec.json.encode(kept))


def kept(gpus: Collection[str], ranks: int) -> KeptLink | None:
    """The measurement of ``gpus``, or of some of them, whose number of ranks is nearest to ``ranks``: the larger of two equally
    near, then the newest. None if there is none. Damaged files are ignored."""
    try:
        files = list(cache.private_folder(FOLDER).glob("*.json"))
    except OSError:
        return None
    found = [one for one in map(_read, files) if one is not None and set(one.gpus) <= set(gpus)]
    return min(found, key=lambda one: (abs(one.link.ranks - ranks), one.link.ranks < ranks, -one.at), default=None)


def _read(file: Path) -> KeptLink | None:
    try:
        return msgspec.json.decode(reading.read(file, LARGEST), type=KeptLink)
    except (OSError, msgspec.MsgspecError):
        return None
