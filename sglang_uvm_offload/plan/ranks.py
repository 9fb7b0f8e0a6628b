"""Whether ranks can divide a model, and which other ranks could."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice

from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.inputs import Parallel

SUGGESTED = 2
"""The number of alternatives that are named."""
TRIED = 8
"""The number of alternatives that are planned, to find those that fit."""
MAX_TP = 64


def shape_problems(case: Case) -> list[str]:
    """Why these ranks cannot divide the model, or the model cannot serve the workload, however much memory there is."""
    m, p, out = case.model, case.parallel, []
    if min(p.tp, p.ep, p.pp, p.dp) < 1:
        return ["--tp-size, --ep-size, --pp-size and --dp-size must be 1 or more"]
    if p.ranks > case.machine.gpus:
        out.append(f"{p.ranks} ranks need {p.ranks} GPUs, and the machine has {case.machine.gpus}")
    if p.tp % p.ep:
        out.append(f"--ep-size {p.ep}: must divide --tp-size {p.tp}")
    if p.dp_attention and p.tp % p.dp:
        out.append(f"--dp-size {p.dp} with --enable-dp-attention: must divide --tp-size {p.tp}")
    if out:
        return out
    if m.num_experts % p.ep:
        out.append(f"--ep-size {p.ep}: does not divide the model's {m.num_experts} experts")
    if m.heads % p.attn_tp:
        out.append(f"--tp-size {p.tp}: its {p.attn_tp} attention ranks do not divide the model's {m.heads} heads")
    if p.pp > m.num_layers:
        out.append(f"--pp-size {p.pp}: the model has {m.num_layers} layers")
    if m.quantization != "mxfp4" and m.expert_size % (p.moe_tp * m.scale_block):
        cut = f"{p.moe_tp} ranks do not divide an expert's {m.expert_size} hidden units"
        blocks = f" into blocks of {m.scale_block} that share a scale" if m.scale_block > 1 else ""
        out.append(f"--tp-size {p.tp} with --ep-size {p.ep}: {cut}{blocks}")
    if case.workload.context_length > m.context_length:
        out.append(f"--context-length {case.workload.context_length}: the model allows {m.context_length}")
    if case.workload.speculative and not m.draft_layers:
        out.append("the checkpoint has no draft layers of its own to count")
    drafted = case.workload.draft_num_resident
    if drafted is not None and not case.workload.speculative:
        out.append(f"--draft-num-resident {drafted}: has no effect without --speculative")
    if drafted is not None and drafted > m.num_experts:
        out.append(f"--draft-num-resident {drafted}: the model has {m.num_experts} experts a layer; give at most as many")
    if case.workload.speculative and case.workload.draft_tokens < 2:
        return [*out, "--speculative-num-draft-tokens 1: drafts nothing; give 2 or more"]
    accepted, drafts = case.assumed.accepted_tokens, case.workload.draft_tokens
    if case.workload.speculative and not 1 <= accepted <= drafts:
        out.append(
            f"--accepted-tokens {accepted:g}: a step with --speculative-num-draft-tokens {drafts} yields 1 to {drafts} tokens"
        )
    return out


def other_ranks(case: Case) -> list[str]:
    """Flags of other rank layouts on this machine that divide the model and fit. Layouts that use most GPUs come first."""
    p = case.parallel
    if min(p.tp, p.ep, p.pp, p.dp) < 1:
        return []
    others = (dataclasses.replace(case, parallel=parallel) for parallel in _parallels(p, case.machine.gpus))
    dividing = islice((other for other in others if not shape_problems(other)), TRIED)
    return [_named(other) for other in dividing if other.fits][:SUGGESTED]


def _named(case: Case) -> str:
    return f"{rank_flags(case.parallel)} ({case.parallel.ranks} of {case.machine.gpus} GPUs)"


def rank_flags(parallel: Parallel) -> str:
    """The flags for tensor, expert and pipeline ranks; those at SGLang's default of 1 are left out, except ``--tp-size``."""
    ep = f" --ep-size {parallel.ep}" if parallel.ep > 1 else ""
    return f"--tp-size {parallel.tp}{ep}" + (f" --pp-size {parallel.pp}" if parallel.pp > 1 else "")


def _parallels(like: Parallel, gpus: int) -> Iterator[Parallel]:
    """Other rank layouts on at most ``gpus`` GPUs, without pipeline stages or with as many as there are GPUs for. Layouts with
    most GPUs come first, then those with fewest stages."""
    each = gpus // like.replicas
    found = {
        dataclasses.replace(like, tp=tp, ep=ep, pp=pp)
        for tp in range(1, min(each, MAX_TP) + 1)
        for ep in {1, tp}
        for pp in {1, each // tp}
    }
    yield from sorted(found, key=lambda p: (-p.ranks, p.pp, p.ep))
