"""Replays routing with moves and decisions that take time, and tables what that costs residents that follow the traffic.

A step takes ``COMPUTE_SECONDS``, and the time of its reads over the link. The real manager decides and moves, on threads that
this study plays: what a thread has begun is over when its time has passed, and steps see residents as they were until then. A
step waits for neither. Moves take as long as those of a server took by its own account, decisions
about as in ``decisions.md``.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policy.sources import SEED, Source
from benchmarks.policy.verdicts import grid
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.memory.protocol import Location, ManagedRange, Span
from sglang_uvm_offload.replay.policies import LINK_GBPS
from sglang_uvm_offload.replay.simulator import Managed, Workload
from sglang_uvm_offload.residency import adaptation
from sglang_uvm_offload.routing.trace import Trace

EXPERT_BYTES = 2 * BLOCK_BYTES
COMPUTE_SECONDS = 0.01
DECISION_SECONDS = 0.01
MEASURED = Path(__file__).resolve().parents[1] / "results/2026-11-26-nvidia-h100/default.json"
"""A server that followed traffic that changes, on an H100."""
BATCHES = (1, 8)
RESIDENCIES = (0.25, 0.5, 0.78)


def move_gbps() -> float:
    """1e9 bytes a second, promoted and demoted, of the server's moves."""
    cells = [
        row["cell"] for part in json.loads(MEASURED.read_text())["parts"].values() for row in part["rows"] if "cell" in row
    ]
    (found,) = (cell["offload"] for cell in cells if cell["contender"] == "continuous")
    return float(found["moved_bytes"] / found["moving_seconds"] / 1e9)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Thread(Executor):
    """Runs tasks one after the other, in the time of ``clock``. Each takes what it spends."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._under_way: tuple[Future[Any], Any] | None = None
        self.free_at = 0.0
        self.before_task: Callable[[], None] = lambda: None
        """Called before a task begins."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self._waiting.append((lambda: fn(*args, **kwargs), done))
        self.run()
        return done

    def spend(self, seconds: float) -> None:
        self.free_at += seconds

    @property
    def busy(self) -> bool:
        return self._under_way is not None

    def run(self) -> None:
        """What is over by now, and what begins then."""
        while True:
            if self._under_way is not None:
                if self.free_at > self._clock.now:
                    return
                (done, result), self._under_way = self._under_way, None
                done.set_result(result)
            if not self._waiting:
                return
            task, done = self._waiting.popleft()
            self.before_task()
            self.free_at = max(self.free_at, self._clock.now)
            self._under_way = done, task()


class Deciding(Executor):
    """Each task is a decision, on ``thread``."""

    def __init__(self, thread: Thread):
        self._thread = thread

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def decide() -> Any:
            self._thread.spend(DECISION_SECONDS)
            return fn(*args, **kwargs)

        return self._thread.submit(decide)


class TimedMemory(EmulatedMemory):
    """Moves take the time of ``thread``, once there is one."""

    def __init__(self) -> None:
        super().__init__(BLOCK_BYTES)
        self.thread: Thread | None = None
        self.bytes_per_s = move_gbps() * 1e9

    def place(self, managed: ManagedRange, spans: Sequence[Span], location: Location) -> None:
        super().place(managed, spans, location)
        if self.thread is not None:
            self.thread.spend(sum(span.nbytes for span in spans) / self.bytes_per_s)


@dataclass(frozen=True)
class Arrangement:
    """How decisions and moves share time. ``burst``: seconds for which an unused allowance of moves accumulates."""

    name: str
    threads: int
    burst: float


ARRANGEMENTS = (
    Arrangement("one thread, bursts of 0.25 s", 1, 0.25),
    Arrangement("two threads, bursts of 0.25 s", 2, 0.25),
    Arrangement("two threads, bursts of 0.02 s", 2, 0.02),
)


@dataclass(frozen=True)
class Case:
    """The hit rate and the seconds of a step: without time for moves and decisions, of each arrangement, and with the residents
    that the warm-up chose."""

    trace: str
    batch: int
    residency: float
    hit_rate: list[float]
    step_seconds: list[float]

    @property
    def shown(self) -> str:
        return ", ".join(cells(self))

    def __str__(self) -> str:
        return f"{self.trace}, batch {self.batch}, {self.residency:.0%}"


def cells(case: Case) -> list[str]:
    return [f"{100 * hit:.1f} / {1e3 * seconds:.2f}" for hit, seconds in zip(case.hit_rate, case.step_seconds, strict=True)]


def step_seconds(missed: float) -> float:
    """Of a step that reads so many experts in place."""
    return COMPUTE_SECONDS + missed * EXPERT_BYTES / (LINK_GBPS * 1e9)


def static(workload: Workload, residency: float) -> tuple[float, float]:
    """As ``served``, of the residents that the warm-up chose."""
    policy = workload.policy("static", residency)
    missed = sum(int(np.count_nonzero(policy.step(activated).read)) for activated in workload.scored)
    return 1 - missed / max(int(np.count_nonzero(workload.scored)), 1), step_seconds(missed / len(workload.scored))


def served(workload: Workload, residency: float, arrangement: Arrangement | None) -> tuple[float, float]:
    """The hit rate and the mean seconds of a scored step; None: moves and decisions take no time."""
    clock, memory = Clock(), TimedMemory()
    mover, decider = Thread(clock), Thread(clock)
    timed: dict[str, Any] = {}
    if arrangement is not None:
        decides = Deciding(mover if arrangement.threads == 1 else decider)
        timed = {"clock": clock, "executor": mover, "decider": decides}
    shipped = adaptation.BURST_SECONDS
    adaptation.BURST_SECONDS = shipped if arrangement is None else arrangement.burst
    try:
        policy = Managed(workload.shape, int(workload.capacity(residency)[0]), (EXPERT_BYTES,), memory=memory, **timed)
    finally:
        adaptation.BURST_SECONDS = shipped
    memory.thread = mover
    seen = [policy.residency()]

    def keep() -> None:
        seen[0] = policy.residency()

    mover.before_task = keep
    hits, uses, began = 0, 0, 0.0
    for number, activated in enumerate((*workload.warmup, *workload.scored)):
        scored = number >= len(workload.warmup)
        if number == len(workload.warmup):
            began = clock.now
        mover.run()
        decider.run()
        resident = seen[0] if mover.busy else policy.residency()
        missed = int(np.count_nonzero(activated & ~resident))
        policy.serve(activated)
        clock.now += step_seconds(missed)
        if scored:
            uses += int(np.count_nonzero(activated))
            hits += int(np.count_nonzero(activated)) - missed
    return hits / max(uses, 1), (clock.now - began) / len(workload.scored)


def work(paths: Sequence[Path]) -> list[tuple[Source]]:
    """Whole traces: moves take as long as all layers need."""
    return [(Source(path.stem, None, SEED, partial(Trace.load, path)),) for path in paths]


def run(source: Source) -> list[Case]:
    trace, cases = source.trace(), []
    for batch, residency in product(BATCHES, RESIDENCIES):
        workload = Workload.of(trace, batch)
        found = [served(workload, residency, arrangement) for arrangement in (None, *ARRANGEMENTS)]
        found.append(static(workload, residency))
        hits, seconds = zip(*found, strict=True)
        cases.append(Case(source.name, batch, residency, list(hits), list(seconds)))
    return cases


def markdown(cases: Sequence[Case]) -> str:
    names = ["no time", *(arrangement.name for arrangement in ARRANGEMENTS), "static"]
    lost = np.array([np.array(case.step_seconds) / case.step_seconds[0] for case in cases])
    fewer = np.array([case.step_seconds[len(ARRANGEMENTS)] <= case.step_seconds[-1] for case in cases])
    return "\n".join([
        "# Residents that follow the traffic, where moves and decisions take time\n",
        "Made by `python -m benchmarks.policy moving TRACES`. A step computes for "
        f"{1e3 * COMPUTE_SECONDS:g} ms and reads missed experts of\n{EXPERT_BYTES >> 20} MiB at {LINK_GBPS:g} GB/s. A "
        f"decision takes {1e3 * DECISION_SECONDS:g} ms, and a byte moved as long as on an H100: {move_gbps():.2f} "
        "GB/s,\nup and down together ([default.json](../2026-11-26-nvidia-h100/default.json)). `static` keeps the "
        "residents of the\nwarm-up; "
        f"with {ARRANGEMENTS[-1].name}, {int(fewer.sum())} of {len(cases)} cases take at most its time.\n",
        grid(["time of a step, over that without time for moves", *names], [
            ["mean", *(f"{one:.3f}" for one in lost.mean(axis=0))],
            ["worst", *(f"{one:.3f}" for one in lost.max(axis=0))],
        ]),
        "## By case: hit rate in %, and ms of a step\n",
        grid(["trace", "batch", "resident", *names], [
            [case.trace, case.batch, f"{case.residency:.0%}", *cells(case)] for case in cases
        ]),
    ])  # fmt: skip
