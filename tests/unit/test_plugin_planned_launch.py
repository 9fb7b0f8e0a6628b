"""What a launch tells the planner, and which GPUs its ranks take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders.drafts import eagle
from checkpoints import Checkpoints

from sglang_uvm_offload.config import parse
from sglang_uvm_offload.plugin import launch_drafts, linear_attention, planned_launch
from sglang_uvm_offload.plugin.local_checkpoint import local_folder
from sglang_uvm_offload.sizing.launch import Launch, Uncounted
from sglang_uvm_offload.sizing.machine import GIB

VRAM = 16 * GIB
CONTEXT = 2048
SIZES = {"tp_size": 1, "ep_size": 1, "pp_size": 1, "dp_size": 1, "attn_dp_size": 1, "base_gpu_id": 0, "gpu_id_step": 1}
CACHE = {"mem_fraction_static": 0.5, "max_total_tokens": None, "kv_cache_dtype": "auto", "page_size": 1}
DRAFTS = {
    **{"speculative_algorithm": None, "speculative_draft_model_path": None, "speculative_draft_model_revision": None},
    **{"speculative_num_draft_tokens": None, "speculative_draft_kv_cache_dtype": None},
}
OTHERS = {"nnodes": 1, "moe_a2a_backend": "none", "enable_hierarchical_cache": False, "revision": None, "download_dir": None}
GIVEN = {"max_running_requests": 4, "context_length": None, "hicache_size": 0, "hicache_ratio": None}
"""By the user, before SGLang resolves anything."""


def resolved(**changes: Any) -> SimpleNamespace:
    """SGLang's arguments as resolution leaves them."""
    return SimpleNamespace(device="cuda", **(SIZES | CACHE | DRAFTS | OTHERS | changes))


@pytest.fixture
def launch(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch):
    """The planner's input for a launch on GPUs of 16 GiB."""
    model: Path = checkpoints("qwen3_moe", expert_size=512)
    monkeypatch.setattr(planned_launch, "get_device_memory_capacity", lambda device: VRAM >> 20)
    monkeypatch.setattr(planned_launch, "host_available", lambda: 64 * GIB)
    monkeypatch.setattr(planned_launch, "visible_gpus", lambda: [("NVIDIA H200", VRAM)])
    monkeypatch.setattr(linear_attention, "mambaish_config", lambda model: None)

    def of(**changes: Any) -> Launch:
        given = SimpleNamespace(**{name: changes.pop(name, value) for name, value in GIVEN.items()})
        read = SimpleNamespace(context_len=CONTEXT, dtype="torch.bfloat16", quantization=None, is_multimodal=False)
        config = parse({"num_resident": "auto"})
        assert config is not None
        return planned_launch._launch(config, resolved(model_path=str(model), **changes), read, given)

    return of


def test_each_replica_takes_as_many_requests_as_the_flag_names_and_groups_share_them(launch):
    assert launch().case().kv_tokens == 4 * CONTEXT
    assert launch(dp_size=2).case().kv_tokens == 4 * CONTEXT
    assert launch(tp_size=2, attn_dp_size=2).case().kv_tokens == 2 * CONTEXT
    assert launch(max_running_requests=None, max_total_tokens=512).case().kv_tokens == 512


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
    cfg = SimpleNamespace(download_dir=str(tmp_path))
    with pytest.raises(Uncounted, match=rf"--model-path {model_path} is no local folder, .* nothing can be counted"):
        local_folder("--model-path", model_path, None, cfg)


def test_a_gpu_of_unknown_size_cannot_be_planned(launch, monkeypatch):
    monkeypatch.setattr(planned_launch, "get_device_memory_capacity", lambda device: None)
    with pytest.raises(Uncounted, match="size of this GPU"):
        launch()


def test_rates_are_those_of_a_known_gpu_and_zeros_of_others(launch, monkeypatch):
    assert launch().rates[1] == 4800
    monkeypatch.setattr(planned_launch, "visible_gpus", lambda: [("NVIDIA Nothing", VRAM)])
    assert launch().rates == (0, 0, 0)
    monkeypatch.setattr(planned_launch, "visible_gpus", list)
    assert launch().rates == (0, 0, 0)


def test_only_a_hierarchical_cache_of_given_size_is_counted(launch):
    assert launch(hicache_size=10).hicache_bytes == 0, "not enabled"
    assert launch(enable_hierarchical_cache=True, hicache_size=10).hicache_bytes == 10_000_000_000
    assert launch(enable_hierarchical_cache=True, hicache_ratio=1.5).hicache_ratio == 1.5
    shrinking = launch(enable_hierarchical_cache=True)
    assert (shrinking.hicache_bytes, shrinking.hicache_ratio) == (0, 0)
    assert "takes what host RAM is left" in shrinking.notes[0]


def test_with_deepep_every_rank_holds_shared_experts_whole(launch):
    assert not launch().parallel.shared_whole
    buffered = launch(moe_a2a_backend="deepep")
    assert buffered.parallel.shared_whole
    assert "DeepEP's buffers" in buffered.notes[0]


@pytest.mark.parametrize(
    ("algorithm", "path", "bundled", "separate", "reason"),
    [
        (None, None, False, False, None),
        ("NGRAM", None, False, False, None),
        ("EAGLE", None, True, False, None),
        ("EAGLE", "draft", False, True, None),
        ("EAGLE3", "draft", False, True, None),
        ("STANDALONE", "draft", False, True, None),
        ("DFLASH", "draft", False, True, None),
        ("DSPARK", "draft", False, True, "does not count --speculative-algorithm DSPARK, only NEXTN"),
    ],
)
def test_drafts_come_from_the_checkpoint_or_one_of_their_own(tmp_path, algorithm, path, bundled, separate, reason):
    (tmp_path / "draft").mkdir()
    path = path and str(tmp_path / path)
    cfg = resolved(
        model_path="m", speculative_algorithm=algorithm, speculative_draft_model_path=path, speculative_num_draft_tokens=3
    )
    assert launch_drafts.from_the_checkpoint(cfg) == bundled
    assert launch_drafts.separate_folder(cfg) == (path if separate else None)
    assert launch_drafts.tokens_verified(cfg) == (0 if algorithm is None else 3)
    found = launch_drafts.uncounted(cfg)
    assert len(found) == (reason is not None)
    assert not reason or found[0].startswith(reason)


def test_the_state_of_linear_attention_is_what_sglang_says():
    """Qwen3-Next: a convolution over 2 x 16 keys and 32 values of 128, three tokens wide, and a matrix for each value head."""
    from sglang.srt.configs.qwen3_next import Qwen3NextConfig

    config = Qwen3NextConfig()
    convolution = (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert linear_attention.state_layer_bytes(config, None) == convolution + 32 * 128 * 128 * 4
    assert linear_attention.state_layer_bytes(config, "bfloat16") == convolution + 32 * 128 * 128 * 2


@pytest.mark.parametrize(
    ("flags", "slots", "each"),
    [
        ({"disable_radix_cache": False, "max_running_requests": 8}, None, 5),
        ({"disable_radix_cache": True, "max_running_requests": 8}, 4, 1),
        ({"disable_radix_cache": True, "max_running_requests": None}, None, 1),
        ({"disable_radix_cache": False, "max_mamba_cache_size": 64}, 32, 5),
    ],
)
def test_states_are_as_many_as_the_flags_set(monkeypatch, flags, slots, each):
    from sglang.srt.configs.qwen3_next import Qwen3NextConfig

    for name in ("mambaish_config", "hybrid_gdn_config"):
        monkeypatch.setattr(linear_attention, name, lambda model: Qwen3NextConfig())
    cfg = SimpleNamespace(**{"max_mamba_cache_size": None, "mamba_full_memory_ratio": 0.9, "mamba_ssm_dtype": None} | flags)
    cfg.attn_dp_size = 2
    state = linear_attention.state(cfg, None)
    assert state is not None
    assert (state.slots, state.slots_per_request, state.memory_ratio) == (slots, each, 0.9)


def test_states_that_cannot_be_counted_are_named(monkeypatch):
    from sglang.srt.configs.qwen3_next import Qwen3NextConfig

    beside = dict.fromkeys(("enable_linear_replayssm", "enable_int8_mamba_checkpoint", "enable_unified_memory"), False)
    cfg = SimpleNamespace(**beside, speculative_algorithm="EAGLE")
    monkeypatch.setattr(linear_attention, "mambaish_config", lambda model: "some")
    monkeypatch.setattr(linear_attention, "hybrid_gdn_config", lambda model: Qwen3NextConfig())
    (reason,) = linear_attention.uncounted(cfg, None)
    assert reason.endswith("linear attention with --speculative-algorithm EAGLE")
    monkeypatch.setattr(linear_attention, "hybrid_gdn_config", lambda model: None)
    assert "only that of Qwen3-Next" in linear_attention.uncounted(cfg, None)[0]


class TestResidentsOfDrafts:
    """``--expert-offload-draft-num-resident`` against the draft model that the launch loads."""

    def problems(self, number, experts=16, **cfg):
        config = parse({"num_resident": "4", "draft_num_resident": number})
        assert config is not None
        return launch_drafts.problems(config, resolved(model_path="/m", **cfg), experts)

    def test_without_the_flag_nothing_is_looked_at(self):
        assert self.problems(None) == []

    @pytest.mark.parametrize("algorithm", [None, "NGRAM"])
    def test_without_a_draft_model_it_has_no_effect(self, algorithm):
        (problem,) = self.problems(4, speculative_algorithm=algorithm)
        assert problem.startswith("--expert-offload-draft-num-resident 4: no draft model is loaded")
        assert f"(--speculative-algorithm {algorithm})" in problem

    def test_draft_layers_of_the_checkpoint_have_its_experts(self):
        assert self.problems(16, speculative_algorithm="NEXTN") == []
        (problem,) = self.problems(17, speculative_algorithm="NEXTN", speculative_draft_model_path="/m")
        assert problem.endswith("17: the draft model has 16 routed experts a layer; give at most as many")

    def test_a_draft_model_of_its_own_has_its_own(self, checkpoints, tmp_path):
        own = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(checkpoints("olmoe"))}
        assert self.problems(16, experts=8, **own) == []
        (problem,) = self.problems(17, experts=32, **own)
        assert problem.endswith("the draft model has 16 routed experts a layer; give at most as many")
        dense = eagle(tmp_path / "dense")
        (problem,) = self.problems(4, **{**own, "speculative_draft_model_path": str(dense)})
        assert problem.endswith(f"4: the draft model ({dense}) has no routed experts; leave it out")

    def test_one_that_the_launch_does_not_name_is_not_looked_at(self, tmp_path, monkeypatch):
        (tmp_path / "config.json").write_text('{"num_hidden_layers": 1}')
        monkeypatch.chdir(tmp_path)
        assert self.problems(4, speculative_algorithm="STANDALONE") == []

    def test_one_that_is_not_here_yet_is_not_looked_at(self, tmp_path):
        away = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(tmp_path / "away")}
        assert self.problems(4, **away) == []

    def test_the_plan_counts_them_for_layers_of_the_checkpoint_only(self, launch, checkpoints):
        olmoe = str(checkpoints("olmoe"))
        own = launch(speculative_algorithm="STANDALONE", speculative_draft_model_path=olmoe, speculative_num_draft_tokens=4)
        assert dataclasses.replace(own, draft_num_resident=4).case().workload.draft_num_resident is None

    @pytest.mark.parametrize(("algorithm", "told"), [("NEXTN", False), ("EAGLE", True)])
    def test_and_says_so_of_others(self, algorithm, told):
        config = parse({"num_resident": "4", "draft_num_resident": 2})
        cfg = resolved(model_path="/m", speculative_algorithm=algorithm, speculative_draft_model_path="/d" if told else None)
        notes = planned_launch._notes(config, cfg, SimpleNamespace(**GIVEN))
        assert ("the draft model is counted as if all its experts were in VRAM" in notes) == told
