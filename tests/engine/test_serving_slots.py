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


def assert_served(on: Result) -> None:
    """Slots were used, and nothing that is offloaded was served by anything else."""
    assert_offloaded(on.server_info)
    slots = on.offload["slots"]
    assert slots["missing"] is None
    assert min(slots[name] for name in ("hits", "fills", "filled_bytes")) > 0


# Of 16 experts a layer: residents, slots, and more flags. 11 slots of each of 3 layers hold the experts of two.
SPLITS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "slots alone": (0, 6, {}),
    "one slot": (0, 1, {}),
    "residents and slots": (4, 4, {}),
    "a slot for each": (4, 12, {}),
    "residents that follow the traffic": (4, 3, {"expert_offload_adapt": "continuous"}),
    "long prompts stream": (0, 11, {"expert_offload_stream_tokens": 8}),
    "long prompts stream through buffers": (4, 4, {"expert_offload_stream_tokens": 8}),
    "one request at a time": (4, 4, {"max_running_requests": 1, "together": True}),
}


# Those with which most users begin run each time, the others at night.
USUAL = ("residents that follow the traffic", "long prompts stream")
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
    assert_streamed(on, some=split.startswith("long prompts stream"))
    assert (on.offload["slots"]["brought"] > 0) == (split == "long prompts stream")
    assert_same_answers(on, off)


USUAL_ROW, FORMATS = ("Launch", "--expert-offload-slots"), ("Format", "FP8 in blocks, INT8 and GPTQ with slots")
RANKS, DRAFTS = ("Parallel", "slots on several ranks"), ("Speculation", "NEXTN with slots")
EP: dict[str, Any] = {"tp_size": 2, "ep_size": 2}
EPLB: dict[str, Any] = {
    **{"enable_eplb": True, "ep_num_redundant_experts": 2, "eplb_rebalance_num_iterations": 4},
    **{"expert_distribution_recorder_buffer_size": 4, **EP},
}
NEXTN: dict[str, Any] = {
    **{"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 1},
    **{"speculative_num_draft_tokens": 3, "attention_backend": "triton", "prompts": PROMPTS[:1]},
    "env": {"TRITON_INTERPRET": "1", **SHIM},
}


def case(name: str, row: tuple[str, str], family: str = "qwen3_moe", split: tuple[int, int] = (2, 12), **engine: Any) -> Any:
    return pytest.param(family, split, engine, marks=pytest.mark.works(*row), id=name)


CASES = [
    case("glm4_moe", USUAL_ROW, "glm4_moe", (2, 4)),
    case("gpt_oss", USUAL_ROW, "gpt_oss", (2, 4), attention_backend="triton"),
    case("tp2", RANKS, tp_size=2),
    case("tp2_ep2", RANKS, **EP),
    case("pp2", RANKS, pp_size=2),
    case("dp_attention2", RANKS, tp_size=2, dp_size=2, enable_dp_attention=True),
    case("eplb", RANKS, **EPLB),
    case("nextn", DRAFTS, "glm4_moe", **NEXTN),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "split", "engine"), CASES)
def test_families_ranks_and_drafts_give_the_same_answers(
    family: str, split: tuple[int, int], engine: dict[str, Any], checkpoints: Checkpoints, engines: Engines
) -> None:
    checkpoint = checkpoints(family, dtype="float32")
    common = {**TRITON, "env": SHIM, "prompts": PROMPTS[:2], "max_new_tokens": 12, **engine}
    off = engines.baseline(checkpoint, **common)
    resident, slots = split
    flags = {"expert_offload_num_resident": resident, "expert_offload_slots": slots, **OFFLOAD}
    on = engines.run(checkpoint, **common, **flags | {"expert_offload_stream_tokens": 8})
    assert_served(on)
    assert_streamed(on)
    assert on.offload["slots"]["a_layer"] == slots // engine.get("ep_size", 1)
    assert_same_answers(on, off, 1e-5 if "enable_dp_attention" in engine else 0.0)  # as in test_serving_parallel


AHEAD = [
    pytest.param("qwen3_moe", {}, id="qwen3_moe"),
    *(
        pytest.param(each.values[0], each.values[2], id=each.id, marks=pytest.mark.nightly)
        for each in CASES
        if each.id != "tp2"
    ),
]


@pytest.mark.parametrize(("family", "engine"), AHEAD)
def test_slots_that_look_ahead_give_the_same_answers(
    family: str, engine: dict[str, Any], checkpoints: Checkpoints, engines: Engines
) -> None:
    checkpoint = checkpoints(family, dtype="float32", layers=14)
    common = {**TRITON, "env": SHIM, "prompts": PROMPTS[:2], "max_new_tokens": 24, **engine}
    off = engines.baseline(checkpoint, **common)
    slots = 6 if family == "gpt_oss" else 11  # of 8 and 16 experts a layer; none look ahead below 64 on a rank
    flags = {"expert_offload_num_resident": 0, "expert_offload_slots": slots, "expert_offload_prefetch": "speculative"}
    on = engines.run(checkpoint, **common, **OFFLOAD | flags)
    assert_served(on)
    ahead = on.offload["lookahead"]
    if "enable_eplb" not in engine:  # whose experts are not where their numbers say
        assert 0 < ahead["right"] < ahead["brought"]
        assert ahead["right"] <= ahead["misses"]
    assert_same_answers(on, off, 1e-5 if "enable_dp_attention" in engine else 0.0)


@pytest.mark.nightly
@pytest.mark.works(*FORMATS)
@pytest.mark.parametrize(("quant", "more"), [("fp8", {}), ("int8", {}), ("gptq", {"quantization": "moe_wna16"})])
def test_formats_give_the_same_answers(quant: str, more: dict[str, Any], checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint = checkpoints("qwen3_moe", quant=quant)
    off = engines.baseline(checkpoint, max_new_tokens=24, **more)
    flags = {"expert_offload_num_resident": 2, "expert_offload_slots": 3, **OFFLOAD}
    on = engines.run(checkpoint, max_new_tokens=24, **more, **flags)
    assert_served(on)
    assert_same_answers(on, off)


@pytest.mark.nightly
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
