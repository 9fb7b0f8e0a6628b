"""What a plan rests on, for ``plan --explain``: the memory of a GPU part by part, every prediction, formulas and sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.plan.outcome import Plan, RankMemory, Speed
from sglang_uvm_offload.plan.rates import GIGA, read_rate
from sglang_uvm_offload.plan.routing_curves import source_of
from sglang_uvm_offload.plan.text_table import between, counted, table
from sglang_uvm_offload.units import size

CPU_ENGINES = (
    "KTransformers .45 with one socket and .43 with two, "
    "https://github.com/kvcache-ai/ktransformers/blob/main/doc/en/DeepseekR1_V3_tutorial.md; llama.cpp .66, "
    "https://github.com/ggml-org/llama.cpp/pull/23346"
)
"""Shares of the host memory's nominal rate that published decode speeds imply (benchmarks/results/published/published.md)."""

TRAFFIC = "other traffic: the residents were chosen on other traffic; lowest and highest: on similar traffic."


def explanation(plan: Plan) -> list[str]:
    """The parts, each of one or more lines."""
    parts = [_memory(plan)] if plan.ranks else []
    if plan.speeds:
        traffic = [TRAFFIC] if any(speed.measured_on for speed in plan.speeds) else []
        parts += ["\n".join([_speed(plan.speeds), *traffic]), "How this was computed:\n" + _basis(plan)]
    return parts


def _memory(plan: Plan) -> str:
    """The parts of a GPU's memory, which sum up to its total. One column per pipeline stage; equal stages share a column."""
    columns: list[tuple[str, RankMemory]] = []
    for rank in plan.ranks:
        same = columns and dataclasses.replace(rank, stage=0) == dataclasses.replace(columns[-1][1], stage=0)
        name = f"stage {columns[-1][1].stage}-{rank.stage}" if same else f"stage {rank.stage}"
        columns = [*columns[:-1], (name, columns[-1][1])] if same else [*columns, (name, rank)]
    head = f"memory of one GPU, {size(plan.machine.vram_bytes)}"
    rows = [(head, *(name if plan.parallel.pp > 1 else "" for name, _ in columns))]
    vram, fraction = plan.vram, plan.mem_fraction_static
    outside = (
        ("in use before the start", vram.in_use),
        ("CUDA, NCCL (assumed)", vram.runtime),
        (f"left by --mem-fraction-static {fraction} for activations, CUDA graphs", vram.sglang),
        (f"{flag_name('headroom_gb')} {plan.headroom_gb:g}", vram.headroom),
    )
    rows += [(f"  {label}", *(size(nbytes) for _ in columns)) for label, nbytes in outside if nbytes]
    lines = (
        ("  weights other than placed experts", "plain_weights"),
        *((("  lookup tables", "table_bytes"),) if any(rank.table_bytes for _, rank in columns) else ()),
        ("  resident experts", "resident_bytes"),
        *((("  slots", "slot_bytes"),) if plan.slots else ()),
        ("  stream buffers", "stream_bytes"),
        ("  KV cache", "kv_bytes"),
        ("  driver's batches", "driver_bytes"),
        ("  left over (more KV cache)" if plan.fits else "  left over (short of it where negative)", "spare_bytes"),
        ("offloaded experts of one rank in host RAM", "host_bytes"),
    )
    rows += [(label, *(size(getattr(rank, name)) for _, rank in columns)) for label, name in lines]
    rows.append(("KV cache required", f"{plan.kv_tokens} tokens of {plan.kv_token_bytes / 1024:.1f} KiB"))
    if plan.table_bytes:
        rows.append(("lookup tables", _tables(plan)))
    rows.append(("host RAM of all ranks", size(plan.host_needed)))
    return table(rows)


def _tables(plan: Plan) -> str:
    """Where the lookup tables are kept."""
    taken = f", which take {size(plan.tables_host)} of it" if plan.tables_host else ""
    return f"{size(plan.table_bytes)}, in {plan.tables_in}{taken}"


def _speed(speeds: Sequence[Speed]) -> str:
    header = ("predicted", "requests", "hit rate", "missed/step", "decode", "of resident", "prefill", "of resident")
    rows = [header]
    for speed in speeds:
        rows.append(
            (
                speed.routing,
                str(speed.requests),
                f"{speed.hit_rate:.1%}",
                f"{speed.missed_bytes / 1e6:.0f} MB",
                f"{between(speed.least.decode_tokens_s, speed.decode_tokens_s, '.1f')} tok/s",
                between(speed.least.decode_ratio, speed.decode_ratio, ".0%"),
                f"{between(speed.least.prefill_tokens_s, speed.prefill_tokens_s, '.0f')} tok/s",
                between(speed.least.prefill_ratio, speed.prefill_ratio, ".0%"),
            )
        )
    return table(rows)


def _basis(plan: Plan) -> str:
    machine, link, a = plan.machine, plan.machine.link, plan.assumptions
    lines = [
        *_hit_rates(plan.speeds),
        f"{_over_link(plan)}; VRAM rate {machine.hbm_gbps:g} GB/s x "
        f"{a.hbm_efficiency}; {machine.tflops:g} TFLOPS x {a.compute_efficiency}",
        *([f"slowest published read rate {link.slowest:g} GB/s: {link.slowest_source}"] if link and link.slowest else []),
        f"rates: {machine.source}",
        *_cpu_engine(plan),
        f"assumed: {', '.join(f'{name} {value}' for name, value in dataclasses.asdict(a).items())}",
    ]
    return "\n".join(lines)


def _over_link(plan: Plan) -> str:
    """The rates at which experts are read and copied, and what they derive from."""
    machine, a = plan.machine, plan.assumptions
    if machine.measured:
        return f"read rate {machine.measured.scattered:.1f} GB/s, copy rate {machine.measured.copied:.1f} GB/s: measured here"
    read = read_rate(machine, plan.parallel, a) / GIGA
    host = f", and at most a rank's share of host memory's {machine.host_gbps:g} x {a.host_efficiency}"
    return (
        f"read rate {machine.link_gbps:g} GB/s x {a.read_efficiency}{host if machine.host_gbps else ''}: {read:.1f} GB/s; "
        f"copy rate {machine.link_gbps:g} GB/s x {a.copy_efficiency}"
    )


def _hit_rates(speeds: Sequence[Speed]) -> list[str]:
    """The measurement behind each hit rate, and its source."""
    measured = [(speed, speed.measured_on) for speed in speeds if speed.measured_on]
    traces = sorted({trace for _, found in measured for trace in found.traces})
    if not traces:
        return []
    return [
        "hit rates of measured routing, on other requests than those that chose the residents (--hit-rate takes your own):",
        *(f"  {speed.routing}, {counted(speed.requests, 'request')}: {found.described()}" for speed, found in measured),
        *(f"  from {source_of(trace)}" for trace in traces),
    ]


def _cpu_engine(plan: Plan) -> list[str]:
    """The prediction for an engine that computes the experts on the CPU."""
    machine, share = plan.machine, plan.assumptions.cpu_efficiency
    if not machine.host_gbps or plan.num_resident == plan.num_experts:
        return []
    rates = {s.requests: f"{s.cpu_engine_tokens_s:.1f} tok/s with {counted(s.requests, 'request')}" for s in plan.speeds}
    return [
        f"CPU engine, for comparison: {', '.join(rates.values())}, with {plan.rows} of {plan.num_experts} experts a layer in "
        f"VRAM, if it reads the other active ones at {machine.host_gbps:g} GB/s x {share} (published: {CPU_ENGINES})"
    ]
