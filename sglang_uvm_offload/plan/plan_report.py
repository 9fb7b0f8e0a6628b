"""Formatting a plan for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.plan.draft_cost import fastest_drafts
from sglang_uvm_offload.plan.outcome import Plan, RankMemory, Speed
from sglang_uvm_offload.plan.rates import GIGA, read_rate
from sglang_uvm_offload.plan.routing_curves import source_of
from sglang_uvm_offload.plan.speed import HIDING_CHUNKS
from sglang_uvm_offload.units import size

CPU_ENGINES = (
    "KTransformers .45 with one socket and .43 with two, "
    "https://github.com/kvcache-ai/ktransformers/blob/main/doc/en/DeepseekR1_V3_tutorial.md; llama.cpp .66, "
    "https://github.com/ggml-org/llama.cpp/pull/23346"
)
"""Shares of the host memory's nominal rate that published decode speeds imply (benchmarks/results/published/published.md)."""

ROWS = (
    "other traffic: residents chosen on other traffic than is served; lowest and highest: on traffic like it.",
    "of resident: of the speed with all experts in VRAM.",
)
"""What the rows and columns of the predicted speeds are."""


def render(plan: Plan) -> str:
    """The outcome, the memory and the speeds, the flags to paste, and last what all of this rests on."""
    parts = [_setup(plan), _outcome(plan), "\n".join(f"note: {note}" for note in plan.notes)]
    parts.append(_memory(plan) if plan.ranks else "")
    if plan.speeds:
        parts.append("\n".join([_speed(plan.speeds), *_rows(plan), *fastest_drafts(plan.draft_speeds), *_streaming(plan)]))
    if plan.flags:
        parts.append("To serve it:\n  python -m sglang.launch_server \\\n    " + " \\\n    ".join(plan.flags))
    if plan.speeds:
        parts.append("How this was computed:\n" + _basis(plan))
    return "\n\n".join(part for part in parts if part)


def _setup(plan: Plan) -> str:
    machine, work, p = plan.machine, plan.workload, plan.parallel
    share = plan.expert_bytes / plan.weights_bytes
    gpus = f"{_counted(machine.gpus, 'GPU')} of {size(machine.vram_bytes)}"
    ranks = f"tp {p.tp}, ep {p.ep}, pp {p.pp}, dp {p.dp}" + (" (attention)" if p.dp_attention else "")
    return _table(
        [
            ("model", f"{plan.model}: {size(plan.weights_bytes)}, {share:.1%} of it routed experts"),
            (
                "",
                f"{plan.total_parameters / 1e9:.1f} billion parameters, {plan.active_parameters / 1e9:.1f} active for a token",
            ),
            ("", f"{plan.moe_layers} MoE layers of {plan.num_experts} experts, {plan.top_k} a token"),
            ("", f"quantisation: {plan.quantization}"),
            ("machine", f"{machine.name}: {gpus}, host RAM {size(machine.host_bytes)}"),
            ("ranks", ranks),
            (
                "to serve",
                f"{_counted(work.requests, 'request')}, context {work.context_length} tokens, KV cache in {work.kv_cache_dtype}"
                + (", drafting layers loaded" if work.speculative else ""),
            ),
        ]
    )


def _memory(plan: Plan) -> str:
    """What takes the memory of a GPU, in parts that sum up to it. One column per pipeline stage; equal stages share one."""
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
    return _table(rows)


def _tables(plan: Plan) -> str:
    """Where the tables are of which a token reads a few rows."""
    taken = f", which take {size(plan.tables_host)} of it" if plan.tables_host else ""
    return f"{size(plan.table_bytes)}, in {plan.tables_in}{taken}"


def _outcome(plan: Plan) -> str:
    if plan.num_resident is not None:
        slots = f", and {plan.slots} slots" if plan.slots else ""
        share = f"{plan.rows / plan.num_experts:.0%}{' together' if plan.slots else ''}"
        fits = f"It fits: {plan.num_resident} of {plan.num_experts} experts a layer resident{slots} ({share})."
        return "\n".join([fits, *(["But this plan is useless:"] if plan.useless else []), *(f"  - {r}" for r in plan.useless)])
    lines = ["It does not fit:", *(f"  - {problem}" for problem in plan.problems)]
    if plan.needs:
        lines += ["Any of these would be enough:", *(f"  - {need}" for need in plan.needs)]
    return "\n".join(lines)


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
    return _table(rows)


def _rows(plan: Plan) -> list[str]:
    rows = list(ROWS) if any(speed.measured_on for speed in plan.speeds) else []
    pairs = [(speed, speed.least) for speed in plan.speeds]
    slower = any(low.decode_step_s > s.decode_step_s or low.prefill_chunk_s > s.prefill_chunk_s for s, low in pairs)
    if plan.machine.link and slower:
        rows.append(f"ranges: from the worst published rate of such a link, {plan.machine.link.slowest:g} GB/s, to that below.")
    return rows


def between(least: float, most: float, form: str) -> str:
    """A range, or one number where both look the same."""
    low, high = format(least, form), format(most, form)
    return low if low == high else f"{low} to {high}"


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
    where = "into slots" if plan.streams_into_slots else f"through {_counted(plan.stream_buffers, 'stream buffer')}"
    hidden = f"No chunk of up to {HIDING_CHUNKS[-1]} tokens hides the copying."
    if plan.slowest_hiding_chunk:
        short = plan.slowest_hiding_chunk > plan.chunked_prefill_size
        beyond = f"; --chunked-prefill-size is {plan.chunked_prefill_size}" if short else ""
        tokens = between(plan.hiding_chunk, plan.slowest_hiding_chunk, "d")
        hidden = f"A chunk of {tokens} tokens or more hides its stream after the first layer{beyond}."
    elif plan.hiding_chunk:
        hidden = f"A chunk of {plan.hiding_chunk} tokens or more hides its stream after the first layer, on a fast link only."
    return [f"Prefill of {plan.stream_tokens} tokens or more streams, {where}. {hidden}"]


def _basis(plan: Plan) -> str:
    machine, link, a = plan.machine, plan.machine.link, plan.assumptions
    lines = [
        *_hit_rates(plan.speeds),
        f"{_over_link(plan)}; VRAM rate {machine.hbm_gbps:g} GB/s x "
        f"{a.hbm_efficiency}; {machine.tflops:g} TFLOPS x {a.compute_efficiency}",
        *([f"worst published read rate {link.slowest:g} GB/s: {link.slowest_source}"] if link and link.slowest else []),
        f"rates: {machine.source}",
        *_cpu_engine(plan),
        f"assumed: {', '.join(f'{name} {value}' for name, value in dataclasses.asdict(a).items())}",
    ]
    return "\n".join(lines)


def _over_link(plan: Plan) -> str:
    """At which rates experts are read and copied, and why."""
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
    """What each hit rate was measured on, and where that is from."""
    measured = [(speed, speed.measured_on) for speed in speeds if speed.measured_on]
    traces = sorted({trace for _, found in measured for trace in found.traces})
    if not traces:
        return []
    return [
        "hit rates of measured routing, judged on requests that did not choose the residents (--hit-rate gives your own):",
        *(f"  {speed.routing}, {_counted(speed.requests, 'request')}: {found.described()}" for speed, found in measured),
        *(f"  from {source_of(trace)}" for trace in traces),
    ]


def _cpu_engine(plan: Plan) -> list[str]:
    """What the plan takes for an engine that computes experts on the CPU."""
    machine, share = plan.machine, plan.assumptions.cpu_efficiency
    if not machine.host_gbps or plan.num_resident == plan.num_experts:
        return []
    rates = {s.requests: f"{s.cpu_engine_tokens_s:.1f} tok/s with {_counted(s.requests, 'request')}" for s in plan.speeds}
    return [
        f"CPU engine, for comparison: {', '.join(rates.values())}, if it reads active experts at {machine.host_gbps:g} GB/s x "
        f"{share} (published: {CPU_ENGINES})"
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count > 1 else "")


def _table(rows: Sequence[Sequence[str]]) -> str:
    width = max(map(len, rows))
    # The last cell of a shorter row may be long, and sets no column width.
    cells = [(*row, *("" for _ in range(width - len(row)))) for row in rows]
    widths = [max(len(r[c]) for r in rows if c < len(r) and (len(r) == width or c == 0)) for c in range(width)]
    return "\n".join("  ".join(f"{cell:<{room}}" for cell, room in zip(row, widths, strict=True)).rstrip() for row in cells)
