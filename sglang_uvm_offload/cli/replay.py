"""The ``replay`` command: a routing trace through the shipped policy and the baselines, as a table or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_uvm_offload.replay.policies import EXPERT_BYTES, LINK_GBPS, POLICIES
from sglang_uvm_offload.routing.trace import Trace
from sglang_uvm_offload.units import size

if TYPE_CHECKING:
    from sglang_uvm_offload.replay.simulator import Replay

MAX_BATCH = 4096
"""More requests than a server runs at once. Each slot takes memory in every step of the replay, idle or not."""
SMALLEST, LARGEST = 1e-6, 1e6
"""Limits of --link-gbps and --expert-mib: beyond any hardware, and results stay finite and in whole bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE.npz", help="ids[token, layer, k], seq_len, num_experts")
    parser.add_argument("--residency", type=float, required=True, help="share of each layer's experts in VRAM, 0 to 1")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="repeatable (default: all)")
    parser.add_argument("--batch", type=int, default=1, help="concurrent requests (default 1)")
    parser.add_argument("--warmup-fraction", type=float, default=0.5, help="share of requests for the warm-up (default 0.5)")
    parser.add_argument(
        "--link-gbps", type=float, default=LINK_GBPS, help="10^9 bytes a second over PCIe (default %(default)g, assumed)"
    )
    parser.add_argument("--expert-mib", type=float, default=EXPERT_BYTES / 2**20, help="MiB per expert (default %(default)g)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    if found := problems(args):
        for problem in found:
            print(f"cannot replay {args.trace}: {problem}", file=sys.stderr)
        return 2
    from sglang_uvm_offload.replay.simulator import replay

    try:
        trace = Trace.load(args.trace)
        results = [
            replay(
                trace,
                policy,
                args.residency,
                args.batch,
                args.warmup_fraction,
                args.link_gbps,
                int(args.expert_mib * 2**20),
            )
            for policy in args.policy or POLICIES
        ]
    except (ValueError, OSError, MemoryError) as error:
        print(f"cannot replay {args.trace}: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"trace": str(args.trace), "results": [result.as_json() for result in results]}, indent=1))
    else:
        print(table(results))
    return 0


def problems(args: argparse.Namespace) -> list[str]:
    """The problems of the flags."""
    amount = f"({SMALLEST:g} to {LARGEST:g})"
    checks = [
        ("--residency", args.residency, 0 <= args.residency <= 1, "must be 0..1"),
        ("--warmup-fraction", args.warmup_fraction, 0 <= args.warmup_fraction <= 1, "must be 0..1"),
        ("--batch", args.batch, 1 <= args.batch <= MAX_BATCH, f"must be at least 1 and at most {MAX_BATCH}"),
        ("--link-gbps", args.link_gbps, SMALLEST <= args.link_gbps <= LARGEST, f"must be above 0 GB/s {amount}"),
        ("--expert-mib", args.expert_mib, SMALLEST <= args.expert_mib <= LARGEST, f"must be above 0 MiB {amount}"),
    ]
    return [f"{flag} {right}, not {value}" for flag, value, good, right in checks if not good]


def table(results: list[Replay]) -> str:
    rows = [("policy", "hit rate", "moves/step", "read/step", "moved/step", "link time/step")]
    rows += [
        (
            result.policy,
            f"{100 * result.hit_rate:.1f} %",
            f"{result.moves_per_step:.3f}",
            size(result.read_bytes_per_step),
            size(result.moved_bytes_per_step),
            f"{1e3 * result.step_seconds:.3f} ms",
        )
        for result in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
