"""Checkpoints in the forms that SGLang writes for faster starts: the tensors of a loaded model, which are copied into place
after experts were taken over and post-processed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders.plugins import IN_SCHEDULER, saboteur
from checkpoints import Checkpoints
from serving import PROMPTS, Engines, assert_offloaded, assert_same_answers

from scripts.harness.server import offload_state

FLAGS: dict[str, Any] = {
    **{"expert_offload_num_resident": 6, "expert_offload_warmup_tokens": 16},
    "expert_offload_stream_tokens": 8,
}

AFTER_LOADING = """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", loaded, HookType.AFTER)
"""
SAVES = (
    IN_SCHEDULER
    + """
    def loaded(result, runner, *args, **kwargs):
        from sglang.srt.model_loader.loader import ShardedStateLoader
        ShardedStateLoader.save_model(runner.model, FOLDER)
"""
    + AFTER_LOADING
)
REPLACES = (
    IN_SCHEDULER
    + """
    def loaded(result, loader, *args, **kwargs):
        import torch
        for layer in result.model.layers:
            weights = layer.mlp.experts.w13_weight
            held, weights.data = weights.data, torch.zeros_like(weights.data)
            weights.data.copy_(held)
        return result
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    HookRegistry.register("sglang.srt.model_loader.loader.DefaultModelLoader.load_model", loaded, HookType.AFTER)
"""
)


@pytest.mark.parametrize("quant", [None, pytest.param("fp8", marks=pytest.mark.nightly)])
@pytest.mark.works("Format", "--load-format presharded")
def test_what_one_start_has_dumped_the_next_one_loads(
    quant: str | None, checkpoints: Checkpoints, engines: Engines, tmp_path: Path
) -> None:
    """What was dumped with experts offloaded, without and with that. SGLang builds the model once more, on meta, to name what
    it dumps: those layers are none of the model's."""
    checkpoint = checkpoints("qwen3_moe", quant=quant)
    off, layers = engines.baseline(checkpoint), json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    extra = {"model_loader_extra_config": json.dumps({"presharded_path": str(tmp_path / "dump")})}
    for number, flags in enumerate((FLAGS, {}, FLAGS)):
        on = engines.run(checkpoint, load_format="presharded", **flags, **extra, log_level="info")
        assert ("Loading from presharded checkpoint" in on.log) == (number > 0), "the first start dumps, the others load"
        assert_same_answers(on, off)
        if flags:
            assert_offloaded(on.server_info)
            assert on.offload["num_layers"] == len(on.offload["resident_ids"]) == layers
            assert on.offload["moves"] > 0


@pytest.mark.nightly
@pytest.mark.works("Format", "--load-format sharded_state")
def test_a_server_loads_what_an_offloaded_one_has_saved(checkpoints: Checkpoints, engines: Engines, tmp_path: Path) -> None:
    checkpoint, sharded = checkpoints("qwen3_moe"), tmp_path / "sharded"
    shutil.copytree(checkpoint, sharded)
    for file in sharded.glob("*.safetensors*"):
        file.unlink()
    with engines.server(checkpoint, env=saboteur(tmp_path, SAVES.replace("FOLDER", repr(str(sharded)))), **FLAGS):
        pass
    assert [*sharded.glob("*.safetensors")]
    on = engines.run(sharded, load_format="sharded_state", **FLAGS)
    assert_offloaded(on.server_info)
    assert_same_answers(on, engines.baseline(checkpoint))
    assert_same_answers(engines.run(sharded, load_format="sharded_state"), on)


@pytest.mark.nightly
def test_tensors_that_a_loader_replaces_are_offloaded_too(checkpoints: Checkpoints, engines: Engines, tmp_path: Path) -> None:
    """They are moved into managed memory, and no move is of the memory that they had before."""
    checkpoint = checkpoints("qwen3_moe")
    off, plain = engines.baseline(checkpoint), engines.run(checkpoint, ["hello"], max_new_tokens=1, **FLAGS).offload
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    with engines.server(checkpoint, env=saboteur(tmp_path, REPLACES), **FLAGS) as server:
        answers = [server.post("/generate", {"text": text, "sampling_params": sampling})["output_ids"] for text in PROMPTS]
        server.wait_until_idle()
        state = offload_state(server.get("/server_info"))
    assert answers == [answer.output_ids for answer in off.answers]
    for what in ("offloaded_bytes", "resident_bytes", "num_layers"):
        assert state[what] == plain[what]
    assert state["moves"] > 0
    assert state["fault"] is None
