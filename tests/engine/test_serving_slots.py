"""Slots beside the experts, filled by the misses of each step, change no token.

Experts are computed the way of SGLang's Triton runner, block by block with the row that its list names, with offloading and
without. ``test_slot_seam`` does that by SGLang's own kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import PROMPTS, Engines, Result, assert_offloaded, assert_same_answers, assert_streamed

SHIM = {"SHIM_EXPERTS": "triton"}
TRITON: dict[str, Any] = {"moe_runner_backend": "triton", "dtype": "float32", "max_new_tokens": 24}
OFFLOAD: dict[str, Any] = {"expert_offload_warmup_tokens": 16, "expert_offload_stream_tokens": "inf"}


def assert_served(on: Result, fills: bool = True) -> None:
    """Slots were used, and nothing that is offloaded was served by anything else."""
    assert_offloaded(on.server_info)
    slots = on.offload["slots"]
    assert slots["missing"] is None
    assert (slots["hits"] > 0, slots["fills"] > 0) == (fills, fills)
    assert (slots["filled_bytes"] > 0) == fills


# Of 16 experts a layer: residents, slots, and more flags.
SPLITS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "slots alone": (0, 6, {}),
    "one slot": (0, 1, {}),
    "residents and slots": (4, 4, {}),
    "a slot for each": (4, 12, {}),
    "residents that follow the traffic": (4, 3, {"expert_offload_adapt": "continuous"}),
    "long prompts stream": (4, 4, {"expert_offload_stream_tokens": 8}),
    "one request at a time": (4, 4, {"max_running_requests": 1, "together": True}),
}


# Those with which most users begin run each time, the others at night.
USUAL = ("slots alone", "residents that follow the traffic", "long prompts stream")
BY_SPLIT = [pytest.param(split, marks=() if split in USUAL else pytest.mark.nightly) for split in SPLITS]


@pytest.mark.works("Launch", "--expert-offload-slots")
@pytest.mark.parametrize("split", BY_SPLIT)
def test_answers_are_those_without_offloading(split: str, checkpoints: Checkpoints, engines: Engines) -> None:
    resident, slots, more = SPLITS[split]
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    common = {**TRITON, "env": SHIM, "prompts": [*PROMPTS, PROMPTS[1] * 3]}
    plain = {name: value for name, value in more.items() if not name.startswith("expert_offload")}
    off = engines.baseline(checkpoint, **common, **plain)
    flags = {**OFFLOAD, "expert_offload_num_resident": resident, "expert_offload_slots": slots, **more}
    on = engines.run(checkpoint, **common, **flags)
    assert_served(on)
    assert on.offload["slots"]["a_layer"] == slots
    assert_streamed(on, some=split == "long prompts stream")
    assert (on.offload["slots"]["kept"] > 0) == (split == "long prompts stream")
    assert_same_answers(on, off)


def test_a_model_with_a_slot_for_each_expert_reads_each_once(checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    flags = {**OFFLOAD, "expert_offload_num_resident": 0, "expert_offload_slots": 16}
    on = engines.run(checkpoint, ["a"], **{**TRITON, "max_new_tokens": 64}, env=SHIM, **flags)
    assert_served(on)
    assert on.offload["slots"]["fills"] <= on.offload["num_experts"]
    assert on.offload["slots"]["filled_bytes"] <= on.offload["offloaded_bytes"]


def test_only_the_last_chunk_of_a_prompt_leaves_experts_in_slots(checkpoints: Checkpoints, engines: Engines) -> None:
    """Each slot is filled once at most, where any other chunk would have filled some that the last one needs for others."""
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    flags = {**OFFLOAD, "expert_offload_num_resident": 0, "expert_offload_slots": 4, "expert_offload_stream_tokens": 8}
    common = {**TRITON, "env": SHIM, "prompts": [PROMPTS[1] * 3], "max_new_tokens": 1, "chunked_prefill_size": 24}
    on = engines.run(checkpoint, **common, **flags)
    assert_streamed(on)
    assert 0 < on.offload["slots"]["kept"] <= 4 * on.offload["num_layers"]


FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {},
    "gpt_oss": {"attention_backend": "triton"},
}


@pytest.mark.nightly
@pytest.mark.works("Launch", "--expert-offload-slots")
@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_same_answers(family: str, checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint = checkpoints(family, dtype="float32")
    common = {**TRITON, "env": SHIM, **FAMILIES[family]}
    off = engines.baseline(checkpoint, **common)
    on = engines.run(checkpoint, **common, **OFFLOAD, expert_offload_num_resident=2, expert_offload_slots=4)
    assert_served(on)
    assert_same_answers(on, off)


@pytest.mark.nightly
@pytest.mark.works("Format", "FP8 in blocks, INT8 and GPTQ with slots")
@pytest.mark.parametrize(("quant", "more"), [("fp8", {}), ("int8", {}), ("gptq", {"quantization": "moe_wna16"})])
def test_formats_give_the_same_answers(quant: str, more: dict[str, Any], checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint = checkpoints("qwen3_moe", quant=quant)
    off = engines.baseline(checkpoint, max_new_tokens=24, **more)
    flags = {"expert_offload_num_resident": 2, "expert_offload_slots": 3, **OFFLOAD}
    on = engines.run(checkpoint, max_new_tokens=24, **more, **flags)
    assert_served(on)
    assert_same_answers(on, off)


MODES: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "tp2_ep2": {"tp_size": 2, "ep_size": 2},
    "pp2": {"pp_size": 2},
    "dp_attention2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "eplb": {
        "tp_size": 2,
        "ep_size": 2,
        "enable_eplb": True,
        "ep_num_redundant_experts": 2,
        "eplb_rebalance_num_iterations": 4,
        "expert_distribution_recorder_buffer_size": 4,
    },
}
TOLERANCE = {"dp_attention2": 1e-5}  # as in test_serving_parallel


@pytest.mark.nightly
@pytest.mark.works("Parallel", "slots on several ranks")
@pytest.mark.parametrize("mode", MODES)
def test_ranks_give_the_same_answers(mode: str, checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    common = {**TRITON, "prompts": PROMPTS[:2], "max_new_tokens": 12, "env": SHIM, **MODES[mode]}
    off = engines.baseline(checkpoint, **common)
    on = engines.run(checkpoint, **common, **OFFLOAD, expert_offload_num_resident=4, expert_offload_slots=6)
    assert_served(on)
    assert on.offload["slots"]["a_layer"] == (3 if "ep_size" in MODES[mode] else 6)
    assert_same_answers(on, off, TOLERANCE.get(mode, 0.0))


@pytest.mark.nightly
@pytest.mark.works("Speculation", "NEXTN with slots")
def test_steps_that_check_drafts_fill_slots_too(checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint = checkpoints("glm4_moe", dtype="float32")
    common = {
        **{**TRITON, "max_new_tokens": 12, "env": {"TRITON_INTERPRET": "1", **SHIM}, "attention_backend": "triton"},
        **{"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 1},
        **{"speculative_num_draft_tokens": 3, "prompts": PROMPTS[:1]},
    }
    off = engines.baseline(checkpoint, **common)
    on = engines.run(checkpoint, **common, **OFFLOAD, expert_offload_num_resident=4, expert_offload_slots=6)
    assert_served(on)
    assert_same_answers(on, off)


@pytest.mark.works("Live change", "update from disk, with slots")
def test_new_weights_are_served_at_once(checkpoints: Checkpoints, engines: Engines) -> None:
    """Slots hold copies of the old ones when the weights are updated, and the first prompt that follows streams from slots."""
    old, new = (checkpoints("qwen3_moe", dtype="float32", seed=seed) for seed in (0, 7))
    prompts = [PROMPTS[1] * 3, *PROMPTS]
    expected = engines.baseline(new, prompts=prompts, **TRITON, env=SHIM)
    flags = {"expert_offload_num_resident": 4, "expert_offload_slots": 12, **OFFLOAD, "moe_runner_backend": "triton"}
    flags |= {"expert_offload_stream_tokens": 8}
    with engines.server(old, env=SHIM, dtype="float32", **flags) as server:
        before = [answer(server, prompt) for prompt in prompts]
        server.wait_until_idle()
        assert server.post("/update_weights_from_disk", {"model_path": str(new)})["success"]
        after = [answer(server, prompt) for prompt in prompts]
        (state,) = server.get("/server_info")["internal_states"]
    assert state["expert_offload"]["slots"]["hits"] > 0
    assert state["expert_offload"]["streamed_bytes"] > 0
    assert after == [each.output_ids for each in expected.answers]
    assert before != after


def answer(server: Any, prompt: str) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": TRITON["max_new_tokens"], "ignore_eos": True}
    return server.post("/generate", {"text": prompt, "sampling_params": sampling})["output_ids"]
