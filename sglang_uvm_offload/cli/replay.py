"""The ``replay`` command: replays a routing trace through the shipped policy and the baselines, as a table or JSON.

``--slots`` compares splits of VRAM between residents and slots; ``--into`` stores the best split in a profile.
``--draft-acceptance`` shows how much each number of draft tokens reads per kept token. For a trace with guesses, a second table
shows how many of the misses they foresee.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import asdict

from sglang_uvm_offload.cli.terminal import complain, say
from sglang_uvm_offload.files.kinds import mistaken
from sglang_uvm_offload.replay import room
from sglang_uvm_offload.replay.policies import AHEAD, EXPERT_BYTES, LINK_GBPS, OFFERED, POLICIES, SHIPPED, SLOTS
from sglang_uvm_offload.replay.results import DraftReads, Foreseen, Replay, Scope, Split
from sglang_uvm_offload.routing.profile import Profile, ProfileError, reason
from sglang_uvm_offload.routing.profile_file import add_slot_share
from sglang_uvm_offload.routing.trace import Trace
from sglang_uvm_offload.units import size

MAX_BATCH = 4096
"""More requests than a server runs at once. Each takes memory in every step of the replay, even when idle."""
MAX_DRAFTS = 64
SMALLEST, LARGEST = 1e-6, 1e6
"""Limits of --link-gbps, --expert-mib and --step-ms: beyond any hardware, but results stay finite and whole bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", type=Path, metavar="TRACE.npz", help="a trace with ids[token, layer, k], seq_len and num_experts"
    )
    parser.add_argument("--residency", type=float, required=True, help="share of each layer's experts in VRAM, 0 to 1")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="a policy to replay; repeatable (default: all)")
    parser.add_argument("--batch", type=int, default=1, help="concurrent requests (default 1)")
    parser.add_argument(
        "--warmup-fraction", type=float, default=0.5, help="share of requests used for the warm-up (default 0.5)"
    )
    parser.add_argument(
        "--link-gbps", type=float, help=f"10^9 bytes a second over PCIe (default {LINK_GBPS:g}, assumed: PCIe 5 x16)"
    )
    parser.add_argument("--expert-mib", type=float, help=f"MiB per expert (default {EXPERT_BYTES / 2**20:g}, assumed)")
    parser.add_argument(
        "--slots",
        action="store_true",
        help="print the link time of each split of the VRAM between residents and slots, and the best split",
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="PROFILE.npz",
        help="with --slots: store the best split for --residency in this profile, for --expert-offload-slots auto",
    )
    parser.add_argument(
        "--draft-acceptance",
        metavar="P1,P2,...",
        help="print the bytes and time per kept token for each number of draft tokens. Pi: the share of i-th draft tokens that "
        "are accepted if their predecessors were",
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        help="with --draft-acceptance: milliseconds of a step besides its reads over the link (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    if reasons := problems(args):
        for problem in reasons:
            complain(f"cannot replay {args.trace}: {problem}")
        return 2
    mode = _slots if args.slots else _replay if args.draft_acceptance is None else _drafts
    try:
        trace = Trace.load(args.trace)
        if args.into is not None:
            _check_into(args, trace)
        room.check(trace, args.batch, _policies(args) if mode is _replay else ())
        scored = _scope(args, trace)
        name, found, text = mode(args, trace, scored)
        guessed = _lookahead(args, trace, scored) if mode is _replay else []
    except (ValueError, OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        complain(f"cannot replay {args.trace}: {mistaken(args.trace, 'replay') or reason or type(error).__name__}")
        return 2
    finally:
        _progress("")
    content = {"trace": str(args.trace), "scored": scored, name: found}
    if guessed:
        content["lookahead"], text = guessed, f"{text}\n\n{lookahead_table(guessed, trace)}"
    say(json.dumps(content, indent=1, default=asdict) if args.json else f"{described(scored)}\n\n{text}")
    return 0


Found = tuple[str, Sequence[Replay | Split | DraftReads], str]
"""The name of the results in JSON, the results, and the table of them."""


def _policies(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(args.policy or POLICIES))


def _replay(args: argparse.Namespace, trace: Trace, scored: Scope) -> Found:
    from sglang_uvm_offload.replay.simulator import replay

    policies, results = _policies(args), []
    for index, policy in enumerate(policies):
        _progress(f"replaying {policy}, {index + 1} of {len(policies)} policies, {scored.steps + scored.warmup_steps} steps")
        results.append(replay(trace, policy, *_setting(args, scored)))
    return "results", results, f"{table(results)}\n\n{legend(policies)}"


def _lookahead(args: argparse.Namespace, trace: Trace, scored: Scope) -> list[Foreseen]:
    """Results for the policies that fetch experts; empty for a trace without guesses."""
    from sglang_uvm_offload.replay.lookahead import foreseen

    found: list[Foreseen] = []
    for policy in [] if trace.guesses is None else [name for name in (SLOTS, SHIPPED) if name in _policies(args)]:
        _progress(f"replaying {policy} with the guesses, {scored.steps + scored.warmup_steps} steps")
        found += foreseen(trace, policy, args.residency, args.batch, args.warmup_fraction)
    return found


def _slots(args: argparse.Namespace, trace: Trace, scored: Scope) -> Found:
    from sglang_uvm_offload.replay.simulator import slot_splits

    _progress(f"replaying each split of the VRAM, {scored.steps + scored.warmup_steps} steps")
    found = slot_splits(trace, *_setting(args, scored))
    if args.into is not None:
        _put_into(args, found)
    return "slots", found, slots_table(found)


def _drafts(args: argparse.Namespace, trace: Trace, scored: Scope) -> Found:
    from sglang_uvm_offload.replay.draft_steps import draft_reads

    _progress(f"replaying steps with draft tokens, {scored.steps + scored.warmup_steps} tokens")
    accepted, hardware = _accepted(args.draft_acceptance), (scored.link_gbps, scored.expert_bytes, args.step_ms or 0.0)
    found = draft_reads(trace, args.residency, accepted, args.warmup_fraction, *hardware)
    return "drafts", found, drafts_table(found, args.step_ms)


def _accepted(text: str) -> list[float]:
    """Raises ``ValueError``."""
    shares = [float(share) for share in text.split(",")]
    if len(shares) > MAX_DRAFTS or not all(0 <= share <= 1 for share in shares):
        raise ValueError(text)
    return shares


def _scope(args: argparse.Namespace, trace: Trace) -> Scope:
    from sglang_uvm_offload.replay.simulator import scope

    expert_bytes = None if args.expert_mib is None else int(args.expert_mib * 2**20)
    return scope(trace, args.residency, args.batch, args.warmup_fraction, args.link_gbps, expert_bytes)


def _setting(args: argparse.Namespace, scored: Scope) -> tuple[float, int, float, float, int]:
    """The arguments that ``replay`` and ``slot_splits`` share."""
    return args.residency, args.batch, args.warmup_fraction, scored.link_gbps, scored.expert_bytes


def _progress(text: str) -> None:
    """Replace the progress line with ``text``, on stderr and only if it is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def described(scored: Scope) -> str:
    """The scored part of the trace, and the assumptions."""
    link, expert = ("assumed; {} gives it" if yes else "as given" for yes in (scored.link_assumed, scored.expert_bytes_assumed))
    return "\n".join(
        [
            f"scored: {scored.requests} requests in {scored.steps} decode steps, up to {scored.batch} at once; warm-up: "
            f"{scored.warmup_requests} requests in {scored.warmup_steps} steps",
            f"in VRAM: {scored.num_resident} of {scored.num_experts} experts ({100 * scored.residency:g} %) of each of "
            f"{scored.layers} layers",
            f"link: {scored.link_gbps:g} GB/s (10^9 bytes a second), {link.format('--link-gbps')}",
            f"an expert: {size(scored.expert_bytes)}, {expert.format('--expert-mib')}",
        ]
    )


def legend(policies: Sequence[str]) -> str:
    """Which of ``policies`` a server offers, and the flag for each."""
    shipped = " (this plugin's adaptive policy)"
    lines = [f"{policy}{shipped if policy == SHIPPED else ''}: {OFFERED[policy]}" for policy in policies if policy in OFFERED]
    ahead = [policy for policy in policies if policy in AHEAD]
    others = [policy for policy in policies if policy not in (*OFFERED, *AHEAD)]
    lines += [f"for comparison, offered by no server: {', '.join(others)}"] if others else []
    lines += [f"upper bounds, which know the future: {', '.join(ahead)}"] if ahead else []
    return "\n".join(lines)


def _check_into(args: argparse.Namespace, trace: Trace) -> None:
    """Raise ``ValueError`` unless ``--into`` names a profile whose model has the trace's shape, and there is VRAM to split."""
    try:
        model = Profile.load(args.into).model
    except (ProfileError, OSError) as error:
        raise ValueError(f"--into {args.into}: {reason(error)}") from error
    has, wanted = (len(model.moe_layers), model.num_experts), (trace.num_layers, trace.num_experts)
    if has != wanted:
        shapes = [f"{layers} MoE layers of {experts} experts" for layers, experts in (has, wanted)]
        raise ValueError(f"--into {args.into}: its model has {shapes[0]}, but the trace has {shapes[1]}")
    rows = round(args.residency * trace.num_experts)
    if not 0 < rows < trace.num_experts:
        split = f"{rows} of {trace.num_experts} experts in VRAM, which leaves nothing to split"
        raise ValueError(f"--into {args.into}: --residency {args.residency:g} has {split}; give another value")


def _put_into(args: argparse.Namespace, found: Sequence[Split]) -> None:
    from sglang_uvm_offload.replay.slot_splits import best_split

    try:
        add_slot_share(args.into, args.residency, best_split(found).slot_share)
    except (ProfileError, OSError) as error:
        raise ValueError(f"--into {args.into}: {reason(error)}") from error


def problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the flags."""
    amount = f"({SMALLEST:g} to {LARGEST:g})"
    checks = [
        ("--residency", args.residency, 0 <= args.residency <= 1, "must be 0..1"),
        ("--warmup-fraction", args.warmup_fraction, 0 <= args.warmup_fraction <= 1, "must be 0..1"),
        ("--batch", args.batch, 1 <= args.batch <= MAX_BATCH, f"must be at least 1 and at most {MAX_BATCH}"),
        ("--link-gbps", args.link_gbps, _is_amount(args.link_gbps), f"must be above 0 GB/s {amount}"),
        ("--expert-mib", args.expert_mib, _is_amount(args.expert_mib), f"must be above 0 MiB {amount}"),
        ("--step-ms", args.step_ms, _is_amount(args.step_ms), f"must be above 0 ms {amount}"),
    ]
    found = [f"{flag} {right}, not {value}" for flag, value, good, right in checks if not good]
    if args.into is not None and not args.slots:
        found.append(f"--into {args.into}: needs --slots")
    if args.slots and args.policy:
        found.append("--slots replays its own splits of the VRAM; remove --policy")
    return found + _draft_problems(args)


def _draft_problems(args: argparse.Namespace) -> list[str]:
    given = args.draft_acceptance
    if given is None:
        return [] if args.step_ms is None else [f"--step-ms {args.step_ms:g}: needs --draft-acceptance"]
    found = []
    try:
        _accepted(given)
    except ValueError:
        found.append(f"--draft-acceptance must be up to {MAX_DRAFTS} shares from 0 to 1, separated by commas, not {given}")
    if args.slots or args.policy:
        found.append("--draft-acceptance replays residents that follow the traffic; remove --slots and --policy")
    if args.batch != 1:
        found.append(f"--draft-acceptance replays one request at a time; remove --batch {args.batch}")
    return found


def _is_amount(value: float | None) -> bool:
    return value is None or SMALLEST <= value <= LARGEST


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
    return _aligned(rows)


def lookahead_table(found: Sequence[Foreseen], trace: Trace) -> str:
    rows = [("misses of", "guesses", "layers ahead", "misses/step", "brought/step", "recall", "precision")]
    rows += [
        (
            each.policy,
            each.predictor,
            "" if each.distance is None else str(each.distance),
            f"{each.misses_per_step:.3f}",
            f"{each.brought_per_step:.3f}",
            f"{100 * each.recall:.1f} %",
            f"{100 * each.precision:.1f} %",
        )
        for each in found
    ]
    assert trace.guesses is not None
    folded = int(trace.guesses.folded.any(axis=1).sum())
    return (
        f"{_aligned(rows)}\n\nOf the layers that are guessed. What a guess brings is taken to be in time and evicts nothing.\n"
        f"In {folded} of {trace.num_layers} layers the earlier router's input was scaled by the ratio of both layers' norms."
    )


def drafts_table(found: Sequence[DraftReads], step_ms: float | None) -> str:
    rows = [("draft tokens", "kept/step", "read/step", "read/kept token", "time/kept token")]
    rows += [
        (
            str(each.drafts),
            f"{each.kept_per_step:.2f}",
            size(each.read_bytes_per_step),
            size(each.read_bytes_per_token),
            f"{1e3 * each.token_seconds:.3f} ms",
        )
        for each in found
    ]
    best = min(found, key=lambda each: each.token_seconds)
    beside = "the link alone; --step-ms adds the rest of a step" if step_ms is None else f"with {step_ms:g} ms a step beside"
    return (
        f"{_aligned(rows)}\n\nLeast time for a kept token: {best.drafts} draft tokens ({beside}).\n"
        "Residents follow the traffic (--expert-offload-adapt continuous). A rejected draft token counts with the routing of "
        "the token that the trace has in its place."
    )


def slots_table(found: Sequence[Split]) -> str:
    from sglang_uvm_offload.replay.slot_splits import best_split

    rows = [("VRAM in slots", "residents", "slots", "hit rate", "fills/step", "read/step", "link time/step")]
    rows += [
        (
            f"{100 * split.slot_share:.0f} %",
            str(split.residents),
            str(split.slots),
            f"{100 * split.hit_rate:.1f} %",
            f"{split.fills_per_step:.3f}",
            size(split.read_bytes_per_step),
            f"{1e3 * split.step_seconds:.3f} ms",
        )
        for split in found
    ]
    best = best_split(found)
    least = f"{100 * best.slot_share:.0f} % of the VRAM in slots ({best.residents} residents and {best.slots} slots a layer)"
    return f"{_aligned(rows)}\n\nLowest link time: {least}."


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
