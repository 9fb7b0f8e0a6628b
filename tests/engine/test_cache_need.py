"""The KV cache and states of a rank, by SGLang's own configurators, for the arguments that it resolves on a GPU machine."""

from __future__ import annotations

from typing import Any

import pytest
from arguments import Arguments
from builders.ranked import as_a_rank, runner_of, stage_of
from builders.shapes import ask_at_once
from builders.true_shape import CONFIGS, config_folder

from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.plan.machine import preset
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.rank.cache_need import CacheNeed
from sglang_uvm_offload.residency.demand import DEFAULT_KV_TOKENS as TOKENS

WITHOUT_TOKENIZER = ("--skip-tokenizer-init", "--load-format", "dummy")
"""For a configuration without other files."""
DRAFTS = ("--speculative-num-steps", 2, "--speculative-eagle-topk", 1, "--speculative-num-draft-tokens", 3)

UNKNOWN = ("stepfun-ai--Step-3.7-Flash", "stepfun-ai--Step-3.7-Flash-FP8")
"""SGLang 0.5.23 has no class for their architecture."""
MODELS = sorted(folder.name for folder in CONFIGS.iterdir() if folder.is_dir() and folder.name not in UNKNOWN)
SAMPLE = ("DeepSeek-V3", "GLM-5.2-FP8", "Kimi-K3", "Llama-4-Scout", "Qwen3.5-35B", "gemma-4-26B", "gpt-oss-20b")
"""One model for each kind of cache; the others run at night."""
pytestmark = pytest.mark.since("0.5.22", "it keeps a rank's settings in no contexts")


@pytest.fixture(scope="module", autouse=True)
def asked(request: pytest.FixtureRequest) -> None:
    """SGLang builds the models of the cases that this run has chosen at once."""
    items: list[Any] = [item for item in request.session.items if item.module is request.module]  # type: ignore[attr-defined]
    names = [item.callspec.params.get("name") for item in items if hasattr(item, "callspec")]
    ask_at_once([(CONFIGS / name, {}) for name in names if name])


def resolved(cuda_arguments: Arguments, model: str, *words: object) -> Any:
    return cuda_arguments("--model-path", config_folder(model), "--device", "cuda", *WITHOUT_TOKENIZER, *words)


def need(cuda_arguments: Arguments, model: str, *words: object, tokens: int = TOKENS, requests: int = 1) -> int:
    """Bytes of one rank of the first stage, on one GPU if ``words`` name no others."""
    given = resolved(cuda_arguments, model, *words)
    with as_a_rank(given):
        return CacheNeed(runner_of(given), stage_of(given)).nbytes(tokens, requests)


def test_an_argument_that_nothing_decides_has_its_fallback(cuda_arguments: Arguments) -> None:
    """SGLang leaves it open until a rank reads it."""
    given = resolved(cuda_arguments, "Qwen/Qwen3.5-35B-A3B")
    assert given.mamba_full_memory_ratio is None
    assert resolving_view(given).mamba_full_memory_ratio == 0.9


def test_a_further_request_needs_no_more_of_a_model_without_states(cuda_arguments: Arguments) -> None:
    one, many = (need(cuda_arguments, "Qwen/Qwen3-30B-A3B", requests=requests) for requests in (1, 64))
    assert one == many == pytest.approx(TOKENS * 48 * 2 * 4 * 128 * 2, rel=1e-4)


def test_a_cache_that_no_gpu_holds_is_an_error(cuda_arguments: Arguments) -> None:
    with pytest.raises(ValueError, match="SGLang cannot fit a KV cache of 1000000000 tokens on any GPU"):
        need(cuda_arguments, "Qwen/Qwen3-30B-A3B", tokens=10**9)


class TestStatesOfLinearAttention:
    """Qwen3.5-35B-A3B: 30 layers keep a state for each request, 10 keep keys and values of 2 heads of 256."""

    MODEL = "Qwen/Qwen3.5-35B-A3B"
    STATE = 30 * ((2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4)
    """A convolution over 2 x 16 keys and 32 values of 128, three tokens wide, and a matrix of float32 for each value head."""
    TOKEN = 10 * 2 * 2 * 256 * 2
    CACHE = TOKENS * TOKEN

    def near(self, nbytes: int) -> Any:
        return pytest.approx(nbytes, rel=2e-6, abs=2)

    def test_as_many_states_as_a_flag_names_are_kept_and_one_for_padding(self, cuda_arguments: Arguments) -> None:
        found = need(cuda_arguments, self.MODEL, "--max-mamba-cache-size", 64)
        assert found == self.near(65 * self.STATE + self.CACHE)
        half = need(cuda_arguments, self.MODEL, "--max-mamba-cache-size", 64, "--mamba-ssm-dtype", "bfloat16")
        assert found - half == self.near(65 * 30 * 32 * 128 * 128 * 2)

    def test_without_flags_sglangs_own_ratio_to_the_cache_holds(self, cuda_arguments: Arguments) -> None:
        """No argument names it; SGLang takes 0.9 when it reads it. Whole states of 0.9 parts are taken off, and what is left is
        the cache."""
        found = need(cuda_arguments, self.MODEL)
        states = int((found * 0.9 / 1.9 - self.STATE) // self.STATE)
        assert found == pytest.approx((states + 1) * self.STATE + self.CACHE, abs=self.STATE)
        more = need(cuda_arguments, self.MODEL, "--mamba-full-memory-ratio", 2)
        assert more == pytest.approx(3 * self.CACHE, abs=self.STATE)

    def test_ranks_share_a_state_and_a_stage_keeps_those_of_its_layers(self, cuda_arguments: Arguments) -> None:
        words = ("--max-mamba-cache-size", 64)
        whole, rank, stage = (
            need(cuda_arguments, self.MODEL, *words, *more) for more in ((), ("--tp-size", 2), ("--pp-size", 2))
        )
        assert rank == self.near(whole // 2)
        assert stage == self.near(65 * self.STATE // 2 + self.CACHE // 2)

    def test_many_requests_need_more(self, cuda_arguments: Arguments) -> None:
        one, many = (need(cuda_arguments, self.MODEL, requests=requests) for requests in (1, 64))
        assert many - one > 32 * self.STATE


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
    assert need(cuda_arguments, model) == pytest.approx(TOKENS * layers * 2 * 2, rel=1e-4)


def test_a_window_of_another_share_is_counted(cuda_arguments: Arguments) -> None:
    few = need(cuda_arguments, "openai/gpt-oss-120b", "--swa-full-tokens-ratio", 0.25)
    assert few == pytest.approx(TOKENS * 18 * 1.25 * 8 * 64 * 2 * 2, rel=1e-4)
    all_full = need(cuda_arguments, "openai/gpt-oss-120b", "--disable-hybrid-swa-memory")
    assert all_full == pytest.approx(TOKENS * 36 * 8 * 64 * 2 * 2, rel=1e-4)


def test_a_cache_of_the_type_that_the_checkpoint_states_is_counted(cuda_arguments: Arguments) -> None:
    """NVFP4 checkpoints of ModelOpt state an FP8 cache, in a file beside the config."""
    name, wide = "nvidia/Qwen3-235B-A22B-NVFP4", "Qwen/Qwen3-235B-A22B"
    assert need(cuda_arguments, name) * 2 == pytest.approx(need(cuda_arguments, wide), rel=1e-5)


def test_drafts_of_the_checkpoint_take_a_part_of_the_cache(cuda_arguments: Arguments) -> None:
    plain, drafting = (
        need(cuda_arguments, "deepseek-ai/DeepSeek-V3", *words) for words in ((), ("--speculative-algorithm", "NEXTN", *DRAFTS))
    )
    assert drafting / plain == pytest.approx(62 / 61, rel=1e-4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if any(part in each for part in SAMPLE) else pytest.mark.nightly) for each in MODELS],
)
def test_a_plan_counts_what_sglang_does(cuda_arguments: Arguments, name: str) -> None:
    """For one more token. The number of states is fixed, so they take no part of the difference."""
    model, words = name.replace("--", "/", 1), ("--kv-cache-dtype", "bf16", "--max-mamba-cache-size", 64)
    few, many = (need(cuda_arguments, model, *words, tokens=tokens) for tokens in (TOKENS, 2 * TOKENS))
    shape = shape_of(config_folder(model))
    assert shape.kv.pool_bytes(range(shape.num_layers), 1, 2) == pytest.approx((many - few) / TOKENS, rel=1e-3)


@pytest.mark.parametrize("requests", [1, 64])
def test_a_plan_counts_the_states_that_sglang_keeps(cuda_arguments: Arguments, requests: int) -> None:
    model = "Qwen/Qwen3.5-35B-A3B"
    case = Case(
        *(shape_of(config_folder(model)), preset("1xH200"), Workload(TOKENS, requests, max_total_tokens=TOKENS)),
        *(Parallel(), Reserve(), Assumptions()),
    )
    table = 4 * requests * TOKENS
    two = 2 * case.model.kv.state_bytes(case.stages[0], 1)  # SGLang rounds to whole states
    assert case.kv_bytes(0) - table == pytest.approx(need(cuda_arguments, model, requests=requests), abs=two)


def test_a_stage_whose_layers_all_have_a_window_keeps_every_token_in_them(cuda_arguments: Arguments) -> None:
    """A part of the tokens would be a part of those that layers without a window keep, and this stage has no such layer."""
    model = "google/gemma-4-26B-A4B"
    few, many = (need(cuda_arguments, model, "--pp-size", 6, tokens=tokens) for tokens in (TOKENS, 2 * TOKENS))
    shape = shape_of(config_folder(model)).kv
    first = range(5)
    assert shape.window_layers.issuperset(first)
    assert shape.pool_bytes(first, 1, 2) == pytest.approx((many - few) / TOKENS, rel=1e-3)
