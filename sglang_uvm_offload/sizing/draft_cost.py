"""Whether drafts cost more than they bring. A step that verifies k tokens of a request activates up to k times as many experts,
and reads those that are offloaded over the link, also for the tokens that are then rejected."""

from __future__ import annotations

from dataclasses import replace

from sglang_uvm_offload.sizing.plan import Speed
from sglang_uvm_offload.sizing.rank_memory import Case
from sglang_uvm_offload.sizing.speed import predict


def draft_note(case: Case, rows: int) -> str:
    """One line if drafts are predicted to slow decoding with so many ``rows`` in VRAM, for one request or for all; else empty.
    Where the machine's rates are unknown (0), if they are predicted to read more over the link for each token."""
    for requests in sorted({1, case.workload.requests}):
        drafting, plain = (_decoding(case, rows, requests, on) for on in (True, False))
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
        f"drafts are predicted to cost more than they bring with this residency and {counted}{speed}; {cost} (assumed: "
        f"{accepted:g} of {draft_tokens} verified tokens are kept, and the lowest measured hit rate, {drafting.hit_rate:.0%}); "
        "serve without --speculative-algorithm, verify fewer tokens, or keep more experts resident"
    )


def _accepted(case: Case) -> float:
    return min(case.assumed.accepted_tokens, case.workload.draft_tokens)


def _decoding(case: Case, rows: int, requests: int, drafts: bool) -> Speed:
    workload = replace(case.workload, speculative=drafts)
    of = case if drafts else replace(case, workload=replace(workload, other_drafts=False), draft=None)
    known = case.machine.link_gbps > 0
    machine = case.machine if known else replace(case.machine, link_gbps=1, hbm_gbps=1, tflops=1)
    share = case.measured_hit_rates(rows, requests).lowest.rate
    return predict(
        *("", share, case.residents_of(rows), case.model.num_experts, case.model.top_k),
        *([of.cost(stage) for stage in range(case.parallel.pp)], machine, workload, case.parallel, requests),
        *(case.defaults.chunked_prefill_size, replace(case.assumed, accepted_tokens=_accepted(case))),
        slots=case.slots_of(rows),
    )
