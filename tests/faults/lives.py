"""The runs of a server that something ends again and again, as its service manager sees them: which faults each meets, what was
asked of it, and how it ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from faults.cases import DECIDE, MOVE, SAVE
from faults.samples import grown, sample
from faults.served import STRUCK
from faults.servers import END_SECONDS, PEER_DIED, processes_of

from scripts.harness.server import Server

BROKEN = (OSError, http.client.HTTPException, ValueError)
"""What a client meets whose server ends."""
STATUS_SECONDS, SAMPLE_SECONDS = 5.0, 2.0


class Planned(NamedTuple):
    """A life to be: its share of the time, its faults (``served.install``), each after a share of the life; and what the log
    says if one of them ends it."""

    share: float
    faults: tuple[tuple[float, dict[str, Any]], ...]
    reasons: tuple[str, ...] = ()
    ends_moves: bool = False

    def jobs(self, seconds: float) -> list[dict[str, Any]]:
        return [{**job, "after": seconds * share} for share, job in self.faults]


def _thread(call: str, value: str, rank: int) -> dict[str, Any]:
    what = f"{call.rpartition('.')[2].strip('_')}: {value}, rank {rank}"
    return {"action": "thread", "call": call, "k": 1, "value": value, "rank": rank, "what": what}


def _signal(call: str, rank: int) -> dict[str, Any]:
    what = f"SIGKILL in {call.rpartition(':')[2].rpartition('.')[2]}, rank {rank}"
    return {"action": "signal", "call": call, "k": 1, "value": "SIGKILL", "rank": rank, "what": what}


CLOCK = {"action": "clock", "value": -3600, "rank": 0, "what": "the time of day jumps back an hour, rank 0"}
FULL_DISK = {"action": "files", "value": "fsync:ENOSPC", "times": 2, "rank": 0, "what": "no space to save in, twice, rank 0"}
FAILED_MOVE = {
    "action": "emulated memory",
    "call": "place",
    "k": 1,
    "value": "injected",
    "rank": 1,
    "what": "an advice fails, rank 1",
}
COPY = "sglang_uvm_offload.cpu.staging:CpuStaging.copy"
MOVING = "sglang_uvm_offload.experts.layer:ExpertLayer.promote"

LIVES = (
    # What passes, in the life that is long enough to see memory grow.
    Planned(
        0.5,
        (
            (0.1, CLOCK),
            (0.2, FULL_DISK),
            (0.3, _thread(MOVE, "slow", 1)),
            (0.4, _thread(SAVE, "slow", 0)),
            (0.5, _thread(SAVE, "MemoryError", 0)),
        ),
    ),
    Planned(0.1, ((0.7, _signal(MOVING, 1)),), PEER_DIED),
    Planned(0.1, ((0.3, FAILED_MOVE),), ends_moves=True),
    Planned(0.1, ((0.7, _thread(COPY, "RuntimeError", 0)),), ("an injected fault",)),
    Planned(0.1, ((0.3, _thread(DECIDE, "SystemExit", 0)), (0.5, _signal("os:replace", 0))), PEER_DIED, ends_moves=True),
    Planned(0.1, ()),
)


@dataclass
class Life:
    """One run of a server. Clients may ask ``server`` until ``asked_to_end`` or ``died``."""

    server: Server
    asked_to_end: threading.Event = field(default_factory=threading.Event)
    died: threading.Event = field(default_factory=threading.Event)
    requests: int = 0
    interrupted: int = 0
    """Requests that the end of the life left without an answer."""
    status: dict[str, Any] = field(default_factory=dict)
    """The last status of rank 0."""
    samples: list[dict[str, int]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Processes that did not end with it."""

    @property
    def serves(self) -> bool:
        return not (self.asked_to_end.is_set() or self.died.is_set())

    def watch(self, seconds: float) -> None:
        """Until the time is over, or the server has ended by itself."""
        assert self.server.process is not None
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.server.process.poll() is None:
            self.samples.append(sample(self.server.process.pid))
            with contextlib.suppress(*BROKEN), self.server.open("/expert_offload", seconds=STATUS_SECONDS) as response:
                self.status = json.loads(response.read())["ranks"][0]
            time.sleep(min(SAMPLE_SECONDS, max(0.0, until - time.monotonic())))
        (self.asked_to_end if self.server.process.poll() is None else self.died).set()

    def end(self) -> None:
        """As a service manager does; SGLang first answers the requests under way."""
        assert self.server.process is not None
        self.server.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.process.wait(END_SECONDS)
        until = time.monotonic() + END_SECONDS
        while (left := processes_of(self.server.process.pid)) and time.monotonic() < until:
            time.sleep(0.2)
        self.left = left

    def found(self, planned: Planned) -> dict[str, Any]:
        """What the page says of it. ``trouble`` is what no fault explains."""
        log, died, fault = self.server.log, self.died.is_set(), self.status.get("fault")
        struck = re.findall(f"^{re.escape(STRUCK)}(.+)$", log, re.M)
        failed_saves = sum(save["failures"] for save in self.status.get("saves", ()))
        trouble = [f"left: {process}" for process in self.left]
        if died and not any(reason in log for reason in planned.reasons):
            trouble.append(f"it ended without a reason: {log[-2000:]}")
        if fault is not None and not planned.ends_moves:
            trouble.append(f"moves ended: {fault}")
        if failed_saves and not any("save" in what for what in struck):
            trouble.append("a save failed")
        return {
            "faults": struck,
            "died": died,
            "requests": self.requests,
            "interrupted": self.interrupted,
            "moves": self.status.get("moves", 0),
            "moves_ended": fault is not None,
            "hit_rate": round(self.status.get("hit_rate", 0.0), 3),
            "failed_saves": failed_saves,
            "growth": grown(self.samples),
            "trouble": trouble,
        }
