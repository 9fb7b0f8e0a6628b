"""Real SGLang with drafts and its default graphs, over the stand-in driver: what captures hold, where they read experts, and
that the steps of draft models count when graphs replay them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from builders.drafts import eagle, eagle3
from checkpoints import Checkpoints
from standin.run import Standin
from standin.serving import GPU, captures, serve_and_log

from sglang_uvm_offload.memory.layout import BLOCK_BYTES

pytestmark = pytest.mark.nightly
FIRST = 9
"""Every token picks the experts from this one on."""
TOKENS = 24
DRAFTED = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
BY_NGRAMS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}
OFFLOAD: dict[str, Any] = {
    "expert_offload_num_resident": 4,
    "expert_offload_headroom_gb": 0.0,
    "expert_offload_warmup_tokens": 16,
    "expert_offload_stream_tokens": "inf",
}


class Served(NamedTuple):
    result: dict[str, Any]
    calls: list[dict]

    @property
    def state(self) -> dict[str, Any]:
        return self.result["server_info"]["internal_states"][0]["expert_offload"]

    def assert_graphs_read_managed_experts(self, moe_layers: int, graphs: int) -> None:
        """``graphs`` captures compute ``moe_layers`` of them, which are counted; all succeeded, and graphs were replayed. Of a
        prefill that is captured in pieces, the last one counts the layers of all."""
        assert [call for call in self.calls if call["result"] != 0] == []
        managed = {call["address"] for call in self.calls if call["call"] == "cudaMallocManaged"}
        found, uncounted = [], 0
        for capture in captures(self.calls):
            kernels = [call for call in capture if "kernel" in call]
            moe = [call for call in kernels if call["kernel"] == "fused_moe_kernel"]
            assert {call["arguments"][1] for call in moe} <= managed
            ours = [call for call in kernels if call["kernel"].startswith("uvm_")]
            assert {call["kernel"] for call in ours} <= {"uvm_count_routing_kernel"}
            found.append(len(moe) // 2)
            uncounted += found[-1] - sum(call["blocks"] for call in ours)
            assert 0 <= uncounted <= moe_layers - found[-1]
        assert uncounted == 0
        assert found.count(moe_layers) == graphs
        assert sum(call["call"] == "cudaGraphLaunch" for call in self.calls) >= TOKENS
        assert [len(answer["output_ids"]) for answer in self.result["answers"]] == [TOKENS]
        assert self.state["fault"] is None


def serve(standin: Standin, checkpoint: Path, folder: Path, **drafting: Any) -> Served:
    engine = {"model_path": str(checkpoint), **GPU, **OFFLOAD, **drafting}
    job = {"engine": engine, "prompts": ["hello world"], "max_new_tokens": TOKENS}
    return Served(*serve_and_log(job, FIRST, standin.library, folder / "served"))


@pytest.mark.works("Speculation", "NEXTN with graphs, draft layers offloaded")
def test_offloaded_draft_layers_are_captured_and_counted(tmp_path: Path, checkpoints: Checkpoints, standin: Standin) -> None:
    """Their experts move to where drafts read them: a draft's step is counted though its graph alone runs."""
    checkpoint = checkpoints("glm4_moe", expert_size=512)
    drafting = {**DRAFTED, "speculative_algorithm": "NEXTN", "expert_offload_draft_num_resident": 4}
    served = serve(standin, checkpoint, tmp_path, **drafting)
    served.assert_graphs_read_managed_experts(moe_layers=2, graphs=2)  # of the target, for one request and for two
    assert served.state["draft_bytes"] == 4 * BLOCK_BYTES  # of each tensor those of residents, and of the fused shared expert
    assert served.state["draft_hit_rate"] > 0
    assert "residents of the draft model chosen from" in served.result["log"]
    moe = [sum(call.get("kernel") == "fused_moe_kernel" for call in capture) // 2 for capture in captures(served.calls)]
    assert moe.count(1) >= 4  # drafts, and what they take in after each check


@pytest.mark.works("Speculation", "EAGLE with graphs")
def test_drafts_of_eagle(tmp_path: Path, checkpoints: Checkpoints, standin: Standin) -> None:
    draft = eagle(tmp_path / "draft", "bfloat16")
    drafting = {**DRAFTED, "speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(draft)}
    serve(standin, checkpoints("qwen3_moe", expert_size=512), tmp_path, **drafting).assert_graphs_read_managed_experts(3, 2)


@pytest.mark.works("Speculation", "EAGLE3 with graphs")
def test_drafts_of_eagle_3(tmp_path: Path, checkpoints: Checkpoints, standin: Standin) -> None:
    checkpoint = checkpoints("qwen3_moe", expert_size=512)
    draft = eagle3(tmp_path / "draft", checkpoint, "bfloat16")
    drafting = {**DRAFTED, "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(draft)}
    serve(standin, checkpoint, tmp_path, **drafting).assert_graphs_read_managed_experts(3, 2)


@pytest.mark.works("Speculation", "NGRAM with graphs")
def test_drafts_of_n_grams(tmp_path: Path, checkpoints: Checkpoints, standin: Standin) -> None:
    serve(standin, checkpoints("qwen3_moe", expert_size=512), tmp_path, **BY_NGRAMS).assert_graphs_read_managed_experts(3, 2)


@pytest.mark.works("Speculation", "adaptive steps (--speculative-adaptive) with graphs")
@pytest.mark.since("0.5.23", "its adaptive drafts were tried with none that is older")
def test_drafts_whose_number_follows_what_is_accepted(tmp_path: Path, checkpoints: Checkpoints, standin: Standin) -> None:
    """SGLang captures graphs for each number of steps that it may choose, and each reads managed experts."""
    steps = tmp_path / "steps.json"
    steps.write_text('{"1": {"candidate_steps": [1, 2]}}')
    drafting = {
        **{"speculative_algorithm": "EAGLE", "speculative_adaptive": True, "speculative_adaptive_config": str(steps)},
        **{"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3},
        "expert_offload_draft_num_resident": 4,
    }
    served = serve(standin, checkpoints("glm4_moe", expert_size=512), tmp_path, **drafting)
    assert "speculative_adaptive disabled" not in served.result["log"]
    served.assert_graphs_read_managed_experts(moe_layers=2, graphs=2 * 2)  # for one request and for two, by number of steps
    assert served.state["draft_hit_rate"] > 0
