"""CPU time of each tier of tests and of everything that they start: printed at the end, and limited if all tiers run.

CPU time excludes waiting, so it grows only with the suite and with a slower machine. A loop that is timed throughout divides
out the machine's speed. Beside other programs the same tests take far more, which the loop does not show, so no limit applies
there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

CEILINGS = {"unit": 450, "compiled": 750, "engine": 2000}
"""CPU seconds that a tier may take on the machine where the loop takes ``LOOP_SECONDS``: at least 1.5 times what tests took,
because runs differ by more than the loop shows. The same tests took 1.4 times as long there on another day."""
LOOP_SECONDS = 0.0031
LOOP_PASSES = 30_000
LOOP_PAGES_BYTES = 2 << 20
OTHERS = 0.25
"""The share of the run's own CPU time that other programs may take. Above it, the run proves nothing."""
LISTED = 15
TICKS = os.sysconf("SC_CLK_TCK")


class ProcessorTime:
    """A pytest plugin for each worker and for the controller, which adds up their times."""

    def __init__(self, limited: bool):
        self.limited = limited
        self.seconds: dict[str, float] = defaultdict(float)
        """Seconds by file."""
        self.loops: list[float] = []
        self._before: float | None = None
        self._own, self._machine = spent(), machine()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
        file = _file(item)
        if self._before is None:
            self.loops.append(loop())
            self._before = spent()
        result = yield
        if nextitem is None or _file(nextitem) != file:
            self.seconds[file] += max(0.0, spent() - self._before)  # can fall when a process group was killed
            self._before = None
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.limited and self._over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["processor_time"] = (dict(self.seconds), self.loops)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        seconds, loops = getattr(node, "workeroutput", {}).get("processor_time", ({}, []))
        for file, taken in seconds.items():
            self.seconds[file] += taken
        self.loops += loops

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.seconds:
            return
        terminalreporter.section(
            f"CPU time; this machine takes {self._slowness:.2f} times as long as the reference for the ceilings"
        )
        for taken, file in sorted(((taken, file) for file, taken in self.seconds.items()), reverse=True)[:LISTED]:
            terminalreporter.write_line(f"{taken:8.1f} s  {file}")
        over = self._over()
        if (share := self._others()) > OTHERS:
            terminalreporter.write_line(f"others took {share:.0%} of what this run did, so no ceiling applies")
        for tier, taken in self._tiers().items():
            line = f"tests/{tier}: {taken:.0f} s, there {taken / self._slowness:.0f} s of at most {CEILINGS[tier]}"
            terminalreporter.write_line(line, red=tier in over)

    @property
    def _slowness(self) -> float:
        return statistics.mean(self.loops) / LOOP_SECONDS

    def _others(self) -> float:
        """CPU time of other programs since the start, over this run's."""
        own = spent() - self._own
        return (machine() - self._machine - own) / own

    def _tiers(self) -> dict[str, float]:
        tiers: dict[str, float] = defaultdict(float)
        for file, taken in self.seconds.items():
            tiers[Path(file).parts[1]] += taken
        return tiers

    def _over(self) -> set[str]:
        """Returns the tiers above their ceilings."""
        if self._others() > OTHERS:
            return set()
        return {tier for tier, taken in self._tiers().items() if taken > CEILINGS[tier] * self._slowness}


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def loop() -> float:
    """Returns the CPU seconds of a fixed piece of work: counting, objects, and new memory pages."""
    before = time.process_time()
    total = 0
    for number in range(LOOP_PASSES):
        total += number
    objects = {number: str(number) for number in range(LOOP_PASSES // 10)}  # not tracked by the collector
    with mmap.mmap(-1, LOOP_PAGES_BYTES) as pages:
        for at in range(0, len(pages), mmap.PAGESIZE):
            pages[at] = len(objects) % 2
    return time.process_time() - before


def machine() -> float:
    """Returns the CPU seconds of all programs, plus time stolen by other machines on the host."""
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + sum(more)) / TICKS


def spent() -> float:
    """Returns the CPU seconds of this process and of everything that it started, ended or running."""
    mine = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in mine) + _taken_below(os.getpid())


def _taken_below(above: int) -> float:
    """Returns the CPU seconds of its descendants, and of the processes that these waited for."""
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    below: set[int] = set()
    known = {above}
    while more := {pid for pid, parent in parents.items() if parent in known} - below:
        below |= more
        known = more
    return sum(ticks[pid] for pid in below) / TICKS
