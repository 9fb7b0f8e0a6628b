"""Whether speculative decoding costs more than it gains. A step that verifies k tokens per request activates up to k times as
many experts, and reads the offloaded ones over the link even for tokens that are then rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.outcome import DraftSpeed, Speed
from sglang_uvm_offload.residency.budget import Division


def draft_note(case: Case, division: Division) -> str:
    """A one-line warning if drafts are predicted to slow decoding, for one request or for all; else "". If the machine's rates
    are unknown (0), a warning if drafts are predicted to read more bytes over the link per token."""
    for requests in sorted({1, case.workload.requests}):
        drafting, plain = (_decoding(case, division, requests, drafts) for drafts in (case.workload.draft_tokens - 1, 0))
        if reason := _worse(case, drafting, plain):
            return reason
    return ""


def _worse(case: Case, drafting: Speed, plain: Speed) -> str:
    draft_tokens, accepted = case.workload.draft_tokens, _accepted(case)
    more, fewer = (speed.missed_bytes / speed.requests / each for speed, each in ((drafting, accepted), (plain, 1)))
    known = case.machine.link_gbps > 0
    if more <= fewer or (known and drafting.decode_tokens_s >= plain.decode_tokens_s):
        return ""
    cost = f"{more / 1e6:.0f} MB over the link for each token, and {fewer / 1e6:.0f} MB without them"
    speed = f": {drafting.decode_tokens_s:.1f} tokens a second, and {plain.decode_tokens_s:.1f} without them" if known else ""
    counted = f"{drafting.requests} concurrent request{'s' if drafting.requests > 1 else ''}"
    return (
        f"drafts are predicted to cost more than they gain with this residency and {counted}{speed}; {cost} (assumed: "
        f"{accepted:g} of {draft_tokens} verified tokens are kept, and the lowest measured hit rate, {drafting.hit_rate:.0%}); "
        "serve without --speculative-algorithm, verify fewer tokens, or keep more experts resident"
    )


def draft_speeds(case: Case, division: Division, hit_rate: float | None = None) -> tuple[DraftSpeed, ...]:
    """Decode speeds with 0 draft tokens up to the workload's number, for one request and for all. The machine's rates must be
    known. ``hit_rate`` defaults to the lowest measured one."""
    found = []
    for requests in sorted({1, case.workload.requests}):
        for drafts in range(case.workload.draft_tokens):
            speed = _decoding(case, division, requests, drafts, hit_rate)
            found.append(DraftSpeed(requests, drafts, speed.decode_tokens_s))
    return tuple(found)


def fastest_drafts(speeds: Sequence[DraftSpeed]) -> list[str]:
    """One line per number of requests, naming the fastest number of draft tokens."""
    lines = []
    for requests, group in groupby(speeds, key=lambda speed: speed.requests):
        each = list(group)
        best = max(each, key=lambda speed: speed.decode_tokens_s)
        rates = ", ".join(f"{speed.drafts}: {speed.decode_tokens_s:.1f}" for speed in each)
        lines.append(
            f"draft tokens with {requests} request{'s' if requests > 1 else ''}: fastest with {best.drafts} a step, given: "
            f"{each[-1].drafts} (predicted tok/s by their number: {rates})"
        )
    return lines


def _accepted(case: Case) -> float:
    return min(case.assumed.accepted_tokens, case.workload.draft_tokens)


def _kept(case: Case, drafts: int) -> float:
    """Tokens per request that a step with ``drafts`` draft tokens keeps. Every draft token has the same acceptance rate, chosen
    to match the assumed tokens at the workload's number of draft tokens."""
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        enough = sum(share**position for position in range(case.workload.draft_tokens)) >= _accepted(case)
        low, high = (low, share) if enough else (share, high)
    return sum(high**position for position in range(drafts + 1))


def _decoding(case: Case, division: Division, requests: int, drafts: int, hit_rate: float | None = None) -> Speed:
    workload = replace(case.workload, speculative=drafts > 0, draft_tokens=drafts + 1)
    of = case if drafts else replace(case, workload=replace(workload, other_drafts=False))
    of = replace(of, assumed=replace(case.assumed, accepted_tokens=_kept(case, drafts)))
    known = case.machine.link_gbps > 0
    machine = case.machine if known else replace(case.machine, link_gbps=1, hbm_gbps=1, tflops=1)
    share = case.measured_hit_rates(division, requests).lowest.rate if hit_rate is None else hit_rate
    chunk = case.defaults.chunked_prefill_size
    return of.speed_model(machine).predict("", share, division.num_resident, workload, requests, chunk, slots=division.slots)
