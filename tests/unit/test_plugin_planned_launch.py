"""What a launch tells the planner, and which GPUs its ranks take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import Checkpoints

from sglang_uvm_offload.config import parse
from sglang_uvm_offload.plugin import planned_launch
from sglang_uvm_offload.sizing.launch import Launch, Uncounted
from sglang_uvm_offload.sizing.machine import GIB

VRAM = 16 * GIB
CONTEXT = 2048
SIZES = {"tp_size": 1, "ep_size": 1, "pp_size": 1, "dp_size": 1, "attn_dp_size": 1, "base_gpu_id": 0, "gpu_id_step": 1}
CACHE = {"mem_fraction_static": 0.5, "max_total_tokens": None, "kv_cache_dtype": "auto", "page_size": 1}
DRAFTS = {"speculative_algorithm": None, "speculative_draft_model_path": None}


def resolved(**changes: Any) -> SimpleNamespace:
    """SGLang's arguments as resolution leaves them."""
    return SimpleNamespace(device="cuda", **(SIZES | CACHE | DRAFTS | changes))


@pytest.fixture
def launch(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch):
    """The planner's input for a launch on GPUs of 16 GiB."""
    model: Path = checkpoints("qwen3_moe", expert_size=512)
    monkeypatch.setattr(planned_launch, "get_device_memory_capacity", lambda device: VRAM >> 20)
    monkeypatch.setattr(planned_launch, "host_available", lambda: 64 * GIB)

    def of(requests: int | None = 4, **changes: Any) -> Launch:
        read = SimpleNamespace(context_len=CONTEXT, dtype="torch.bfloat16", is_multimodal=False)
        config = parse({"num_resident": "auto"})
        assert config is not None
        return planned_launch._launch(config, resolved(model_path=str(model), **changes), read, requests)

    return of


def test_each_replica_takes_as_many_requests_as_the_flag_names_and_groups_share_them(launch):
    assert launch().case().kv_tokens == 4 * CONTEXT
    assert launch(dp_size=2).case().kv_tokens == 4 * CONTEXT
    assert launch(tp_size=2, attn_dp_size=2).case().kv_tokens == 2 * CONTEXT
    assert launch(requests=None, max_total_tokens=512).case().kv_tokens == 512


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, [0]),
        ({"tp_size": 2, "base_gpu_id": 1, "gpu_id_step": 2}, [1, 3]),
        ({"tp_size": 2, "pp_size": 2, "base_gpu_id": 4}, [4, 5, 6, 7]),
        ({"tp_size": 2, "dp_size": 2, "gpu_id_step": 2}, [0, 2, 4, 6]),
        ({"tp_size": 4, "attn_dp_size": 4}, [0, 1, 2, 3]),
    ],
)
def test_free_memory_is_queried_of_the_gpus_that_sglang_gives_to_the_ranks(monkeypatch, changes, gpus):
    monkeypatch.setattr(planned_launch, "free_vram", lambda asked: [gpu * GIB for gpu in asked])
    assert planned_launch.free_by_gpu(planned_launch.ranks(resolved(**changes))) == {gpu: gpu * GIB for gpu in gpus}


def test_a_rank_is_named_by_its_replica_and_stage():
    stages = planned_launch.ranks(resolved(tp_size=2, pp_size=2, dp_size=2))
    assert stages[6] == (1, 1, 0, 6)


def test_the_ranks_are_the_ones_that_will_run(launch):
    assert len(launch(pp_size=3).case().stages) == 3
    planned = launch(tp_size=2, ep_size=2, dp_size=2).parallel
    assert (planned.tp, planned.ep, planned.dp, planned.dp_attention, planned.ranks) == (2, 2, 2, False, 4)
    assert launch(tp_size=2, attn_dp_size=2).parallel.dp_attention


@pytest.mark.parametrize("model_path", ["maker/nowhere", "s3://bucket/model"])
def test_a_checkpoint_that_is_not_here_is_named(model_path, tmp_path):
    cfg = SimpleNamespace(model_path=model_path, revision=None, download_dir=str(tmp_path))
    with pytest.raises(Uncounted, match=rf"--model-path {model_path} is no local folder, .* nothing can be counted"):
        planned_launch.local_folder(cfg)


def test_a_gpu_of_unknown_size_cannot_be_planned(launch, monkeypatch):
    monkeypatch.setattr(planned_launch, "get_device_memory_capacity", lambda device: None)
    with pytest.raises(Uncounted, match="size of this GPU"):
        launch()
