"""Tries all faults, or a sample, and writes what became of them: see scripts/faults.sh."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoints import unserved_models
from faults import cases, engines, servers
from faults.ranks import BAD, Fault, Outcome, Ranks, as_json

from benchmarks import reliability

Tried = tuple[str, str, str, str]
"""Where, kind, phase and what."""

WORKERS = 2
"""Ranks at a time. Servers have two ranks of their own, and run alone, as engines do."""

SHARES = {"ranks": 0.55, "engines": 0.2, "servers": 0.25}
"""Shares of the time."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="so many faults, drawn at random with the same seed each time")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no fault after so many minutes")
    parser.add_argument("--resume", action="store_true", help="keep the results without defects, and try the rest")
    parser.add_argument("--ranks-only", action="store_true", help="no SGLang")
    parser.add_argument("--out", type=Path, help="write only this JSON")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(unserved_models())
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    earlier = json.loads((options.out or reliability.RESULTS).read_text()) if options.resume else []
    earlier = [each for each in earlier if each["end"] not in BAD]
    tried = {(each["where"], each["kind"], each["phase"], each["what"]) for each in earlier}
    try:
        until = time.monotonic() + 60 * options.minutes
        outcomes = try_all(folder, options.sample, tried, until, not options.ranks_only)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    reliability.write([*earlier, *map(as_json, outcomes)], options.out)
    bad = [outcome for outcome in outcomes if outcome.end in BAD]
    for outcome in bad:
        print(
            f"{outcome.end}: {outcome.where} {outcome.kind}, {outcome.phase}: {outcome.what}\n{outcome.detail}", file=sys.stderr
        )
    print(f"{len(outcomes)} faults, {len(bad)} of them with a defect")
    return 1 if bad else 0


def try_all(folder: Path, sample: int | None, tried: set[Tried], until: float, with_sglang: bool) -> list[Outcome]:
    asked = {"engines": [*engines.faults()], "servers": [*servers.faults()]} if with_sglang else {}
    left = {where: faults for where, all_of_it in asked.items() if (faults := chosen(where, all_of_it, sample, tried))}
    outcomes = try_ranks(folder, sample, tried, end_of("ranks", [*left], until))
    for where, made in (("engines", engines.Engines), ("servers", servers.Servers)):
        if faults := left.pop(where, None):
            real = made(folder)
            try:
                real.reference()
                outcomes += try_some(real.judge, faults, end_of(where, [*left], until))
            finally:
                real.close()
    return outcomes


def try_ranks(folder: Path, sample: int | None, tried: set[Tried], until: float) -> list[Outcome]:
    (folder / "ranks").mkdir()
    first = Ranks(folder / "ranks", "1")
    try:
        wanted = chosen("ranks", [*cases.cuda_calls(first.census()), *cases.surroundings()], sample, tried)
        wanted += chosen("ranks with slots", [*cases.with_slots()], sample, tried)
        random.Random(0).shuffle(wanted)
        others = [Ranks(folder / "ranks", str(2 + i), left=first.left) for i in range(WORKERS - 1)]
        outcomes: list[Outcome] = []
        with ThreadPoolExecutor(WORKERS) as pool:
            parts = [wanted[i::WORKERS] for i in range(WORKERS)]
            for done in pool.map(try_some, [first.judge, *(ranks.judge for ranks in others)], parts, [until] * WORKERS):
                outcomes += done
        for ranks in others:
            ranks.close()
    finally:
        first.close()
    return outcomes


def end_of(where: str, later: Sequence[str], until: float) -> float:
    """When to begin no more of these, so that what comes later gets its share of the time that is left."""
    now = time.monotonic()
    return now + (until - now) * SHARES[where] / sum(SHARES[each] for each in (where, *later))


def chosen(where: str, faults: list[Fault], sample: int | None, tried: set[Tried]) -> list[Fault]:
    """In an order in which any beginning holds all kinds and phases."""
    random.Random(0).shuffle(faults)
    return [fault for fault in faults if (where, fault.kind, fault.phase, fault.what) not in tried][:sample]


def try_some(judge: Callable[[Fault], Outcome], faults: Sequence[Fault], until: float) -> list[Outcome]:
    outcomes = []
    for fault in faults:
        if time.monotonic() > until:
            break
        started = time.monotonic()
        outcome = judge(fault)
        outcome.seconds = round(time.monotonic() - started, 1)
        outcomes.append(outcome)
        print(f"{outcome.seconds:6.1f} s  {outcome.end:22} {outcome.kind}, {outcome.phase}: {outcome.what}", flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
