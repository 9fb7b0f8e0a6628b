"""The ranks of a launch and the memory that it asks for, by the arguments that SGLang itself resolves on a GPU machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from arguments import Arguments
from builders import links
from builders.drafts import eagle
from checkpoints import Checkpoints
from sglang.srt.arg_groups.overrides import model_config_of

from sglang_uvm_offload.memory.kept_links import KeptLink
from sglang_uvm_offload.plan.gpus import GPUS
from sglang_uvm_offload.plan.inputs import Assumptions
from sglang_uvm_offload.plan.machine import GIB
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import draft_source, ranks
from sglang_uvm_offload.plugin.launch.demand import demand_of
from sglang_uvm_offload.plugin.server_config import requested_of
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.residency.demand import Demand

H200 = GPUS["H200"].memory_mib << 20
CONTEXT = 2048
"""The context length of the tests' checkpoints."""
GROUPED = ("--tp-size", 2, "--dp-size", 2, "--enable-dp-attention")
DRAFTS = ("--speculative-num-steps", 2, "--speculative-eagle-topk", 1, "--speculative-num-draft-tokens", 3)


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3_moe", expert_size=512)


class Resolved:
    """The launch of a model with these arguments."""

    def __init__(self, arguments: Arguments, model: Path):
        self._arguments, self._model = arguments, model

    def __call__(self, *words: object) -> Any:
        return self._arguments("--model-path", self._model, "--device", "cuda", *words)

    def view(self, *words: object) -> Any:
        return resolving_view(self(*words))

    def demand(self, *words: object) -> tuple[Demand, int]:
        """What is asked for, and the tokens of it on each rank."""
        given = self(*words)
        cfg = resolving_view(given)
        found = demand_of(cfg, given, model_config_of(given))
        return found, found.tokens_of_rank(max(cfg.attn_dp_size, cfg.dp_size))

    def longest_step(self, *words: object) -> int:
        given = self(*words)
        return ranks.longest_step(resolving_view(given), model_config_of(given))


@pytest.fixture
def launch(model: Path, cuda_arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> Resolved:
    """On GPUs of an H200."""
    monkeypatch.setattr(ranks, "visible_gpus", lambda: [("NVIDIA H200", H200)])
    return Resolved(cuda_arguments, model)


def test_each_replica_takes_as_many_requests_as_the_flag_names_and_groups_share_them(launch: Resolved) -> None:
    four = ("--max-running-requests", 4)
    assert launch.demand(*four)[1] == 4 * CONTEXT
    assert launch.demand(*four, "--dp-size", 2)[1] == 4 * CONTEXT
    assert launch.demand(*four, *GROUPED)[1] == 2 * CONTEXT
    assert launch.demand("--max-total-tokens", 512)[1] == 512


@pytest.mark.parametrize("given", [0, -1])
def test_less_than_one_request_is_one_as_for_sglang(launch: Resolved, given: int) -> None:
    assert launch.demand("--max-running-requests", given) == launch.demand("--max-running-requests", 1)


def test_requests_that_sglang_sets_for_drafts_are_not_asked_for(checkpoints: Checkpoints, cuda_arguments: Arguments) -> None:
    drafting = Resolved(cuda_arguments, checkpoints("glm4_moe"))
    words = ("--speculative-algorithm", "NEXTN", *DRAFTS)
    assert drafting.view(*words).max_running_requests == 48
    assert drafting.demand(*words) == drafting.demand()


@pytest.mark.parametrize("words", [(), ("--enable-dp-lm-head",)])
def test_all_ranks_share_the_head_unless_the_launch_gives_each_group_its_own(launch: Resolved, words: tuple[str, ...]) -> None:
    view = launch.view("--tp-size", 4, "--dp-size", 2, "--enable-dp-attention", *words)
    assert ranks.parallel_sizes(view).dp_lm_head == bool(words)


def test_the_sizes_are_those_of_the_ranks_that_will_run(launch: Resolved) -> None:
    found = ranks.parallel_sizes(launch.view("--tp-size", 2, "--ep-size", 2, "--dp-size", 2))
    assert (found.tp, found.ep, found.dp, found.dp_attention, found.ranks) == (2, 2, 2, False, 4)
    assert ranks.parallel_sizes(launch.view(*GROUPED)).dp_attention
    assert not ranks.parallel_sizes(launch.view()).shared_whole
    assert ranks.parallel_sizes(launch.view("--tp-size", 2, "--moe-a2a-backend", "deepep")).shared_whole


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
    launch: Resolved, words: tuple[object, ...], gpus: list[int], stages: list[int]
) -> None:
    found = ranks.ranks(launch.view(*words))
    assert sorted({rank.gpu for rank in found}) == gpus
    assert sorted({rank.stage for rank in found}) == stages


def test_a_rank_is_named_by_its_replica_and_stage(launch: Resolved) -> None:
    assert ranks.ranks(launch.view("--tp-size", 2, "--pp-size", 2, "--dp-size", 2))[6] == (1, 1, 0, 6)


def test_minus_one_on_the_command_line_is_off(launch: Resolved) -> None:
    words = ("--expert-offload-slots", "8", "--expert-offload-num-resident")
    assert requested_of(launch(*words, "-1")) is None
    requested = requested_of(launch(*words, "4"))
    assert requested is not None
    assert requested.num_resident == 4


def test_free_memory_is_queried_of_the_gpus_that_have_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "free_vram", lambda asked: [gpu * GIB for gpu in asked])
    two = [ranks.Rank(0, 0, number, gpu) for number, gpu in enumerate((3, 1))]
    assert ranks.free_by_gpu(two) == {1: GIB, 3: 3 * GIB}
    monkeypatch.setattr(ranks, "has_one_memory", lambda: True)
    monkeypatch.setattr(ranks, "host_available", lambda: 7 * GIB)
    assert ranks.free_by_gpu(two) == {1: 7 * GIB, 3: 7 * GIB}


def test_rates_are_those_of_a_known_gpu_and_zeros_of_others(launch: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.rates()[1] == GPUS["H200"].hbm_gbps
    monkeypatch.setattr(ranks, "visible_gpus", lambda: [("NVIDIA Nothing", H200)])
    assert ranks.rates() == (0, 0, 0)
    monkeypatch.setattr(ranks, "visible_gpus", list)
    assert ranks.rates() == (0, 0, 0)


@pytest.mark.parametrize("words", [(), GROUPED])
def test_a_link_that_a_server_measured_counts_in_place_of_the_published_one(
    launch: Resolved, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...]
) -> None:
    asked = []

    def kept_link(number: int) -> KeptLink | None:
        asked.append(number)
        return links.kept(number, scattered=35.0, engine=52.0) if len(asked) > 1 else None

    monkeypatch.setattr(ranks, "kept_link", kept_link)
    view = launch.view(*words)
    published, measured = ranks.rates_of_streams(view), ranks.rates_of_streams(view)
    assert published is not None
    assert measured is not None
    assert asked == [2 if words else 1] * 2
    assert published.read == pytest.approx(GPUS["H200"].link_gbps * Assumptions().read_efficiency * 1e9)
    assert measured.read == pytest.approx(35e9)
    monkeypatch.setattr(ranks, "visible_gpus", lambda: [("NVIDIA Nothing", H200)])
    asked.clear()
    assert ranks.rates_of_streams(view) is None


def test_the_longest_step_is_a_chunk_of_all_groups_or_without_chunks_what_sglang_takes_at_once(launch: Resolved) -> None:
    chunk = ("--chunked-prefill-size", 2048)
    assert launch.longest_step(*chunk) == 2048
    assert launch.longest_step(*chunk, *GROUPED) == 2048
    whole = ("--chunked-prefill-size", -1)
    assert launch.longest_step(*whole, "--max-prefill-tokens", 5000) == 5000
    assert launch.longest_step(*whole, "--max-prefill-tokens", 1000) == CONTEXT


def test_only_a_hierarchical_cache_of_given_size_is_counted(launch: Resolved) -> None:
    def found(*words: object) -> dict[str, Any]:
        given = launch(*words)
        return ranks.hicache(resolving_view(given), given)

    enabled = "--enable-hierarchical-cache"
    assert found("--hicache-size", 10) == {}, "not enabled"
    assert found(enabled, "--hicache-size", 10) == {"hicache_bytes": 10_000_000_000}
    assert found(enabled, "--hicache-ratio", 1.5) == {"hicache_ratio": 1.5}
    assert found(enabled) == {"hicache_ratio": 0}, "SGLang shrinks it to what is free"


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
        cfg = Resolved(cuda_arguments, checkpoints("glm4_moe")).view(*words)
        assert draft_source.from_the_checkpoint(cfg) == bundled
        assert draft_source.tokens_verified(cfg) == verified

    @pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE"])
    def test_they_have_a_checkpoint_of_their_own(
        self, launch: Resolved, checkpoints: Checkpoints, tmp_path: Path, algorithm: str
    ) -> None:
        path = checkpoints("olmoe") if algorithm == "STANDALONE" else eagle(tmp_path / "eagle")
        words = ("--speculative-algorithm", algorithm, *DRAFTS, "--speculative-draft-model-path", path)
        assert not draft_source.from_the_checkpoint(launch.view(*words))

    def problems(self, launch: Resolved, number: int | None, *words: object) -> list[str]:
        config = parse({"num_resident": "4", "draft_num_resident": number})
        assert config is not None
        return draft_source.problems(config, launch.view(*words))

    def test_residents_of_drafts_need_a_draft_model(
        self, launch: Resolved, checkpoints: Checkpoints, cuda_arguments: Arguments
    ) -> None:
        assert self.problems(launch, None) == []
        (problem,) = self.problems(launch, 4)
        assert problem.startswith("--expert-offload-config draft_num_resident 4: no draft model is loaded")
        (problem,) = self.problems(launch, 4, "--speculative-algorithm", "NGRAM")
        assert "(--speculative-algorithm NGRAM)" in problem
        drafting = Resolved(cuda_arguments, checkpoints("glm4_moe"))
        assert self.problems(drafting, 17, "--speculative-algorithm", "NEXTN", *DRAFTS) == [], "the built model says how many"
