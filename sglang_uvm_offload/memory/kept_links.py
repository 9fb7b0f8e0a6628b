"""What servers have measured of the links of this machine's GPUs, kept for later launches and for plans."""

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
"""Bytes of a file, at most."""


@dataclass(frozen=True)
class KeptLink:
    """``gpus``: the ids of those that were measured at the same time. ``at``: in seconds since 1970."""

    gpus: tuple[str, ...]
    at: float
    link: MeasuredLink


def keep(gpus: Collection[str], link: MeasuredLink) -> None:
    """In place of what was kept of the same GPUs. Raises ``OSError``."""
    kept = KeptLink(tuple(sorted(gpus)), time.time(), link)
    name = hashlib.sha256(" ".join(kept.gpus).encode()).hexdigest()[:20]
    cache.replace(cache.private_folder(FOLDER) / f"{name}.json", msgspec.json.encode(kept))


def kept(gpus: Collection[str], ranks: int) -> KeptLink | None:
    """What was measured of ``gpus``, or some of them, by the number of ranks that is nearest to ``ranks``; of two the larger,
    of the same the newest. None if nothing was. A damaged file counts as none."""
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
