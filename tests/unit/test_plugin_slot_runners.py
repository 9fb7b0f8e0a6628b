"""Which launches have slots, and what the others are told; as SGLang's own methods choose their runners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.launch import launch
from builders.true_shape import config_folder
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
from sglang.srt.environ import envs
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.base import FusedOpPool, PermuteMethodPool
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
from sglang.srt.layers.quantization import fp8, unquant
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import override_platform

from sglang_uvm_offload.plugin.checks import combinations
from sglang_uvm_offload.plugin.slots.runners import ALWAYS_TRITON, MARLIN, RUNNERS, no_slots, no_slots_in
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.sglang


def reason(runner: str = "auto", quantization: str | None = None, stated: Any = None, **fields: Any) -> str | None:
    given = {"quantization_config": stated} if stated else {}
    return no_slots(*launch(given, moe_runner_backend=runner, quantization=quantization, **fields))


@pytest.mark.parametrize("quantization", [None, "fp8", "modelopt_fp8", *sorted(ALWAYS_TRITON)])
@pytest.mark.parametrize("runner", ["auto", "triton"])
def test_what_the_triton_runner_computes_has_slots(runner, quantization):
    assert reason(runner, quantization) is None


@pytest.mark.parametrize("quantization", sorted(ALWAYS_TRITON))
def test_a_quantisation_that_knows_only_the_triton_runner_has_slots_whatever_the_flag(quantization):
    assert reason("cutlass", quantization) is None


def test_experts_on_a_cpu_are_not_refused():
    assert reason("triton_kernel", device="cpu") is None


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        ("humming", "does not compute from slots yet"),
        ("triton_kernel", "keeps experts interleaved, not one after the other"),
        ("cutlass", "takes each expert as a group, by its number, inside its kernels"),
        ("flashinfer_cutlass", "takes each expert as a group, by its number, inside its kernels"),
        ("flashinfer_cutedsl", "takes each expert as a group, by its number, inside its kernels"),
        ("flashinfer_trtllm", "takes each expert as a group, by its number, inside its kernels"),
        ("flashinfer_trtllm_routed", "takes each expert as a group, by its number, inside its kernels"),
        ("flashinfer_mxfp4", "takes each expert as a group, by its number, inside its kernels"),
        ("lora_triton", "computes experts together with LoRA adapters"),
        ("intel_xpu", "is not known to compute by blocks of tokens"),
    ],
)
def test_another_runner_is_named_with_the_reason(runner, words):
    assert reason(runner) == f"--moe-runner-backend {runner} {words}"


def test_every_runner_of_sglang_for_cuda_has_a_reason_of_its_own():
    elsewhere = {"auto", "triton", "aiter", "ascend", "intel_xpu", "megamoe"}  # other GPUs; resolved to another one
    assert set(MOE_RUNNER_BACKEND_CHOICES) - elsewhere == set(RUNNERS) | MARLIN


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP4 = {**BLOCKS, "routed_experts_quant_method": "mxfp4"}


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(("quantization", "stated"), [(None, None), ("fp8", BLOCKS)])
def test_deep_gemm_has_slots_on_hopper_in_the_compact_layout(quantization, stated):
    with override_platform(is_sm90=True), envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override("Compact"):
        assert reason("deep_gemm", quantization, stated=stated) is None


@pytest.mark.parametrize("layout", ["auto", "masked"])
def test_deep_gemms_masked_layout_is_told_what_to_set(layout):
    with override_platform(is_sm90=True), envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override(layout):
        assert reason("deep_gemm", "fp8", stated=BLOCKS) == (
            "--moe-runner-backend deep_gemm computes decode steps in a masked layout, which takes each expert as a group, by "
            "its number; set SGLANG_DEEPGEMM_STANDARD_LAYOUT=compact, or choose --moe-runner-backend triton"
        )


def test_deep_gemm_has_no_slots_on_other_gpus():
    with override_platform(is_sm90=False), envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override("compact"):
        assert reason("deep_gemm", "fp8", stated=BLOCKS) == (
            "--moe-runner-backend deep_gemm computes from slots on Hopper GPUs only; --moe-runner-backend triton does here"
        )


@pytest.mark.parametrize(
    ("quantization", "stated"),
    [
        ("fp8", None),
        ("fp8", {"quant_method": "fp8"}),
        ("fp8", {**BLOCKS, "weight_block_size": [1, 32]}),
        ("mxfp8", {"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
        ("modelopt_fp8", {"quant_method": "modelopt", "quant_algo": "FP8"}),
        (None, compressed({"type": "float", "num_bits": 8})),
    ],
)
def test_what_deep_gemm_converts_at_each_call_has_no_slots(quantization, stated):
    with override_platform(is_sm90=True), envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override("compact"):
        assert reason("deep_gemm", quantization, stated=stated) == (
            "--moe-runner-backend deep_gemm computes from slots only BF16 experts, and FP8 ones with a scale for each block of "
            "128 x 128"
        )


def test_auto_is_deep_gemm_only_where_tokens_are_exchanged(monkeypatch):
    """Such a launch has no slots whatever its runner. So ``auto`` never turns out to be a runner that was not looked at."""
    monkeypatch.setattr(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True)
    chosen = [
        each.value for each in MoeA2ABackend if Fp8MoEMethod.is_deepgemm_moe_runner_backend_enabled(MoeRunnerBackend.AUTO, each)
    ]
    assert chosen, "DeepEP's experts"
    assert all(reason("auto", "fp8", stated=BLOCKS, moe_a2a_backend=each) for each in chosen)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ("w4afp8", "its runner, cutlass, takes each expert as a group, by its number, inside its kernels"),
        ("quark", "its experts use other kernels than SGLang's Triton and Marlin ones"),
        ("mxfp4", "its experts use other kernels than SGLang's Triton and Marlin ones"),
    ],
)
def test_another_quantisation_is_named_with_the_reason(quantization, words):
    with override_platform(is_blackwell=False):
        assert reason("auto", quantization) == f"--quantization {quantization}: {words}"


def test_nvfp4_on_blackwell_is_told_of_the_runner_that_its_layers_choose():
    with override_platform(is_blackwell=True):
        assert str(reason("auto", "modelopt_fp4")).startswith("--moe-runner-backend flashinfer_trtllm takes each expert")


@pytest.mark.parametrize(
    ("runner", "quantization"),
    [
        *[("auto", each) for each in ("awq_marlin", "gptq_marlin", "auto-round", "modelopt_fp4", "modelopt_mixed")],
        *[("marlin", each) for each in ("modelopt_fp4", "modelopt_mixed", "mxfp4", "minimax_m3_nvfp4")],
        ("experimental_sgl_marlin", "mxfp4"),
        ("triton", "mxfp4"),
    ],
)
def test_what_the_marlin_runner_computes_has_slots(runner, quantization):
    with override_platform(is_blackwell=False):
        assert reason(runner, quantization) is None


@pytest.mark.parametrize("quantization", [None, "modelopt_fp8"])
def test_what_the_marlin_runner_leaves_to_triton_has_slots(quantization):
    assert reason("marlin", quantization) is None


def test_fp8_experts_are_not_marlins():
    assert reason("marlin", "fp8") == ("--quantization fp8: its experts use other kernels than SGLang's Triton and Marlin ones")


def test_fp4_experts_of_an_fp8_checkpoint_are_marlins_alone():
    assert reason("marlin", stated=FP4) is None
    assert reason("auto", stated=FP4) == ("the model's FP4 experts use other kernels than SGLang's Triton and Marlin ones")


@pytest.mark.parametrize(
    ("kind", "bits", "runner", "activations", "blackwell", "served"),
    [
        ("float", 8, "auto", True, False, True),
        ("float", 8, "marlin", True, False, False),
        ("int", 4, "triton", False, False, True),
        ("int", 4, "auto", False, False, True),
        ("int", 4, "marlin", False, True, True),
        ("int", 8, "auto", False, False, True),
        ("int", 4, "auto", True, False, False),
        ("float", 4, "auto", False, True, True),
        ("float", 4, "auto", True, False, True),
        ("float", 4, "auto", True, True, False),
        ("float", 16, "auto", False, False, False),
    ],
)
def test_compressed_tensors_go_by_the_kind_of_weights(kind, bits, runner, activations, blackwell, served):
    stated = compressed({"type": kind, "num_bits": bits}, {"num_bits": bits} if activations else None)
    with override_platform(is_blackwell=blackwell):
        told = reason(runner, stated=stated)
    assert (told is None) == served
    assert told is None or told.startswith("--quantization compressed-tensors: its experts use other kernels")


def test_what_the_checkpoint_states_is_read_where_sglang_looks_for_it():
    integers = compressed({"type": "int", "num_bits": 4})
    assert no_slots(*launch({"compression_config": integers})) is None
    of_text, images = {"text_config": {"quantization_config": integers}}, str(config_folder("Qwen/Qwen3-VL-30B-A3B-Instruct"))
    assert no_slots(*launch(of_text, model_path=images, quantization="compressed-tensors")) is None


def test_compressed_tensors_that_state_nothing_have_no_slots():
    assert "other kernels" in str(reason("triton", "compressed-tensors"))


@pytest.mark.parametrize(("runner", "told"), [("triton", False), ("auto", True), ("marlin", True), ("deep_gemm", True)])
def test_with_adapters_only_the_triton_runner_has_slots(runner, told):
    """SGLang runs adapters of experts by sequences of kernels of its own, of which only Triton's was looked at."""
    said = reason(runner, enable_lora=True)
    assert (said is not None) == told
    assert not told or "--enable-lora" in str(said)


@pytest.mark.parametrize("backend", [each.value for each in MoeA2ABackend if not each.is_none()])
def test_tokens_that_are_exchanged_have_no_slots(backend):
    assert reason(moe_a2a_backend=backend) == (
        f"--moe-a2a-backend {backend} passes tokens on in a form that SGLang's Triton and Marlin runners do not take"
    )


def test_the_runners_with_slots_take_tokens_in_the_standard_form_only():
    taken = {dispatched for dispatched, runner in PermuteMethodPool._pre_permute_methods if runner == "triton"}
    assert taken == {"standard"}
    assert {a2a for a2a, runner in FusedOpPool._fused_funcs if runner in MARLIN} == {"none"}
    assert not [dispatched for dispatched, runner in PermuteMethodPool._pre_permute_methods if runner in MARLIN]


@pytest.mark.parametrize("flag", ["enable_two_batch_overlap", "enable_pdmux"])
def test_what_slots_cannot_bear_is_refused_with_offloading_itself(flag):
    """``no_slots`` says nothing of these. Where one is to be allowed, it must."""
    cfg, _ = launch(**{flag: True})
    [problem] = combinations.problems(parse({"num_resident": 4}), cfg)
    assert flag.replace("_", "-") in problem


def built(method: Any, config: MoeRunnerConfig) -> SimpleNamespace:
    method.create_moe_runner(torch.nn.Module(), config)
    return SimpleNamespace(quant_method=method)


@pytest.mark.parametrize(
    ("runner", "layout", "told"),
    [
        ("auto", "auto", False),
        ("triton", "auto", False),
        ("deep_gemm", "auto", True),
        ("deep_gemm", "compact", False),
        ("cutlass", "auto", True),
    ],
)
def test_a_built_layer_tells_as_the_launch_does(monkeypatch, runner, layout, told):
    monkeypatch.setattr(fp8, "get_moe_runner_backend", lambda: MoeRunnerBackend(runner))
    method = Fp8MoEMethod.__new__(Fp8MoEMethod)
    method.runner, method.is_fp4_expert = None, False
    layer = built(method, MoeRunnerConfig())
    with override_platform(is_sm90=True), envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override(layout):
        assert no_slots_in(layer) == reason(runner, "fp8", stated=BLOCKS)
        assert (no_slots_in(layer) is not None) == told


def test_an_unquantised_layer_has_slots(monkeypatch):
    monkeypatch.setattr(unquant, "get_moe_runner_backend", lambda: MoeRunnerBackend.AUTO)
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    chosen = ("use_flashinfer_trtllm_moe", "use_flashinfer_cutlass", "use_deep_gemm", "use_triton_kernels")
    for name in chosen:
        setattr(method, name, False)
    assert no_slots_in(built(method, MoeRunnerConfig())) is None


def test_a_method_with_kernels_of_its_own_is_named():
    class Own:
        def get_moe_runner_backend(self, layer: Any) -> None:
            return None

    assert no_slots_in(SimpleNamespace(quant_method=Own())) == "Own computes its experts with its own kernels"
