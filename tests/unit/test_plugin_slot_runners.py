"""Which layers compute from slots and why others do not, with runners that SGLang's own methods choose."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.launch import launch
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
from sglang.srt.environ import envs
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.base import FusedOpPool, PermuteMethodPool
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
from sglang.srt.layers.quantization import fp8, unquant
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import override_platform

from sglang_uvm_offload.plugin.checks import combinations
from sglang_uvm_offload.plugin.slots import runners
from sglang_uvm_offload.plugin.slots.runners import RUNNERS, no_slots_in, pads_with_first
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.sglang

MARLIN = {"marlin", "experimental_sgl_marlin"}
AS_GROUPS = "indexes experts by number inside its kernels"


@pytest.fixture(autouse=True)
def adapters(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    given = SimpleNamespace(enable_lora=False)
    monkeypatch.setattr(runners, "get_lora", lambda: given)
    return given


class Method:
    def __init__(self, runner: str | None):
        self.runner = runner and MoeRunnerBackend(runner)

    def get_moe_runner_backend(self, layer: Any) -> Any:
        return self.runner


def by(runner: str | None) -> str | None:
    """Why a layer that this runner computes gets no slots."""
    return no_slots_in(SimpleNamespace(quant_method=Method(runner)))


@pytest.mark.parametrize(("runner", "pads"), [("deep_gemm", True), ("triton", False), ("marlin", False), (None, False)])
def test_only_deep_gemms_padding_reads_the_first_expert(runner: str | None, pads: bool) -> None:
    assert pads_with_first(SimpleNamespace(quant_method=Method(runner))) is pads


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        ("humming", "does not support slots yet"),
        ("triton_kernel", "interleaves experts instead of storing one after the other"),
        ("flashinfer_cutlass", AS_GROUPS),
        ("lora_triton", "computes experts together with LoRA adapters"),
        ("intel_xpu", "is not known to compute blocks of tokens per expert"),
    ],
)
def test_another_runner_is_named_with_the_reason(runner, words):
    assert by(runner) == f"--moe-runner-backend {runner} {words}"


def test_every_runner_of_sglang_for_cuda_has_a_reason_of_its_own():
    elsewhere = {"auto", "triton", "aiter", "ascend", "intel_xpu", "megamoe"}  # other GPUs; resolved to another one
    assert set(MOE_RUNNER_BACKEND_CHOICES) - elsewhere == set(RUNNERS) | MARLIN


def test_a_method_with_kernels_of_its_own_is_named():
    assert by(None) == "Method computes its experts in its own kernels"


@pytest.mark.parametrize("runner", ["triton", *sorted(MARLIN)])
def test_with_adapters_only_the_triton_runner_has_slots(adapters, runner):
    """SGLang runs adapters of experts by sequences of kernels of its own, of which only Triton's was looked at."""
    assert by(runner) is None
    adapters.enable_lora = True
    assert ("--enable-lora" in str(by(runner))) == (runner != "triton")


@pytest.mark.parametrize("exchange", [each for each in MoeA2ABackend if not each.is_none()])
def test_tokens_that_are_exchanged_have_no_slots(monkeypatch, exchange):
    monkeypatch.setattr(runners, "get_moe_a2a_backend", lambda: exchange)
    assert by("triton") == (
        f"--moe-a2a-backend {exchange.value} dispatches tokens in a format that SGLang's Triton and Marlin "
        "runners do not support"
    )


def test_the_runners_with_slots_take_tokens_in_the_standard_form_only():
    taken = {dispatched for dispatched, runner in PermuteMethodPool._pre_permute_methods if runner == "triton"}
    assert taken == {"standard"}
    assert {a2a for a2a, runner in FusedOpPool._fused_funcs if runner in MARLIN} == {"none"}
    assert not [dispatched for dispatched, runner in PermuteMethodPool._pre_permute_methods if runner in MARLIN]


@pytest.mark.parametrize("flag", ["enable_two_batch_overlap", "enable_pdmux"])
def test_what_slots_cannot_bear_is_refused_with_offloading_itself(flag):
    """``no_slots_in`` says nothing of these. Where one is to be allowed, it must."""
    cfg, _ = launch(**{flag: True})
    [problem] = combinations.problems(parse({"num_resident": 4}), cfg)
    assert flag.replace("_", "-") in problem


def built(method: Any) -> SimpleNamespace:
    method.create_moe_runner(torch.nn.Module(), MoeRunnerConfig())
    return SimpleNamespace(quant_method=method)


def of_fp8(runner: str, block: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(fp8, "get_moe_runner_backend", lambda: MoeRunnerBackend(runner))
    method = Fp8MoEMethod.__new__(Fp8MoEMethod)
    method.runner, method.is_fp4_expert, method.quant_config = None, False, SimpleNamespace(weight_block_size=block)
    return built(method)


def of_bf16(monkeypatch: pytest.MonkeyPatch, **chosen: bool) -> SimpleNamespace:
    monkeypatch.setattr(unquant, "get_moe_runner_backend", lambda: MoeRunnerBackend.AUTO)
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    for name in ("use_flashinfer_trtllm_moe", "use_flashinfer_cutlass", "use_deep_gemm", "use_triton_kernels"):
        setattr(method, name, chosen.get(name, False))
    return built(method)


@pytest.mark.parametrize(
    ("runner", "block", "layout", "hopper", "words"),
    [
        ("auto", None, "auto", True, None),
        ("deep_gemm", [128, 128], "Compact", True, None),
        ("deep_gemm", [128, 128], "auto", True, "masked layout, .* set SGLANG_DEEPGEMM_STANDARD_LAYOUT=compact, or use"),
        ("deep_gemm", [128, 128], "compact", False, "only on Hopper GPUs; use --moe-runner-backend triton"),
        ("deep_gemm", [1, 32], "compact", True, "only for BF16 experts, and for FP8 ones with 128 x 128 scale blocks"),
        ("deep_gemm", None, "compact", True, "only for BF16 experts, and for FP8 ones with 128 x 128 scale blocks"),
        ("cutlass", None, "auto", True, AS_GROUPS),
    ],
)
def test_fp8_layers_have_slots_by_their_runner_scales_and_layout(monkeypatch, runner, block, layout, hopper, words):
    layer = of_fp8(runner, block, monkeypatch)
    with override_platform(is_sm90=hopper), envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override(layout):
        if words is None:
            assert no_slots_in(layer) is None
        else:
            assert re.search(f"--moe-runner-backend {runner} .*{words}", str(no_slots_in(layer)))


def test_unquantised_layers_have_slots_by_triton_and_deep_gemm(monkeypatch):
    assert no_slots_in(of_bf16(monkeypatch)) is None
    with override_platform(is_sm90=True), envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override("compact"):
        assert no_slots_in(of_bf16(monkeypatch, use_deep_gemm=True)) is None
