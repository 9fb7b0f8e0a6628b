"""What a launch tells the planner, by the arguments that SGLang itself resolves on a GPU machine: ranks and their GPUs, caches,
drafts, and the pools that SGLang's own configurators make."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from arguments import Arguments
from builders import links
from builders.configs import served_config
from builders.drafts import eagle
from builders.true_shape import CONFIGS, config_folder, write
from checkpoints import Checkpoints
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.utils import common

from sglang_uvm_offload.memory.kept_links import KeptLink
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import draft_source, expert_bytes, linear_attention, planned_launch
from sglang_uvm_offload.plugin.server_config import requested_of
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.gpus import GPUS
from sglang_uvm_offload.sizing.inputs import Parallel
from sglang_uvm_offload.sizing.kv_cache import kv_shape
from sglang_uvm_offload.sizing.launch import DEFAULT_KV_TOKENS, Launch, Uncounted
from sglang_uvm_offload.sizing.machine import GIB
from sglang_uvm_offload.sizing.rates import stream_rates
from sglang_uvm_offload.sizing.safetensors_header import TensorInfo, read_json
from sglang_uvm_offload.sizing.server_pools import ServerPools
from sglang_uvm_offload.sizing.text_config import text_config

H200 = GPUS["H200"].memory_mib << 20
CONTEXT = 2048
"""Of the tests' checkpoints."""
DRAFTS = ("--speculative-num-steps", 2, "--speculative-eagle-topk", 1, "--speculative-num-draft-tokens", 3)
STANDALONE = ("--speculative-algorithm", "STANDALONE", *DRAFTS, "--speculative-draft-model-path")
WITHOUT_TOKENIZER = ("--skip-tokenizer-init", "--load-format", "dummy")
"""For a configuration without other files."""

MODELS = sorted(folder.name for folder in CONFIGS.iterdir() if folder.is_dir())
SAMPLE = ("DeepSeek-V3", "GLM-5.2-FP8", "Kimi-K3", "Llama-4-Scout", "Qwen3.5-35B", "gemma-4-26B", "gpt-oss-20b")
"""Of each kind of cache one; the others at night."""

ASKED = pytest.mark.since("0.5.22", "before, a process cannot look at a launch as its ranks will")

Planned = Callable[..., Launch]


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3_moe", expert_size=512)


@pytest.fixture
def launch(model: Path, cuda_arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """The planner's input for a launch with these arguments, on GPUs of an H200."""
    monkeypatch.setattr(planned_launch, "get_device_memory_capacity", lambda device: H200 >> 20)
    monkeypatch.setattr(planned_launch, "visible_gpus", lambda: [("NVIDIA H200", H200)])

    def of(*words: object, path: Path = model, at_least: bool = False, **flags: object) -> Launch:
        config = parse({"num_resident": "auto", **flags})
        assert config is not None
        given = cuda_arguments("--model-path", path, "--device", "cuda", *words)
        return planned_launch.planned_launch(config, given, at_least=at_least)

    return of


def test_each_replica_takes_as_many_requests_as_the_flag_names_and_groups_share_them(launch: Planned) -> None:
    four = ("--max-running-requests", 4)
    assert launch(*four).case().kv_tokens == 4 * CONTEXT
    assert launch(*four, "--dp-size", 2).case().kv_tokens == 4 * CONTEXT
    grouped = ("--tp-size", 2, "--dp-size", 2, "--enable-dp-attention")
    assert launch(*four, *grouped).case().kv_tokens == 2 * CONTEXT
    assert launch("--max-total-tokens", 512).case().kv_tokens == 512


@pytest.mark.parametrize("words", [(), ("--enable-dp-lm-head",)])
def test_all_ranks_share_the_head_unless_the_launch_gives_each_group_its_own(launch: Planned, words: tuple[str, ...]) -> None:
    found = launch("--tp-size", 4, "--dp-size", 2, "--enable-dp-attention", *words).case()
    assert found.parallel.dp_lm_head == bool(words)


@pytest.mark.parametrize("given", [0, -1])
def test_less_than_one_request_is_one_as_for_sglang(launch: Planned, given: int) -> None:
    assert launch("--max-running-requests", given).case().workload == launch("--max-running-requests", 1).case().workload


@pytest.mark.parametrize(
    ("words", "gpus", "stages"),
    [
        ((), [0], [0]),
        (("--tp-size", 2, "--base-gpu-id", 1, "--gpu-id-step", 2), [1, 3], [0]),
        (("--tp-size", 2, "--pp-size", 2, "--base-gpu-id", 4), [4, 5, 6, 7], [0, 1]),
        (("--tp-size", 2, "--dp-size", 2, "--gpu-id-step", 2), [0, 2, 4, 6], [0]),
        (("--tp-size", 4, "--dp-size", 4, "--enable-dp-attention"), [0, 1, 2, 3], [0]),
        (("--tp-size", 16, "--nnodes", 2, "--dist-init-addr", "127.0.0.1:1"), list(range(8)), [0]),
        (("--tp-size", 4, "--pp-size", 4, "--nnodes", 2, "--dist-init-addr", "127.0.0.1:1"), list(range(8)), [0, 1]),
        (
            ("--tp-size", 4, "--pp-size", 4, "--nnodes", 2, "--node-rank", 1, "--dist-init-addr", "127.0.0.1:1"),
            list(range(8)),
            [2, 3],
        ),
        (("--tp-size", 8, "--pp-size", 2, "--nnodes", 4, "--node-rank", 2, "--dist-init-addr", "h:1"), [0, 1, 2, 3], [1]),
    ],
)
def test_a_launch_knows_the_gpus_and_the_stages_of_the_ranks_on_this_machine(
    cuda_arguments: Arguments, model: Path, words: tuple[object, ...], gpus: list[int], stages: list[int]
) -> None:
    ranks = planned_launch.ranks(resolving_view(cuda_arguments("--model-path", model, "--device", "cuda", *words)))
    assert sorted({rank.gpu for rank in ranks}) == gpus
    assert sorted({rank.stage for rank in ranks}) == stages


def test_a_rank_is_named_by_its_replica_and_stage(cuda_arguments: Arguments, model: Path) -> None:
    words = ("--device", "cuda", "--tp-size", 2, "--pp-size", 2, "--dp-size", 2)
    assert planned_launch.ranks(resolving_view(cuda_arguments("--model-path", model, *words)))[6] == (1, 1, 0, 6)


def test_minus_one_on_the_command_line_is_off(cuda_arguments: Arguments, model: Path) -> None:
    words = ("--model-path", model, "--device", "cuda", "--expert-offload-slots", "8", "--expert-offload-num-resident")
    assert requested_of(cuda_arguments(*words, "-1")) is None
    requested = requested_of(cuda_arguments(*words, "4"))
    assert requested is not None
    assert requested.num_resident == 4


def test_free_memory_is_queried_of_the_gpus_that_have_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_launch, "free_vram", lambda asked: [gpu * GIB for gpu in asked])
    ranks = [planned_launch.Rank(0, 0, number, gpu) for number, gpu in enumerate((3, 1))]
    assert planned_launch.free_by_gpu(ranks) == {1: GIB, 3: 3 * GIB}


def test_the_ranks_are_the_ones_that_will_run(launch: Planned) -> None:
    assert len(launch("--pp-size", 3).case().stages) == 3
    planned = launch("--tp-size", 2, "--ep-size", 2, "--dp-size", 2).parallel
    assert (planned.tp, planned.ep, planned.dp, planned.dp_attention, planned.ranks) == (2, 2, 2, False, 4)
    assert launch("--tp-size", 2, "--dp-size", 2, "--enable-dp-attention").parallel.dp_attention


def test_stages_are_as_sglang_divides_them(launch: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch("--pp-size", 2).case().stages == [range(1), range(1, 3)]
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "2,1")
    assert launch("--pp-size", 2).case().stages == [range(2), range(2, 3)]


def test_a_gpu_of_unknown_size_cannot_be_planned(launch: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own answer where it sees none."""
    monkeypatch.setattr(common, "is_cuda", lambda: False)
    monkeypatch.setattr(planned_launch, "get_device_memory_capacity", common.get_device_memory_capacity)
    with pytest.raises(Uncounted, match="SGLang does not know the size of this GPU"):
        launch()


def test_rates_are_those_of_a_known_gpu_and_zeros_of_others(launch: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch().rates[1] == GPUS["H200"].hbm_gbps
    monkeypatch.setattr(planned_launch, "visible_gpus", lambda: [("NVIDIA Nothing", H200)])
    assert launch().rates == (0, 0, 0)
    monkeypatch.setattr(planned_launch, "visible_gpus", list)
    assert launch().rates == (0, 0, 0)


def test_a_link_that_a_server_measured_counts_in_place_of_the_published_one(
    launch: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def kept_link(ranks: int) -> KeptLink:
        asked.append(ranks)
        return links.kept(ranks, scattered=35.0, engine=52.0)

    published = launch().case().machine
    monkeypatch.setattr(planned_launch, "kept_link", kept_link)
    machine = launch("--tp-size", 2).case().machine
    assert asked == [2]
    assert (published.measured, published.link_gbps) == (None, GPUS["H200"].link_gbps)
    assert (machine.measured, machine.link_gbps) == (links.rates(scattered=35.0, engine=52.0), 52.0)
    monkeypatch.setattr(planned_launch, "visible_gpus", lambda: [("NVIDIA Nothing", H200)])
    assert launch().case().machine.measured is None, "nothing is predicted for it"


def test_the_longest_step_is_a_chunk_of_all_groups_or_without_chunks_what_sglang_takes_at_once(launch: Planned) -> None:
    chunk = ("--chunked-prefill-size", 2048)
    assert launch(*chunk).case().defaults.chunked_prefill_size == 2048
    assert launch(*chunk, "--tp-size", 2, "--dp-size", 2, "--enable-dp-attention").chunked_prefill_size == 2048
    whole = ("--chunked-prefill-size", -1)
    assert launch(*whole, "--max-prefill-tokens", 5000).chunked_prefill_size == 5000
    assert launch(*whole, "--max-prefill-tokens", 1000).chunked_prefill_size == CONTEXT
    assert launch(stream_tokens="64").case().stream_tokens(12) == 64


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("words", [(), ("--tp-size", 2, "--dp-size", 2, "--enable-dp-attention")])
def test_a_launch_streams_by_the_rates_that_its_plan_takes(
    launch: Planned,
    cuda_arguments: Arguments,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    measured: bool,
) -> None:
    kept = links.kept(2, scattered=35.0, engine=52.0) if measured else None
    monkeypatch.setattr(planned_launch, "kept_link", lambda ranks: kept)
    case = launch(*words).case()
    rates = planned_launch.rates_of_streams(resolving_view(cuda_arguments("--model-path", model, "--device", "cuda", *words)))
    assert rates is not None
    assert rates == stream_rates(case.machine, case.parallel, case.assumed)
    assert rates.read == pytest.approx(35e9 if measured else GPUS["H200"].link_gbps * case.assumed.read_efficiency * 1e9)
    monkeypatch.setattr(planned_launch, "visible_gpus", lambda: [("NVIDIA Nothing", H200)])
    found = planned_launch.rates_of_streams(resolving_view(cuda_arguments("--model-path", model, "--device", "cuda", *words)))
    assert (found is None) == (not measured)


def test_only_a_hierarchical_cache_of_given_size_is_counted(launch: Planned) -> None:
    enabled = "--enable-hierarchical-cache"
    assert launch("--hicache-size", 10).hicache_bytes == 0, "not enabled"
    assert launch(enabled, "--hicache-size", 10).hicache_bytes == 10_000_000_000
    assert launch(enabled, "--hicache-ratio", 1.5).hicache_ratio == 1.5
    shrinking = launch(enabled)
    assert (shrinking.hicache_bytes, shrinking.hicache_ratio) == (0, 0)
    assert "takes the remaining host RAM" in shrinking.notes[0]


def test_with_deepep_every_rank_holds_shared_experts_whole(launch: Planned) -> None:
    assert not launch().parallel.shared_whole
    buffered = launch("--tp-size", 2, "--moe-a2a-backend", "deepep")
    assert buffered.parallel.shared_whole
    assert "DeepEP's buffers" in buffered.notes[0]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--nnodes", 2, "--tp-size", 2, "--dist-init-addr", "127.0.0.1:1"), "--nnodes 2"),
        (("--enable-eplb", "--tp-size", 2, "--ep-size", 2), "--enable-eplb"),
        (("--ep-num-redundant-experts", 2), "--ep-num-redundant-experts 2"),
        (("--moe-dense-tp-size", 1), "--moe-dense-tp-size 1"),
        (("--enable-lora", "--max-lora-rank", 8, "--lora-target-modules", "q_proj"), "the adapters of --enable-lora"),
    ],
)
def test_what_only_adds_to_a_launch_hinders_auto_and_no_lower_bound(
    launch: Planned, words: tuple[object, ...], named: str
) -> None:
    with pytest.raises(Uncounted, match=f"does not count {named}"):
        launch(*words)
    assert launch(*words, at_least=True).case().most_in_vram() is not None


@pytest.mark.parametrize("at_least", [False, True])
def test_what_changes_the_checkpoint_is_counted_as_it_becomes(launch: Planned, at_least: bool) -> None:
    whole = launch(at_least=at_least).case().model
    fewer = launch("--json-model-override-args", '{"num_hidden_layers": 2}', at_least=at_least).case().model
    assert fewer.layers == whole.layers[:2]
    assert launch("--load-format", "pt", at_least=at_least).case().model.layers == whole.layers, "by its config"
    converted = launch("--quantization", "fp8", at_least=at_least).case().model
    assert [2 * layer.expert_bytes for layer in converted.layers] == [layer.expert_bytes for layer in whole.layers]
    attention = whole.layers[0].attention // (2 if at_least else 1)
    assert converted.layers[0].attention == attention


def test_a_checkpoint_without_experts_is_dense_whatever_its_class_has_by_default(
    cuda_arguments: Arguments, model: Path, tmp_path: Path
) -> None:
    """The class that transformers has for a dense Qwen3.5 is also that of one with experts."""
    folder = tmp_path / "dense"
    folder.mkdir()
    config = read_json(config_folder("Qwen/Qwen3.5-35B-A3B") / "config.json")
    text = {name: value for name, value in config["text_config"].items() if "expert" not in name and "moe" not in name}
    config |= {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    config["text_config"] = {**text, "model_type": "qwen3_5_text", "intermediate_size": 512}
    (folder / "config.json").write_text(json.dumps(config))
    write(folder, [TensorInfo("model.language_model.layers.0.mlp.gate_proj.weight", "BF16", (512, 2048))])
    for path, dense in ((folder, True), (model, False)):
        given = cuda_arguments("--model-path", path, "--skip-tokenizer-init", "--device", "cuda")
        assert expert_bytes.is_dense(resolving_view(given), model_config_of(given)) is dense


@pytest.mark.parametrize(
    ("words", "share", "loading"),
    [
        ((), 1, 1),
        (("--ep-num-redundant-experts", 4), 1, 1),
        (("--quantization", "fp8"), 1 / 2, 1),
        (("--quantization", "w8a8_fp8"), 1 / 2, 1 / 2),
        (("--dp-size", 2), 2, 2),
        (("--tp-size", 4, "--nnodes", 2, "--dist-init-addr", "h:1"), 1 / 2, 1 / 2),
        (("--tp-size", 4, "--pp-size", 2, "--nnodes", 4, "--node-rank", 1, "--dist-init-addr", "h:1"), 1 / 4, 1 / 4),
    ],
)
def test_the_experts_of_this_machines_ranks_are_counted(
    cuda_arguments: Arguments, model: Path, words: tuple[object, ...], share: float, loading: float
) -> None:
    given = cuda_arguments("--model-path", model, "--device", "cuda", *words)
    cfg = resolving_view(given)
    found = expert_bytes.expert_bytes(4, cfg, model_config_of(given))
    assert found is not None
    one = load(model, "bfloat16").expert_bytes / 16
    assert found.resident == pytest.approx(4 * one * share, rel=1e-4)
    assert found.offloaded == pytest.approx((12 + cfg.ep_num_redundant_experts) * one * share, rel=1e-4)
    assert found.loading == pytest.approx((12 + cfg.ep_num_redundant_experts) * one * loading, rel=1e-4)


@pytest.mark.parametrize(
    ("words", "slots", "host_mib", "one_memory", "warned"),
    [
        (("--enable-memory-saver",), 0, 1024 + 37, False, None),
        (("--enable-memory-saver",), 0, 1024 + 36, False, "36.0 MiB"),
        (("--enable-memory-saver",), 4, 1024 + 37, False, "45.0 MiB"),
        (("--enable-memory-saver",), 0, 1024 + 36, True, None),
        ((), 0, 1024 + 36, False, None),
    ],
)
def test_experts_that_host_ram_can_never_take_are_warned_of_where_memory_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
    cuda_arguments: Arguments,
    model: Path,
    words: tuple[object, ...],
    slots: int,
    host_mib: int,
    one_memory: bool,
    warned: str | None,
) -> None:
    """36 MiB of experts, of which a quarter must be in host RAM in any case, and as much for 4 slots of 16 experts."""
    monkeypatch.setattr(expert_bytes, "host_available", lambda: (host_mib << 20) + (1 << 20))
    monkeypatch.setattr(expert_bytes, "has_one_memory", lambda: one_memory)
    given = cuda_arguments("--model-path", model, "--device", "cuda", *words)
    found = expert_bytes.never_released(served_config(num_resident=12, slots=slots or None), given)
    assert bool(found) == (warned is not None)
    if warned is not None:
        assert found[0].startswith("--enable-memory-saver: release_memory_occupation can never free the VRAM of experts here")
        assert f"host RAM must hold all of them meanwhile, {warned}, and " in found[0]


@pytest.mark.parametrize(("one_memory", "vram_mib", "peak"), [(False, 1 << 17, 9), (False, 10, 26), (True, 10, 22.5)])
def test_what_vram_does_not_hold_before_it_is_converted_is_in_host_ram_while_it_loads(
    monkeypatch: pytest.MonkeyPatch, cuda_arguments: Arguments, model: Path, one_memory: bool, vram_mib: int, peak: float
) -> None:
    """36 MiB of experts, of which 12 of 16 become 13.5 MiB of FP8 in VRAM."""
    monkeypatch.setattr(expert_bytes, "get_device_memory_capacity", lambda device: vram_mib)
    monkeypatch.setattr(expert_bytes, "has_one_memory", lambda: one_memory)
    given = cuda_arguments("--model-path", model, "--device", "cuda", "--quantization", "fp8")
    found = expert_bytes.expert_bytes(12, resolving_view(given), model_config_of(given))
    assert found is not None
    assert found.loading / (1 << 20) == pytest.approx(peak, rel=1e-3)


class TestDrafts:
    @pytest.mark.parametrize(
        ("words", "bundled", "verified"),
        [
            ((), False, 0),
            (("--speculative-algorithm", "NEXTN", *DRAFTS), True, 3),
            (("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", 4), False, 4),
        ],
    )
    def test_they_are_the_models_own_or_no_model_at_all(
        self, cuda_arguments: Arguments, checkpoints: Checkpoints, words: tuple[object, ...], bundled: bool, verified: int
    ) -> None:
        path = checkpoints("glm4_moe")
        cfg = resolving_view(cuda_arguments("--model-path", path, "--device", "cuda", *words))
        assert draft_source.from_the_checkpoint(cfg) == bundled
        assert draft_source.separate(cfg) is None
        assert draft_source.tokens_verified(cfg) == verified
        assert draft_source.uncounted(cfg) == []

    def test_they_have_a_checkpoint_of_their_own(
        self, cuda_arguments: Arguments, model: Path, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        of = {"STANDALONE": checkpoints("olmoe"), "EAGLE": eagle(tmp_path / "eagle"), "EAGLE3": tmp_path / "eagle"}
        for algorithm, path in of.items():
            words = ("--speculative-algorithm", algorithm, *DRAFTS, "--speculative-draft-model-path", path)
            cfg = resolving_view(cuda_arguments("--model-path", model, "--device", "cuda", *words))
            assert not draft_source.from_the_checkpoint(cfg)
            assert draft_source.separate(cfg).name == str(path)
            assert draft_source.uncounted(cfg) == []

    def problems(self, cuda_arguments: Arguments, path: Path, number: int | None, *words: object) -> list[str]:
        config = parse({"num_resident": "4", "draft_num_resident": number})
        assert config is not None
        cfg = resolving_view(cuda_arguments("--model-path", path, "--device", "cuda", *words))
        return draft_source.problems(config, cfg, 16)

    def test_residents_of_drafts_need_a_draft_model(self, cuda_arguments: Arguments, model: Path) -> None:
        assert self.problems(cuda_arguments, model, None) == []
        (problem,) = self.problems(cuda_arguments, model, 4)
        assert problem.startswith("--expert-offload-draft-num-resident 4: no draft model is loaded")
        (problem,) = self.problems(cuda_arguments, model, 4, "--speculative-algorithm", "NGRAM")
        assert "(--speculative-algorithm NGRAM)" in problem

    def test_draft_layers_of_the_checkpoint_have_its_experts(self, cuda_arguments: Arguments, checkpoints: Checkpoints) -> None:
        drafting = (checkpoints("glm4_moe"), "--speculative-algorithm", "NEXTN", *DRAFTS)
        assert self.problems(cuda_arguments, drafting[0], 16, *drafting[1:]) == []
        (problem,) = self.problems(cuda_arguments, drafting[0], 17, *drafting[1:])
        assert problem.endswith("17: the draft model has 16 routed experts a layer; give at most as many")

    def test_a_draft_model_of_its_own_has_its_own(
        self, cuda_arguments: Arguments, model: Path, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        olmoe, dense = (*STANDALONE, checkpoints("olmoe")), eagle(tmp_path / "dense")
        assert self.problems(cuda_arguments, model, 16, *olmoe) == []
        (problem,) = self.problems(cuda_arguments, model, 17, *olmoe)
        assert problem.endswith("the draft model has 16 routed experts a layer; give at most as many")
        words = ("--speculative-algorithm", "EAGLE", *DRAFTS, "--speculative-draft-model-path", dense)
        (problem,) = self.problems(cuda_arguments, model, 4, *words)
        assert problem.endswith(f"4: the draft model ({dense}) has no routed experts; leave it out")

    def test_the_plan_counts_residents_for_layers_of_the_checkpoint_only(
        self, launch: Planned, checkpoints: Checkpoints
    ) -> None:
        own = launch(*STANDALONE, checkpoints("olmoe"), draft_num_resident=4)
        assert own.case().workload.draft_num_resident is None
        assert "the plan counts all experts of the draft model as if they were in VRAM" in own.notes
        bundled = launch("--speculative-algorithm", "NEXTN", *DRAFTS, path=checkpoints("glm4_moe"), draft_num_resident=4)
        assert bundled.case().workload.draft_num_resident == 4
        assert not bundled.notes


def pools(
    cuda_arguments: Arguments, model: str, *words: object, tokens: int = DEFAULT_KV_TOKENS, requests: int = 1
) -> ServerPools:
    """By SGLang's configurators, for the minimum and for ``tokens``, on one GPU if ``words`` name no others."""
    from sglang_uvm_offload.plugin.launch.server_pools import server_pools

    given = cuda_arguments("--model-path", config_folder(model), "--device", "cuda", *WITHOUT_TOKENIZER, *words)
    cfg = resolving_view(given)
    parallel = Parallel(cfg.tp_size, cfg.ep_size, cfg.pp_size)
    with mock.patch.dict(os.environ, given._environment):
        return server_pools(given, parallel, {2: 1, tokens: requests})


def pool(*launch: Any, tokens: int = DEFAULT_KV_TOKENS, requests: int = 1) -> int:
    """Bytes of one rank of the first stage."""
    return pools(*launch, tokens=tokens, requests=requests).nbytes(0, tokens)


def test_an_argument_that_nothing_decides_has_its_fallback(cuda_arguments: Arguments) -> None:
    """SGLang leaves it open until a rank reads it."""
    given = cuda_arguments("--model-path", config_folder("Qwen/Qwen3.5-35B-A3B"), "--device", "cuda", *WITHOUT_TOKENIZER)
    assert given.mamba_full_memory_ratio is None
    assert resolving_view(given).mamba_full_memory_ratio == 0.9


@ASKED
class TestStatesOfLinearAttention:
    """Qwen3.5-35B-A3B: 30 layers keep a state for each request, 10 keep keys and values of 2 heads of 256."""

    MODEL = "Qwen/Qwen3.5-35B-A3B"
    STATE = 30 * ((2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4)
    """A convolution over 2 x 16 keys and 32 values of 128, three tokens wide, and a matrix of float32 for each value head."""
    TOKEN = 10 * 2 * 2 * 256 * 2
    CACHE = DEFAULT_KV_TOKENS * TOKEN

    def near(self, nbytes: int) -> Any:
        return pytest.approx(nbytes, rel=2e-6, abs=2)

    def test_as_many_states_as_a_flag_names_are_kept_and_one_for_padding(self, cuda_arguments: Arguments) -> None:
        found = pool(cuda_arguments, self.MODEL, "--max-mamba-cache-size", 64)
        assert found == self.near(65 * self.STATE + self.CACHE)
        half = pool(cuda_arguments, self.MODEL, "--max-mamba-cache-size", 64, "--mamba-ssm-dtype", "bfloat16")
        assert found - half == self.near(65 * 30 * 32 * 128 * 128 * 2)

    def test_without_a_radix_cache_each_request_keeps_one(self, cuda_arguments: Arguments) -> None:
        words = ("--disable-radix-cache", "--max-running-requests", 8)
        assert pool(cuda_arguments, self.MODEL, *words, requests=8) == self.near(9 * self.STATE + self.CACHE)

    def test_without_flags_sglangs_own_ratio_to_the_cache_holds(self, cuda_arguments: Arguments) -> None:
        """No argument names it; SGLang takes 0.9 when it reads it. Whole states of 0.9 parts are taken off, and what is left is
        the cache."""
        found = pool(cuda_arguments, self.MODEL)
        states = int((found * 0.9 / 1.9 - self.STATE) // self.STATE)
        assert found == pytest.approx((states + 1) * self.STATE + self.CACHE, abs=self.STATE)
        more = pool(cuda_arguments, self.MODEL, "--mamba-full-memory-ratio", 2)
        assert more == pytest.approx(3 * self.CACHE, abs=self.STATE)

    def test_ranks_share_a_state(self, cuda_arguments: Arguments) -> None:
        words = ("--max-mamba-cache-size", 64)
        whole, half = (pool(cuda_arguments, self.MODEL, *words, *more) for more in ((), ("--tp-size", 2)))
        assert half == self.near(whole // 2)

    def test_a_stage_keeps_the_states_of_its_layers(self, cuda_arguments: Arguments) -> None:
        words = ("--max-mamba-cache-size", 64, "--pp-size", 2)
        assert pool(cuda_arguments, self.MODEL, *words) == self.near(65 * self.STATE // 2 + self.CACHE // 2)

    def test_the_rules_for_older_versions_of_sglang_agree(self, cuda_arguments: Arguments) -> None:
        given = cuda_arguments("--model-path", config_folder(self.MODEL), "--device", "cuda", *WITHOUT_TOKENIZER)
        found = linear_attention.state(resolving_view(given), model_config_of(given))
        assert found is not None
        assert found.layer_bytes * 30 == self.STATE
        beyond = found.bytes_beside(self.CACHE, self.STATE, 1) - (pool(cuda_arguments, self.MODEL) - self.CACHE)
        assert 0 <= beyond < 2 * self.STATE, "an upper bound, by a state that is not whole and one for padding"

    def test_many_requests_need_more(self, cuda_arguments: Arguments) -> None:
        one, many = (pool(cuda_arguments, self.MODEL, requests=requests) for requests in (1, 64))
        assert many - one > 32 * self.STATE


@ASKED
@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("google/gemma-4-26B-A4B", 5 * 2 * 512 + 0.8 * 25 * 8 * 256),
        ("openai/gpt-oss-120b", 18 * 8 * 64 + 0.8 * 18 * 8 * 64),
        ("Qwen/Qwen3-30B-A3B", 48 * 4 * 128),
    ],
)
def test_layers_with_a_window_take_a_part_of_the_cache_by_sglangs_own_ratio(
    cuda_arguments: Arguments, model: str, layers: float
) -> None:
    """``layers``: the elements of the keys of one token."""
    assert pool(cuda_arguments, model) == pytest.approx(DEFAULT_KV_TOKENS * layers * 2 * 2, rel=1e-4)


@ASKED
def test_a_window_of_another_share_is_counted_and_no_flag_of_the_users_is_named(
    cuda_arguments: Arguments, launch: Planned
) -> None:
    few = pool(cuda_arguments, "openai/gpt-oss-120b", "--swa-full-tokens-ratio", 0.25)
    assert few == pytest.approx(DEFAULT_KV_TOKENS * 18 * 1.25 * 8 * 64 * 2 * 2, rel=1e-4)
    all_full = pool(cuda_arguments, "openai/gpt-oss-120b", "--disable-hybrid-swa-memory")
    assert all_full == pytest.approx(DEFAULT_KV_TOKENS * 36 * 8 * 64 * 2 * 2, rel=1e-4)


@ASKED
def test_states_that_sglang_cannot_size_are_told_by_its_error(launch: Planned) -> None:
    words = (*WITHOUT_TOKENIZER, "--json-model-override-args", '{"full_attention_interval": "four"}')
    with pytest.raises(Uncounted, match=r"does not count the states .* and SGLang cannot either: TypeError: "):
        launch(*words, path=config_folder("Qwen/Qwen3-Next-80B-A3B-Thinking"))


@ASKED
def test_a_cache_of_the_type_that_the_checkpoint_states_is_counted(cuda_arguments: Arguments) -> None:
    """NVFP4 checkpoints of ModelOpt state an FP8 cache, in a file beside the config."""
    name, wide = "nvidia/Qwen3-235B-A22B-NVFP4", "Qwen/Qwen3-235B-A22B"
    assert pool(cuda_arguments, name) * 2 == pytest.approx(pool(cuda_arguments, wide), rel=1e-5)


@ASKED
def test_drafts_of_the_checkpoint_take_a_part_of_the_cache(cuda_arguments: Arguments) -> None:
    plain, drafting = (
        pool(cuda_arguments, "deepseek-ai/DeepSeek-V3", *words) for words in ((), ("--speculative-algorithm", "NEXTN", *DRAFTS))
    )
    assert drafting / plain == pytest.approx(62 / 61, rel=1e-4)


WINDOWLESS = ("stepfun-ai--Step-3.7-Flash", "stepfun-ai--Step-3.7-Flash-FP8")
"""Their config names an architecture of which SGLang 0.5.23 does not know that it has a window: it keeps all tokens."""


@ASKED
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if any(part in each for part in SAMPLE) else pytest.mark.nightly) for each in MODELS],
)
def test_the_planners_rules_agree_with_sglang(cuda_arguments: Arguments, name: str) -> None:
    """On what a further token takes, from the config alone. The number of states is set, so that no part of it is theirs."""
    if name in WINDOWLESS:
        pytest.xfail("the plan counts less than SGLang keeps")
    model, words = name.replace("--", "/", 1), ("--kv-cache-dtype", "bf16", "--max-mamba-cache-size", 64)
    few, many = (pool(cuda_arguments, model, *words, tokens=tokens) for tokens in (DEFAULT_KV_TOKENS, 2 * DEFAULT_KV_TOKENS))
    config = text_config(read_json(config_folder(model) / "config.json"))
    planned = kv_shape(config).pool_bytes(range(config["num_hidden_layers"]), 1, 2)
    assert planned == pytest.approx((many - few) / DEFAULT_KV_TOKENS, rel=1e-3)


@ASKED
def test_a_stage_whose_layers_all_have_a_window_keeps_every_token_in_them(cuda_arguments: Arguments) -> None:
    """A part of the tokens would be a part of those that layers without a window keep, and this stage has no such layer."""
    model = "google/gemma-4-26B-A4B"
    made = pools(cuda_arguments, model, "--pp-size", 6)
    shape = kv_shape(text_config(read_json(config_folder(model) / "config.json")))
    first = range(5)
    assert shape.window_layers.issuperset(first)
    assert shape.pool_bytes(first, 1, 2) == pytest.approx(made.token_bytes(0), rel=1e-3)


@ASKED
def test_a_launch_plans_with_the_pools_that_sglang_makes(launch: Planned, cuda_arguments: Arguments) -> None:
    """At the tokens that it asks for, and between them and the least."""
    case = launch("--max-running-requests", 4).case()
    token = 3 * 2 * 2 * 64 * 2  # three layers, two heads of keys and of values
    assert case.pools is not None
    assert case.pool_bytes(0) == pytest.approx(4 * CONTEXT * token, rel=1e-4)
    assert case.pool_bytes(0, CONTEXT) == pytest.approx(CONTEXT * token, rel=1e-3)
    other = dataclasses.replace(case, parallel=Parallel(tp=2))
    assert other.pool_bytes(0) * 2 == pytest.approx(case.pool_bytes(0), rel=1e-3), "the planner's rules for other ranks"
