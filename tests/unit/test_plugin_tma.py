"""``--expert-offload-config tma off``: which launches it is refused for, before anything loads."""

from __future__ import annotations

from typing import Any

import pytest
from builders.launch import launch
from builders.true_shape import config_folder
from sglang.srt.environ import envs
from sglang.srt.runtime_context import override_platform

from sglang_uvm_offload.plugin.checks import tma
from sglang_uvm_offload.plugin.slots.runners import no_slots
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.sglang


def problems(requested: str = "off", drafts: int | None = None, **fields: Any) -> list[str]:
    return tma.problems(parse({"num_resident": 4, "tma": requested, "draft_num_resident": drafts}), *launch(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("runner", ["auto", "triton"])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-FP8", "zai-org/GLM-5-FP8"])
def test_experts_that_tritons_kernels_compute_can_do_without(runner: str, model: str) -> None:
    assert problems(moe_runner_backend=runner, model_path=str(config_folder(model))) == []


@pytest.mark.parametrize("runner", ["deep_gemm", "cutlass", "flashinfer_cutlass", "triton_kernel"])
def test_other_kernels_are_named_with_what_would_be_right(runner: str) -> None:
    model = str(config_folder("Qwen/Qwen3-30B-A3B-FP8"))
    (problem,) = problems(moe_runner_backend=runner, model_path=model)
    assert problem.startswith(f"--expert-offload-config tma off: --moe-runner-backend {runner} has kernels that may load")
    assert "choose --moe-runner-backend triton" in problem
    assert problems("on", moe_runner_backend=runner, model_path=model) == []


def test_deep_gemm_loads_by_tma_where_it_has_slots_too() -> None:
    model = str(config_folder("zai-org/GLM-5-FP8"))
    with override_platform(is_sm90=True), envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override("compact"):
        assert no_slots(*launch(moe_runner_backend="deep_gemm", model_path=model)) is None
        assert len(problems(moe_runner_backend="deep_gemm", model_path=model)) == 1


def test_the_kernels_of_drafts_count_where_drafts_are_offloaded() -> None:
    given = {"moe_runner_backend": "triton", "speculative_moe_runner_backend": "deep_gemm"}
    (problem,) = problems(drafts=2, **given)
    assert "--speculative-moe-runner-backend deep_gemm" in problem
    assert problems(**given) == []
