"""Formatting a plan for people: the decision, memory and speeds, and the launch to paste."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from sglang_uvm_offload.plan.decision import decision
from sglang_uvm_offload.plan.draft_cost import fastest_drafts
from sglang_uvm_offload.plan.explanation import explanation
from sglang_uvm_offload.plan.machine import Machine
from sglang_uvm_offload.plan.outcome import Plan, Speed
from sglang_uvm_offload.plan.speed import HIDING_CHUNKS
from sglang_uvm_offload.plan.text_table import between, counted, table, two_digits
from sglang_uvm_offload.units import size

LAUNCH = "python -m sglang.launch_server"
LAUNCH_COLUMNS = 100

ROWS = (
    "of resident: of the speed with all experts in VRAM.",
    "Predictions of prefill are optimistic: docs/benchmarks.md.",
)
"""What the columns of the predicted speeds are."""


def render(plan: Plan, explain: bool = False) -> str:
    """The report in parts, divided by empty lines. ``explain``: with the formulas, assumptions and sources."""
    parts = [decision(plan), "\n".join([_setup(plan), *_memory(plan)]), _outcome(plan)]
    parts.append("\n".join(f"note: {note}" for note in plan.notes))
    if plan.speeds:
        lines = [*_legend(plan), *fastest_drafts(plan.draft_speeds), *_streaming(plan)]
        parts.append("\n".join([_speed(plan.speeds), *lines]))
    if plan.plain and (plan.offloads or not plan.fits):
        parts.append("To serve it with plain SGLang:\n" + _launch(plan.plain.environment, plan.plain.flags))
    if plan.flags:
        how = " offloaded" if plan.offloads else ""
        parts.append(f"To serve it{how}:\n" + _launch(plan.environment, plan.flags))
    if explain:
        parts += explanation(plan)
    elif plan.ranks:
        parts.append("--explain adds the memory part by part, formulas, assumptions and sources.")
    return "\n\n".join(part for part in parts if part)


def _setup(plan: Plan) -> str:
    machine, work, p = plan.machine, plan.workload, plan.parallel
    sizes = {"tp": p.tp, "ep": p.ep, "pp": p.pp, "dp": p.dp}
    ranks = ", ".join(f"{name} {number}" for name, number in sizes.items() if number > 1 or name == "tp")
    cache = "16 bits" if work.kv_cache_dtype == "auto" else work.kv_cache_dtype
    return table(
        [
            (
                "model",
                f"{plan.model}: {size(plan.weights_bytes)}, {plan.expert_bytes / plan.weights_bytes:.1%} of it routed experts; "
                f"quantisation: {plan.quantization}",
            ),
            (
                "",
                f"{plan.total_parameters / 1e9:.1f} billion parameters, {plan.active_parameters / 1e9:.1f} active for a token; "
                f"{plan.moe_layers} MoE layers of {plan.num_experts} experts, {plan.top_k} a token",
            ),
            (
                "machine",
                f"{machine.name}: {counted(machine.gpus, 'GPU')} of {size(machine.vram_bytes)}, host RAM "
                f"{size(machine.host_bytes)}{_host_rate(machine)}; {ranks}{' (attention)' if p.dp_attention else ''}",
            ),
            (
                "to serve",
                f"{counted(work.requests, 'request')}, context {work.context_length} tokens, KV cache in {cache}"
                + (", draft layers loaded" if work.speculative else ""),
            ),
        ]
    )


def _host_rate(machine: Machine) -> str:
    """The rate that decides the comparison with an engine on the CPU."""
    if not machine.host_gbps:
        return ", its rate unknown (--host-gbps)"
    return f" at {machine.host_gbps:.0f} GB/s{' (assumed; --host-gbps)' if machine.host_gbps_assumed else ''}"


def _memory(plan: Plan) -> list[str]:
    """The GPU that has least to spare, and the host RAM."""
    if not plan.fits or not plan.ranks:
        return []
    most = max(plan.ranks, key=lambda rank: rank.used_bytes)
    experts = most.resident_bytes + most.slot_bytes + most.stream_bytes
    weights = most.plain_weights + most.table_bytes
    parts = (
        (experts, "experts"),
        (weights, "other weights"),
        (most.kv_bytes, f"KV cache ({plan.kv_tokens} tokens)"),
        (plan.vram.sglang, "activations and CUDA graphs"),
    )
    listed = ", ".join(f"{size(nbytes)} {what}" for nbytes, what in parts)
    rest = plan.machine.vram_bytes - sum(nbytes for nbytes, _ in parts)
    return [
        f"VRAM      {size(plan.machine.vram_bytes)} per GPU: {listed}, {size(rest)} runtime, headroom and spare",
        f"host RAM  {size(plan.host_needed)} needed of {size(plan.machine.host_bytes)}",
    ]


def _outcome(plan: Plan) -> str:
    if plan.num_resident is not None:
        return "\n".join(
            [_fits(plan), *(["But this plan is useless:"] if plan.useless else []), *(f"  - {r}" for r in plan.useless)]
        )
    lines = ["It does not fit:", *(f"  - {problem}" for problem in plan.problems)]
    if plan.needs:
        lines += ["Any of these would be enough:", *(f"  - {need}" for need in plan.needs)]
    return "\n".join(lines)


def _fits(plan: Plan) -> str:
    """How many experts VRAM holds, and how."""
    of, share = f"of {plan.num_experts} experts a layer", f"({plan.rows / plan.num_experts:.0%})"
    if not plan.slots:
        return f"It fits: {plan.num_resident} {of} resident {share}."
    how = f"{plan.num_resident} resident and {plan.slots} as slots" if plan.num_resident else "all as slots"
    return f"It fits: VRAM for {plan.rows} {of} {share}, {how}."


def _speed(speeds: Sequence[Speed]) -> str:
    """One row for each number of requests, from the lowest to the highest prediction."""
    rows: list[tuple[str, ...]] = [("predicted", "hit rate", "missed/step", "decode", "of resident", "prefill", "of resident")]
    for requests, group in groupby(speeds, key=lambda speed: speed.requests):
        each = list(group)
        low, high = (choose(each, key=lambda speed: speed.decode_tokens_s) for choose in (min, max))
        rows.append(
            (
                counted(requests, "request"),
                between(low.hit_rate, high.hit_rate, ".1%"),
                f"{between(high.missed_bytes / 1e6, low.missed_bytes / 1e6, '.0f')} MB",
                f"{between(low.least.decode_tokens_s, high.decode_tokens_s, '.1f')} tok/s",
                between(low.least.decode_ratio, high.decode_ratio, ".0%"),
                f"{between(two_digits(low.least.prefill_tokens_s), two_digits(high.prefill_tokens_s), '.0f')} tok/s",
                between(low.least.prefill_ratio, high.prefill_ratio, ".0%"),
            )
        )
    return table(rows)


def _legend(plan: Plan) -> list[str]:
    """What the columns and the ends of the ranges are."""
    measured = any(speed.measured_on for speed in plan.speeds)
    pairs = [(speed, speed.least) for speed in plan.speeds]
    slower = any(low.decode_step_s > s.decode_step_s or low.prefill_chunk_s > s.prefill_chunk_s for s, low in pairs)
    low, high = list[str](), list[str]()
    if plan.machine.link and slower:
        low.append(f"slowest published link of this kind ({plan.machine.link.slowest:g} GB/s)")
        high.append("fastest")
    if measured:
        low.append("mismatched profile")
        high.append("matching traffic")
    ends = [f"Low: {', '.join(low)}. High: {', '.join(high)}."] if low else []
    return [*ROWS, *ends] if plan.offloads else []


def _streaming(plan: Plan) -> list[str]:
    """Whether prefill streams, and in which chunks that costs nothing."""
    if plan.num_resident == plan.num_experts:
        return []
    streams = plan.stream_buffers or plan.streams_into_slots
    if plan.chunked_prefill_size < plan.stream_tokens and (plan.streams_into_slots or not streams):
        return [
            f"With {plan.rows} of {plan.num_experts} experts in VRAM, copying a layer pays from {plan.stream_tokens} tokens "
            f"on. Chunks of {plan.chunked_prefill_size} read offloaded experts in place."
        ]
    if not streams:
        return ["Without stream buffers, prefill reads offloaded experts in place, once for each block of rows."]
    where = "into slots" if plan.streams_into_slots else f"through {counted(plan.stream_buffers, 'stream buffer')}"
    hidden = f"No chunk of up to {HIDING_CHUNKS[-1]} tokens hides the copying."
    if plan.slowest_hiding_chunk:
        short = plan.slowest_hiding_chunk > plan.chunked_prefill_size
        beyond = f"; --chunked-prefill-size is {plan.chunked_prefill_size}" if short else ""
        tokens = between(plan.hiding_chunk, plan.slowest_hiding_chunk, "d")
        hidden = f"A chunk of {tokens} tokens or more hides its stream after the first layer{beyond}."
    elif plan.hiding_chunk:
        hidden = f"A chunk of {plan.hiding_chunk} tokens or more hides its stream after the first layer, on a fast link only."
    return [f"Prefill of {plan.stream_tokens} tokens or more streams, {where}. {hidden}"]


def _launch(environment: Sequence[str], flags: Sequence[str]) -> str:
    """A command for a shell, with a backslash at the end of each line but the last."""
    lines = [" ".join([*environment, LAUNCH])]
    for flag in flags:
        if len(lines) > 1 and len(lines[-1]) + len(flag) < LAUNCH_COLUMNS:
            lines[-1] += f" {flag}"
        else:
            lines.append(f"    {flag}")
    return "  " + " \\\n".join(lines)
