"""Fuzzes everything that reads external input, and prints a table. Run it with scripts/fuzz.sh."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SECONDS, WAITING_SECONDS = 20, 300
"""An input fails if it takes more CPU time than ``SECONDS`` or more wall time than ``WAITING_SECONDS``."""
BATCH = 250


class Batch(NamedTuple):
    """Inputs ``first`` to ``first + count - 1`` of a target, each made from its number and ``seed``."""

    target: str
    seed: int
    first: int
    count: int


class Outcome(NamedTuple):
    target: str
    refused: int
    accepted: int
    failures: list[tuple[str, str]]
    """(number of the input, traceback)"""


class TooLong(BaseException):
    """Raised when an input takes too long. Not an ``Exception``, so that no ordinary handler hides it."""


def _too_long(number: int, _: object) -> None:
    raise TooLong(f"over {SECONDS} seconds" if number == signal.SIGPROF else f"waited over {WAITING_SECONDS} seconds")


def _limit(seconds: float, waiting: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, waiting)


def run(batch: Batch) -> Outcome:
    """Runs a batch in this process."""
    import fuzz_targets

    signal.signal(signal.SIGPROF, _too_long)
    signal.signal(signal.SIGALRM, _too_long)
    counts: Counter[bool] = Counter()
    failures = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "input")
        for number in range(batch.first, batch.first + batch.count):
            folder.mkdir()
            _limit(SECONDS, WAITING_SECONDS)
            try:
                counts[fuzz_targets.run(batch.target, f"{batch.seed} {number}", folder)] += 1
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001 -- every other outcome is a finding
                failures.append((str(number), traceback.format_exc()))
            finally:
                _limit(0, 0)
            shutil.rmtree(folder)
    return Outcome(batch.target, counts[False], counts[True], failures)


def batches(targets: Sequence[str], inputs: int, seed: int) -> Iterator[Batch]:
    """Yields ``inputs`` inputs, equally many per target, in turn."""
    each = -(-inputs // len(targets))
    for first in range(0, each, BATCH):
        for target in targets:
            yield Batch(target, seed, first, min(BATCH, each - first))


def tally(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Returns counts by target: inputs, refused, accepted, tracebacks."""
    counts = {}
    for name in dict.fromkeys(outcome.target for outcome in outcomes):
        of = [outcome for outcome in outcomes if outcome.target == name]
        refused, accepted, failed = sum(o.refused for o in of), sum(o.accepted for o in of), sum(len(o.failures) for o in of)
        counts[name] = {
            "inputs": refused + accepted + failed,
            "refused": refused,
            "accepted": accepted,
            "tracebacks": failed,
        }
    return counts


def table(outcomes: Sequence[Outcome]) -> str:
    counts = tally(outcomes)
    rows = [("target", *next(iter(counts.values()))), *((name, *map(str, of.values())) for name, of in counts.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


class Failures:
    """Keeps one failure per target and per place in the code."""

    def __init__(self) -> None:
        self._places: set[tuple[str, str]] = set()

    def new(self, outcome: Outcome) -> Iterator[str]:
        """Yields failures in places that no earlier outcome had."""
        for number, text in outcome.failures:
            files = [line for line in text.splitlines() if line.startswith("  File")]
            place = (outcome.target, files[-1] if files else text)
            if place not in self._places:
                self._places.add(place)
                yield f"{outcome.target}, input {number}:\n{text}"


def shown(outcomes: Iterable[Outcome], wanted: int) -> Iterator[Outcome]:
    """Passes outcomes through, and prints each new failure and occasional progress on stderr."""
    failures, done, reported = Failures(), 0, 0
    for outcome in outcomes:
        for failure in failures.new(outcome):
            print(f"\n{failure}", file=sys.stderr, flush=True)
        done += outcome.refused + outcome.accepted + len(outcome.failures)
        if done >= reported + wanted / 20:
            reported = done
            print(f"{done:,} of {wanted:,} inputs", file=sys.stderr, flush=True)
        yield outcome


def write(out: Path, seed: int, counts: dict[str, dict[str, int]], order: Sequence[str]) -> None:
    """Writes the counts, and keeps the file's entries of other targets if they used the same seed."""
    kept = json.loads(out.read_text()) if out.exists() else {"seed": seed, "targets": {}}
    counts = (kept["targets"] if kept["seed"] == seed else {}) | counts  # type: ignore[operator]
    out.write_text(
        json.dumps({"seed": seed, "targets": {name: counts[name] for name in order if name in counts}}, indent=1) + "\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzzes. Returns 1 if an input failed."""
    import fuzz_targets

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="?", type=int, default=1_000_000, help="inputs over all targets (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per CPU)")
    parser.add_argument("--target", action="append", choices=fuzz_targets.TRIES, help="repeatable (default: all)")
    parser.add_argument("--out", type=Path, help="also write the table to this JSON, for benchmarks/reliability.py")
    args = parser.parse_args(argv)
    wanted = list(batches(args.target or list(fuzz_targets.TRIES), args.inputs, args.seed))
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=40) as pool:
        outcomes = list(shown(pool.imap_unordered(run, wanted), sum(batch.count for batch in wanted)))
    outcomes.sort(key=lambda outcome: list(fuzz_targets.TRIES).index(outcome.target))
    print(table(outcomes))
    if args.out is not None:
        write(args.out, args.seed, tally(outcomes), list(fuzz_targets.TRIES))
    return 1 if any(outcome.failures for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
