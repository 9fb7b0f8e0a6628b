"""The launch that gives a plan: SGLang's flags and this plugin's, each quoted for a shell.

It carries every argument of ``plan`` that a server needs to divide its memory the same way.
"""

from __future__ import annotations

import shlex
from typing import Any

from sglang_uvm_offload.flags import config_flag, flag_name
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.lookup_tables import MANAGED, table_environment, table_flags
from sglang_uvm_offload.residency.budget import Division

BY_MARLIN = frozenset({"mxfp4", "minimax_m3_nvfp4"})
"""Quantisations whose experts compute from slots with the Marlin runner (``plugin/slots/runners``) alone, which SGLang does
not choose for them by itself."""


def flags(case: Case, division: Division) -> tuple[str, ...]:
    """One string per flag, with its value."""
    p, w = case.parallel, case.workload
    out = [f"--model-path {shlex.quote(case.model.name)}", f"--tp-size {p.tp}"]
    out += [f"--quantization {shlex.quote(case.quantization)}"] if case.quantization else []
    out += [f"--ep-size {p.ep}"] if p.ep > 1 else []
    out += [f"--pp-size {p.pp}"] if p.pp > 1 else []
    out += [f"--dp-size {p.dp}"] if p.dp > 1 else []
    out += ["--enable-dp-attention"] if p.dp_attention else []
    out += [f"--mem-fraction-static {case.fraction}", f"--chunked-prefill-size {case.defaults.chunked_prefill_size}"]
    out += [f"--context-length {w.context_length}", f"--max-running-requests {w.running_requests(p)}"]
    out += [f"--max-total-tokens {w.max_total_tokens}"] if w.max_total_tokens is not None else []
    out += [f"--kv-cache-dtype {w.kv_cache_dtype}"] if w.kv_cache_dtype != "auto" else []
    out += _speculative(w.draft_tokens) if w.speculative else []
    out += table_flags(case.model.tables, case.tables_in)
    return (*out, *_offloading(case, division)) if offloads(case, division) else tuple(out)


def offloads(case: Case, division: Division) -> bool:
    """Whether anything stays in host RAM by this plugin: experts, those of draft layers, or lookup tables."""
    return division.num_resident < case.model.num_experts or case.offloads_drafts or case.tables_in == MANAGED


def environment(case: Case) -> tuple[str, ...]:
    """The variables that the launch needs, as ``NAME=value``."""
    return table_environment(case.model.tables, case.tables_in)


def _speculative(draft_tokens: int) -> list[str]:
    """SGLang takes all three numbers or none, and without them chooses its own by the model."""
    return [
        "--speculative-algorithm NEXTN",
        f"--speculative-num-steps {draft_tokens - 1}",
        "--speculative-eagle-topk 1",
        f"--speculative-num-draft-tokens {draft_tokens}",
    ]


def _offloading(case: Case, division: Division) -> list[str]:
    out = [f"{flag_name('num_resident')} {division.num_resident}", f"{flag_name('headroom_gb')} {case.reserve.headroom_gb}"]
    out += [f"{flag_name('slots')} {division.slots}"] if division.slots else []
    out += ["--moe-runner-backend marlin"] if division.slots and case.model.quantization in BY_MARLIN else []
    options: dict[str, Any] = {"lookup_tables": "host"} if case.tables_in == MANAGED else {}
    options |= {"draft_num_resident": case.draft_residents} if case.offloads_drafts else {}
    options |= {"stream_buffer_gb": case.reserve.stream_gb} if case.reserve.stream_gb is not None else {}
    return [*out, config_flag(**options)] if options else out
