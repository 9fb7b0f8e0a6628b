"""Replays routing, and writes the figures and tables of one study below ``benchmarks/results``.

    python -m benchmarks.policy residents TRACE.npz [TRACE.npz ...] [--jobs 2] [--tunings] [--decisions]
    python -m benchmarks.policy slots|splits|prompts|moving [TRACE.npz ...] [--jobs 2]

The module of a study says what it compares. `residents` and `moving` take traces only; the others also
generate routing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.policy import moving, prompts, residents, slots, splits
from sglang_uvm_offload.routing.trace import Trace, TraceError

RESULTS = Path(__file__).resolve().parents[1] / "results"
STUDIES: dict[str, Any] = {"slots": slots, "splits": splits, "prompts": prompts, "moving": moving}


def study(name: str, paths: Sequence[Path], jobs: int, out: Path) -> None:
    """Write ``name.json``, one case a line, and ``name.md``."""
    of, cases, started = STUDIES[name], list[Any](), time.perf_counter()
    with ProcessPoolExecutor(jobs) as pool:
        for done in (pool.map if jobs > 1 else map)(of.run, *zip(*of.work(paths), strict=True)):
            cases += done
            print(f"{done[0]}: {done[0].shown}  ({time.perf_counter() - started:.0f} s)", flush=True)
    lines = ",\n".join(json.dumps(asdict(case)) for case in cases)
    (out / f"{name}.json").write_text(f"[\n{lines}\n]\n")
    (out / f"{name}.md").write_text(of.markdown(cases))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=("residents", *STUDIES))
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, help="the folder of the study's pages")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--tunings", action="store_true", help="residents: also with other constants and intervals: hours")
    parser.add_argument("--decisions", action="store_true", help="residents: also time decisions, which needs a quiet machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="residents: write every figure to this file too")
    args = parser.parse_args(arguments)
    of_residents = args.study == "residents"
    problems = [] if args.jobs > 0 else [f"--jobs must be at least 1, not {args.jobs}"]
    of_policy = of_residents or args.study == "moving"
    if of_policy and not args.traces:
        problems.append(f"{args.study} needs a trace: give TRACE.npz")
    if not of_residents and (args.tunings or args.decisions or args.json):
        problems.append("--tunings, --decisions and --json are options of residents")
    for path in args.traces:
        try:
            Trace.load(path)
        except (TraceError, OSError) as error:
            problems.append(f"{path}: {error}")
    if problems:
        parser.error("; ".join(problems))
    out = args.out or RESULTS / ("policy" if of_policy else "slots")
    out.mkdir(parents=True, exist_ok=True)
    if of_residents:
        traces = {path.stem: Trace.load(path) for path in args.traces}
        residents.write(traces, out, args.jobs, args.tunings, args.decisions, args.json)
    else:
        study(args.study, args.traces, args.jobs, out)


if __name__ == "__main__":
    main()
