"""Whether drafts cost more than they bring. A step that verifies k tokens of a request activates up to k times as many experts,
and reads those that are offloaded over the link, also for the tokens that are then rejected."""

from __future__ import annotations

from dataclasses import replace

from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.outcome import Speed
from sglang_uvm_offload.residency.budget import Division


def draft_note(case: Case, division: Division) -> str:
    """One line if drafts are predicted to slow decoding, for one request or for all; else empty. Where the machine's rates are
    unknown (0), if they are predicted to read more over the link for each token."""
    for requests in sorted({1, case.workload.requests}):
        if reason := _worse(case, *(_decoding(case, division, requests, drafting) for drafting in (True, False))):
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
        f"drafts are predicted to cost more than they bring with this residency and {counted}{speed}; {cost} (assumed: "
        f"{accepted:g} of {draft_tokens} verified tokens are kept, and the lowest measured hit rate, {drafting.hit_rate:.0%}); "
        "serve without --speculative-algorithm, verify fewer tokens, or keep more experts resident"
    )


def _accepted(case: Case) -> float:
    return min(case.assumed.accepted_tokens, case.workload.draft_tokens)


def _decoding(case: Case, division: Division, requests: int, drafting: bool) -> Speed:
    workload = replace(case.workload, speculative=drafting)
    of = case if drafting else replace(case, workload=workload)
    of = replace(of, assumed=replace(case.assumed, accepted_tokens=_accepted(case)))
    known = case.machine.link_gbps > 0
    machine = case.machine if known else replace(case.machine, link_gbps=1, hbm_gbps=1, tflops=1)
    hit_rate = case.measured_hit_rates(division, requests).lowest.rate
    chunk = case.defaults.chunked_prefill_size
    return of.speed_model(machine).predict("", hit_rate, division.num_resident, workload, requests, chunk, slots=division.slots)
