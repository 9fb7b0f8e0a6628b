"""What the processes of a server take of a machine, and whether that grows."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
from collections.abc import Iterable, Sequence

from faults.servers import session_of

SETTLED = 1 / 3
"""The share of the time that is no part of the judgement: caches fill."""
GROWTH = {"rss": 0.03, "handles": 0.02, "threads": 0.02, "shm": 0.0}
"""How much of its median each may grow from the first half of the judged time to the second."""
FEW = 40
"""Samples that are too few to judge by."""

Sample = dict[str, int]


def sample(session: int) -> Sample:
    """Totals over all processes of the session: bytes of memory, open handles, threads, and mapped files of /dev/shm. Other
    files there are left out, because other programs make some too; a check after the server's end finds what stays."""
    total, mapped = dict.fromkeys(GROWTH, 0), set()
    for process in session_of(session):
        with contextlib.suppress(OSError):  # it has just ended
            total["rss"] += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            total["handles"] += len(list((process / "fd").iterdir()))
            total["threads"] += len(list((process / "task").iterdir()))
            mapped.update(re.findall(r"/dev/shm/.+", (process / "maps").read_text(errors="replace")))
    return total | {"shm": len(mapped)}


def grown(samples: Sequence[Sample]) -> dict[str, float]:
    """By how much of its median each grew between the halves of the judged time."""
    if len(samples) < FEW:
        return {}
    judged = samples[int(SETTLED * len(samples)) :]
    half = len(judged) // 2
    found = {}
    for name in GROWTH:
        first, second = (statistics.median(each[name] for each in part) for part in (judged[:half], judged[half:]))
        found[name] = round(second / max(first, 1) - 1, 4)
    return found


def flat(growths: Iterable[dict[str, float]]) -> bool:
    return all(growth <= GROWTH[name] for each in growths for name, growth in each.items())
