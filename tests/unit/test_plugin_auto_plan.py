"""What ``--expert-offload-num-resident auto`` asks of the planner, and of which GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import Checkpoints

from sglang_uvm_offload.config import parse
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plugin import auto_resident
from sglang_uvm_offload.sizing.machine import GIB

VRAM = 16 * GIB
CONTEXT = 2048


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3_moe", expert_size=512)


@pytest.fixture
def plan(model: Path, monkeypatch: pytest.MonkeyPatch):
    """The plan for a launch on a machine of many GPUs, of which ``asked`` lists those whose memory was asked."""
    asked: list[int] = []
    monkeypatch.setattr(auto_resident, "free_vram", lambda gpus: asked.extend(gpus) or VRAM)
    monkeypatch.setattr(auto_resident, "get_device_memory_capacity", lambda device: VRAM >> 20)
    monkeypatch.setattr(auto_resident, "host_available", lambda: 64 * GIB)
    sizes = {"tp_size": 1, "ep_size": 1, "pp_size": 1, "dp_size": 1, "attn_dp_size": 1, "base_gpu_id": 0, "gpu_id_step": 1}
    cache = {"mem_fraction_static": 0.5, "max_total_tokens": None, "kv_cache_dtype": "auto", "page_size": 1}
    drafts = {"speculative_algorithm": None, "speculative_draft_model_path": None}

    def of(requests: int | None = 4, **changes: Any) -> SimpleNamespace:
        asked.clear()
        cfg = SimpleNamespace(device="cuda", model_path=str(model), **(sizes | cache | drafts | changes))
        read = SimpleNamespace(context_len=CONTEXT, dtype="torch.bfloat16", is_multimodal=False)
        return SimpleNamespace(plan=auto_resident._plan(parse({"num_resident": "auto"}), cfg, read, requests), gpus=[*asked])

    return of


def test_each_replica_takes_as_many_requests_as_the_flag_names_and_groups_share_them(plan):
    assert plan().plan.kv_tokens == 4 * CONTEXT
    assert plan(dp_size=2).plan.kv_tokens == 4 * CONTEXT
    assert plan(tp_size=2, attn_dp_size=2).plan.kv_tokens == 2 * CONTEXT
    assert plan(requests=None, max_total_tokens=512).plan.kv_tokens == 512


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
def test_the_gpus_that_are_asked_are_those_of_the_ranks(plan, changes, gpus):
    assert plan(**changes).gpus == gpus


def test_the_ranks_are_the_ones_that_will_run(plan):
    assert len(plan(pp_size=3).plan.ranks) == 3
    asked = plan(tp_size=2, ep_size=2, dp_size=2).plan.parallel
    assert (asked.tp, asked.ep, asked.dp, asked.dp_attention, asked.ranks) == (2, 2, 2, False, 4)
    assert plan(tp_size=2, attn_dp_size=2).plan.parallel.dp_attention


@pytest.mark.parametrize("model_path", ["maker/nowhere", "s3://bucket/model"])
def test_a_checkpoint_that_is_not_here_is_named(model_path, tmp_path):
    cfg = SimpleNamespace(model_path=model_path, revision=None, download_dir=str(tmp_path))
    with pytest.raises(FlagError, match=rf"auto: --model-path {model_path} is no local folder, .* give a number, or a local"):
        auto_resident.local_folder(cfg)
