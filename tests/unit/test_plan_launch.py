"""The launch that a plan prints: parsed by SGLang and planned again, it is that plan."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from builders.plans import MODELS
from builders.replanned import folder_of, launches, printed, replanned

from sglang_uvm_offload.plan.machine import preset
from sglang_uvm_offload.plan.outcome import Plan

pytestmark = pytest.mark.sglang

PLE = MODELS.parent / "tables" / "Qwen--Qwen3.8-Flash-Next"
DRAFTING = ("--speculative", "--speculative-num-draft-tokens")

MATRIX: list[tuple[str | Path, str, tuple[object, ...]]] = [
    *((name, "8xH20", ()) for name in ("deepseek-v3", "glm-4.5", "glm-5-fp8", "kimi-k2", "qwen3-235b-a22b")),
    *((name, "4x4090", ()) for name in ("glm-4.5-air", "gpt-oss-120b", "qwen3-235b-a22b")),
    ("glm-4.5-air", "4x4090", ("--quantization", "fp8")),
    ("qwen3-235b-a22b", "4x5090", ("--quantization", "fp8", "--mem-fraction-static", 0.9)),
    ("glm-4.5", "8xH20", (*DRAFTING, 3, "--requests", 4)),
    ("glm-4.5-air", "4x4090", (*DRAFTING, 6, "--draft-num-resident", 40)),
    ("deepseek-v3", "8xH20", (*DRAFTING, 2, "--kv-cache-dtype", "fp8_e4m3", "--requests", 64)),
    ("glm-4.5-air", "1xH200", ("--kv-cache-dtype", "bfloat16", "--context-length", 100000, "--requests", 2)),
    ("glm-4.5-air", "4xH200", ("--dp-size", 2, "--tp-size", 2, "--requests", 7, "--mem-fraction-static", 0.5)),
    ("deepseek-v3", "8xH20", ("--dp-size", 4, "--enable-dp-attention", "--tp-size", 8, "--ep-size", 8, "--requests", 9)),
    ("qwen3-235b-a22b", "8xA100-80GB", ("--pp-size", 2, "--requests", 3, "--mem-fraction-static", 0.6)),
    ("glm-4.5-air", "1xH200", ("--max-total-tokens", 400000, "--requests", 5, "--chunked-prefill-size", 2048)),
    ("deepseek-v3", "8xH20", ("--headroom-gb", 3, "--stream-buffer-gb", 0, "--slots", 0)),
    ("deepseek-v3", "8xH20", ("--num-resident", 100, "--slots", 20)),
    *(("deepseek-v3", "8xH20", ("--num-resident", 150, "--stream-buffer-gb", gib)) for gib in (0, 1.5)),
    (PLE, "1xH200", ("--no-ple-offload-embedding",)),
    (PLE, "1xH200", ("--ple-offload-embedding", "--ple-offload-backend", "file")),
]


def decided(plan: Plan) -> dict[str, object]:
    """What the memory of a plan is, and the verdict."""
    return {
        "residents": (plan.num_resident, plan.slots, plan.stream_buffers),
        "cache": (plan.kv_tokens, plan.kv_token_bytes, plan.workload.context_length),
        "ranks": [(rank.used_bytes, rank.budget_bytes) for rank in plan.ranks],
        "chunk": plan.chunked_prefill_size,
        "drafts": (plan.workload.speculative, plan.workload.draft_tokens if plan.workload.speculative else 0),
        "verdict": (plan.fits, bool(plan.useless)),
        "tables": plan.tables_in,
        "parallel": plan.parallel,
        "host": plan.host_needed,
    }


@pytest.mark.parametrize(("name", "on", "words"), MATRIX, ids=lambda value: getattr(value, "name", None) or str(value))
def test_the_printed_launch_gives_the_plan_again(name, on, words, tmp_path, monkeypatch):
    from builders import replanned as builder

    folder = name if isinstance(name, Path) else folder_of(MODELS / f"{name}.json", tmp_path)
    made: list[Plan] = []
    plan = builder.plan
    monkeypatch.setattr("sglang_uvm_offload.cli.plan.planner.plan", lambda *args: made.append(plan(*args)) or made[-1])
    code, report = printed(folder, "--machine", on, *words)
    assert code == 0
    found, lines = made[0], launches(report)
    heading = "To serve it offloaded" if found.offloads else "To serve it"
    again = decided(replanned(lines[heading], preset(on)))
    expected = decided(found)
    if not found.offloads:  # a plain launch leaves no headroom, so it has more than the plan counts on
        again["ranks"] = expected["ranks"]
    assert again == expected
    code, flags = printed(folder, "--machine", on, *words, "--flags-only")
    assert code == 0
    assert shlex.split(flags) == lines[heading][lines[heading].index("sglang.launch_server") + 1 :]
    assert flags.count("\n") == 1
