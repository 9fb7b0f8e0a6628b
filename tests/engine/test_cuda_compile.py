"""Real SGLang with ``--enable-torch-compile`` over the stand-in driver: what is compiled around the experts leaves them alone.

For the stand-in nothing is compiled: Dynamo traces the model, and what it has traced is run as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Checkpoints
from standin.run import Standin
from standin.serving import GPU, captures, serve_and_log

TOKENS = 8
PROMPTS = ["hello world", "the quick brown fox jumps over the lazy dog"]
OFFLOAD: dict[str, Any] = {
    **{"expert_offload_num_resident": 4, "expert_offload_headroom_gb": 0.0, "expert_offload_warmup_tokens": 8},
    "expert_offload_stream_tokens": 16,
}
TRACED = """
import torch
original = torch.compile
def compile(model=None, **options):
    return original(model, backend="eager", dynamic=options.get("dynamic"))
torch.compile = compile
"""


@pytest.mark.nightly
@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.works("Launch", "--enable-torch-compile")
def test_experts_are_read_in_place_and_counted_at_every_batch(
    slots: int, tmp_path: Any, checkpoints: Checkpoints, standin: Standin
) -> None:
    """At batch 1 too, where SGLang would gather the experts of each token into a copy."""
    engine = {"model_path": str(checkpoints("glm4_moe", expert_size=512)), **GPU, **OFFLOAD, "expert_offload_slots": slots}
    job = {"engine": {**engine, "enable_torch_compile": True}, "prompts": PROMPTS, "max_new_tokens": TOKENS}
    result, calls = serve_and_log(job, 9, standin.library, tmp_path / "served", TRACED)
    assert [call for call in calls if call["result"] != 0] == []
    assert [len(answer["output_ids"]) for answer in result["answers"]] == [TOKENS, TOKENS]
    (state,) = [state["expert_offload"] for state in result["server_info"]["internal_states"]]
    managed = {call["address"] for call in calls if call["call"] == "cudaMallocManaged"}
    for decode in list(captures(calls))[-2:]:  # batches of 2 and of 1
        read = [call["arguments"][1] for call in decode if call.get("kernel") == "fused_moe_kernel"]
        assert len(read) == 2 * state["num_layers"]
        assert {*read} <= managed
        counted = [call["blocks"] for call in decode if call.get("kernel") == "uvm_count_routing_kernel"]
        assert counted == [state["num_layers"]]
    assert state["fault"] is None
    assert state["moves"] > 0
    assert state["zero_copy_bytes"] > 0
    assert slots == 0 or (state["slots"]["missing"] is None and state["slots"]["hits"] > 0)
