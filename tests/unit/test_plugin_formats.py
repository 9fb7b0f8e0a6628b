"""Experts of the formats that SGLang has for CUDA, by the MoE runner that computes them: built, loaded and processed by
SGLang's own code, they are in managed memory to the last byte, and the same bytes as without the plugin. No kernel runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from builders import rearranged
from builders.formats import Loaded, build, load, runtime
from sglang.srt.layers.quantization import BASE_QUANTIZATION_METHODS
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

from sglang_uvm_offload.cpu.staging import CpuStaging
from sglang_uvm_offload.streaming.replicas import Replicas, buffer_bytes

pytestmark = pytest.mark.sglang

HOPPER = {"is_cuda": True, "is_sm90": True, "is_sm100": False, "is_sm120": False, "is_blackwell": False}
BLACKWELL = HOPPER | {"is_sm90": False, "is_sm100": True, "is_blackwell": True}
RTX_5090 = HOPPER | {"is_sm90": False, "is_sm120": True, "is_blackwell": True}

SCRATCH = ("expert_offsets", "problem_sizes1", "problem_sizes2", "workspace", "_ptr", "_ptrs")
"""Ends of names of tensors that a runner writes before it reads them."""

FOR_FLASHINFER = "_blockscale_swizzled"
"""The end of names of tensors that SGLang has for Marlin too, which does not read them."""


@dataclass(frozen=True)
class Format:
    runner: str
    gpu: dict[str, bool] = field(default_factory=lambda: HOPPER)
    quantization: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint's ``quantization_config`` states."""
    found: dict[str, Any] = field(default_factory=dict)
    """What SGLang finds out about such a checkpoint besides."""
    layer: dict[str, Any] = field(default_factory=dict)
    """Arguments of SGLang's ``FusedMoE``."""

    def quantized(self) -> Any:
        if self.quantization is None:
            return None
        known = BASE_QUANTIZATION_METHODS | {"mxfp4": Mxfp4Config}  # which SGLang leaves out where it has found no GPU
        config = known[self.quantization].from_config({"quant_method": self.quantization, **self.config})
        for name, value in self.found.items():
            setattr(config, name, value)
        return config


def fp8(runner: str, gpu: dict[str, bool] = HOPPER, block: int | None = 128, scheme: str = "dynamic", **found: Any) -> Format:
    blocks = None if block is None else [block, block]
    return Format(runner, gpu, "fp8", {"activation_scheme": scheme, "weight_block_size": blocks}, found)


def fp4_experts(runner: str, gpu: dict[str, bool], **found: Any) -> Format:
    """As of DeepSeek-V4."""
    return fp8(runner, gpu, is_fp4_experts=True, **found)


def mxfp8(runner: str) -> Format:
    return Format(runner, BLACKWELL, "mxfp8", {"activation_scheme": "dynamic"})


def mxfp4(runner: str, gpu: dict[str, bool] = HOPPER, **layer: Any) -> Format:
    """As of gpt-oss."""
    return Format(runner, gpu, "mxfp4", layer={"with_bias": True, **layer})


def nvfp4(runner: str, gpu: dict[str, bool] = BLACKWELL, **layer: Any) -> Format:
    """The first dimension of some of CuteDSL's views is 32."""
    return Format(runner, gpu, "modelopt_fp4", {"quant_algo": "NVFP4", "group_size": 16, "ignore": []}, layer=layer)


def modelopt_fp8(runner: str, gpu: dict[str, bool] = BLACKWELL) -> Format:
    return Format(runner, gpu, "modelopt_fp8", {"quant_algo": "FP8", "ignore": []})


def quark(weights: str, inputs: str, dynamic: bool) -> Format:
    fp8 = {"dtype": "fp8_e4m3", "symmetric": True, "group_size": None}
    tensors = {
        "weight": fp8 | {"qscheme": weights, "is_dynamic": False},
        "input_tensors": fp8 | {"qscheme": inputs, "is_dynamic": dynamic},
    }
    stated = {
        "global_quant_config": tensors,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": [],
        "packed_modules_mapping": {},
    }
    return Format("triton", HOPPER, "quark", stated | {"export": {"kv_cache_group": [], "pack_method": "order"}})


def compressed(
    runner: str, gpu: dict[str, bool], packing: str, weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> Format:
    usual = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
    given = None if activations is None else usual | {"strategy": "token", "dynamic": True} | activations
    group = {"targets": ["Linear"], "weights": usual | weights, "input_activations": given}
    config = {"format": packing, "ignore": [], "config_groups": {"group_0": group}}
    return Format(runner, gpu, "compressed-tensors", config)


def gptq(bits: int, desc_act: bool = False) -> Format:
    config = {"bits": bits, "group_size": 128, "sym": True, "desc_act": desc_act, "lm_head": False}
    return Format("auto", HOPPER, "gptq_marlin", config)


AWQ = {"bits": 4, "group_size": 128, "zero_point": True}
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
FP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
FP4_INPUTS = FP4 | {"dynamic": "local"}
MX = {"num_bits": 4, "strategy": "group", "group_size": 32}
BLOCKS = {"strategy": "block", "block_structure": [128, 128]}

FORMATS: dict[str, list[Format]] = {
    "W4A8 (cutlass)": [Format("auto", HOPPER, "w4afp8")],
    "compressed-tensors W4A8 (cutlass)": [compressed("auto", HOPPER, "pack-quantized", INT4, {})],
    "NVFP4 (FlashInfer trtllm)": [nvfp4("flashinfer_trtllm"), nvfp4("flashinfer_trtllm_routed")],
    "NVFP4 (FlashInfer cutlass)": [nvfp4("flashinfer_cutlass")],
    "NVFP4 (FlashInfer cutedsl)": [nvfp4("flashinfer_cutedsl"), nvfp4("flashinfer_cutedsl", num_experts=32)],
    "NVFP4 (Marlin)": [nvfp4("marlin", HOPPER)],
    "BF16, made NVFP4 (FlashInfer trtllm)": [Format("flashinfer_trtllm", BLACKWELL, "nvfp4_online")],
    "BF16, made NVFP4 (FlashInfer cutedsl)": [Format("flashinfer_cutedsl", BLACKWELL, "nvfp4_online")],
    "NVFP4 of MiniMax-M3 (Marlin)": [Format("auto", HOPPER, "minimax_m3_nvfp4")],
    "compressed-tensors NVFP4 (FlashInfer trtllm)": [
        compressed("flashinfer_trtllm", BLACKWELL, "nvfp4-pack-quantized", FP4, FP4_INPUTS)
    ],
    "compressed-tensors NVFP4 (cutlass)": [compressed("auto", BLACKWELL, "nvfp4-pack-quantized", FP4, FP4_INPUTS)],
    "compressed-tensors NVFP4 (Marlin)": [compressed("auto", HOPPER, "nvfp4-pack-quantized", FP4)],
    "MXFP4 (FlashInfer trtllm)": [
        mxfp4("flashinfer_mxfp4", BLACKWELL),
        mxfp4("flashinfer_mxfp4", BLACKWELL, gate_up_interleaved=False),
    ],
    "MXFP4 (FlashInfer cutlass)": [mxfp4("flashinfer_mxfp4"), mxfp4("flashinfer_mxfp4", RTX_5090)],
    "MXFP4 (DeepGEMM)": [mxfp4("deep_gemm", BLACKWELL)],
    "MXFP4 (Marlin)": [mxfp4("marlin")],
    "MXFP4, made BF16 (Triton)": [mxfp4("triton")],
    "compressed-tensors MXFP4 (FlashInfer trtllm)": [compressed("flashinfer_mxfp4", BLACKWELL, "mxfp4-pack-quantized", MX)],
    "FP4 experts in an FP8 model (FlashInfer trtllm)": [fp4_experts("flashinfer_mxfp4", BLACKWELL)],
    "FP4 experts in an FP8 model (FlashInfer cutlass)": [
        fp4_experts("flashinfer_mxfp4", HOPPER),
        fp4_experts("flashinfer_mxfp4", RTX_5090),
    ],
    "FP4 experts in an FP8 model (DeepGEMM)": [fp4_experts("deep_gemm", BLACKWELL)],
    "FP4 experts in an FP8 model (Marlin)": [fp4_experts("marlin", HOPPER)],
    "FP4 experts in an FP8 model, made FP8 (Triton)": [fp4_experts("auto", HOPPER, dequant_fp4_to_fp8=True)],
    "FP4 experts in an FP8 model (Humming)": [fp4_experts("humming", HOPPER)],
    "MXFP4 (Humming)": [Format("humming", HOPPER, "humming", {"quant_method": "mxfp4"})],
    "FP8 in blocks (Humming)": [
        Format(
            "humming",
            HOPPER,
            "humming",
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        )
    ],
    "FP8 in blocks (cutlass)": [fp8("cutlass")],
    "FP8 in blocks (FlashInfer trtllm)": [fp8("flashinfer_trtllm", BLACKWELL), fp8("flashinfer_trtllm_routed", BLACKWELL)],
    "FP8 in blocks (DeepGEMM)": [fp8("deep_gemm", BLACKWELL)],
    "FP8 in blocks (Triton)": [fp8("triton")],
    "FP8 by tensor (FlashInfer trtllm)": [fp8("flashinfer_trtllm", BLACKWELL, block=None, scheme="static")],
    "FP8 by tensor or channel (Triton)": [fp8("triton", block=None), Format("triton", HOPPER, "w8a8_fp8")],
    "FP8 (HPC-Ops)": [fp8("hpc_ops"), fp8("hpc_ops", block=None, scheme="static")],
    "BF16, made FP8 (Triton)": [fp8("triton", block=None, is_checkpoint_fp8_serialized=False)],
    "ModelOpt FP8 (FlashInfer trtllm)": [modelopt_fp8("flashinfer_trtllm")],
    "ModelOpt FP8 (FlashInfer cutlass)": [modelopt_fp8("flashinfer_cutlass")],
    "ModelOpt FP8 (Triton)": [modelopt_fp8("triton", HOPPER)],
    "compressed-tensors FP8 (FlashInfer trtllm)": [
        compressed("flashinfer_trtllm", BLACKWELL, "float-quantized", BLOCKS, {"strategy": "group", "group_size": 128})
    ],
    "compressed-tensors FP8 (Triton)": [
        compressed("triton", HOPPER, "float-quantized", {"strategy": "channel"}, {}),
        compressed("triton", HOPPER, "float-quantized", {"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
    ],
    "Quark FP8 (Triton)": [quark("per_tensor", "per_tensor", False), quark("per_channel", "per_channel", True)],
    "MXFP8 (FlashInfer trtllm)": [mxfp8("flashinfer_trtllm"), mxfp8("flashinfer_trtllm_routed")],
    "MXFP8 (cutlass)": [mxfp8("cutlass")],
    "MXFP8 (DeepGEMM)": [mxfp8("deep_gemm")],
    "MXFP8 (Triton)": [mxfp8("triton")],
    "GPTQ, 4 bits (Marlin)": [gptq(4)],
    "GPTQ, 8 bits (Marlin)": [gptq(8)],
    "GPTQ in the order of activations (Marlin)": [gptq(4, desc_act=True)],
    "AWQ (Marlin)": [Format("auto", HOPPER, "awq_marlin", AWQ)],
    "INT8 in blocks (Triton)": [
        Format("auto", HOPPER, "blockwise_int8", {"activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    ],
    "W8A8 (INT8) and W8A16 (Triton)": [Format("auto", HOPPER, "w8a8_int8")],
    "compressed-tensors integers (Marlin)": [compressed("auto", HOPPER, "pack-quantized", INT4)],
    "compressed-tensors integers (Triton)": [compressed("triton", HOPPER, "pack-quantized", INT4)],
    "compressed-tensors MXINT4 (FlashInfer trtllm)": [
        compressed("flashinfer_trtllm", BLACKWELL, "pack-quantized", INT4 | {"group_size": 32})
    ],
    "BF16 (FlashInfer trtllm)": [Format("flashinfer_trtllm", BLACKWELL), Format("flashinfer_trtllm_routed", BLACKWELL)],
    "BF16 (FlashInfer cutlass)": [Format("flashinfer_cutlass", BLACKWELL)],
    "BF16 (triton_kernel)": [Format("triton_kernel")],
}
"""By the rows of the support table."""


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """A layer and SGLang's settings for it hold each other, so layers go by garbage collection, which would look at all that
    is imported each time."""
    gc.collect()
    gc.freeze()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.unfreeze()


BY_FORMAT = [
    pytest.param(each, id=f"{row}-{nth}" if nth else row, marks=pytest.mark.works("Format", row))
    for row, formats in FORMATS.items()
    for nth, each in enumerate(formats)
]


@pytest.mark.parametrize("given", BY_FORMAT)
def test_every_byte_of_the_experts_is_managed_and_none_is_lost(given, monkeypatch):
    with runtime(given.runner, given.gpu):
        rearranged.on_cpu(monkeypatch)
        plain, offloaded = build(given.quantized, False, **given.layer), build(given.quantized, True, **given.layer)
        alike(plain, offloaded)
        nothing_is_left_beside(offloaded)
        a_stream_buffer_holds_all(offloaded)
        assert offloaded.peak.total <= plain.peak.total, "more at a time than SGLang takes by itself"
        assert offloaded.peak.computed <= plain.peak.computed, "allocations for experts that are not in managed memory"
        outcome = reloaded(plain)
        assert reloaded(offloaded) == outcome
        alike(plain, offloaded)
        if outcome == "loaded":
            nothing_is_left_beside(offloaded)


def alike(plain: Loaded, offloaded: Loaded) -> None:
    """What kernels read is the same with the plugin and without."""
    expected, found = plain.tensors(), offloaded.tensors()
    if plain.layer.runner_backend is not None and plain.layer.runner_backend.is_marlin():
        expected = {name: tensor for name, tensor in expected.items() if not name.endswith(FOR_FLASHINFER)}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        mine = found[name]
        assert (mine.dtype, mine.shape, mine.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert name.endswith(SCRATCH) or torch.equal(bits(mine), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def nothing_is_left_beside(offloaded: Loaded) -> None:
    """Tensors of experts outside of managed memory are too small to be placed, wherever they are held."""
    gc.collect()
    outside = {
        name: t.untyped_storage().nbytes() for name, t in offloaded.tensors().items() if not offloaded.peak.is_managed(t)
    }
    assert {name: nbytes for name, nbytes in outside.items() if nbytes >= offloaded.peak.least} == {}
    assert offloaded.peak.plain() == 0
    assert offloaded.memory is not None
    assert 0 < offloaded.memory.device_used == offloaded.experts.resident_bytes, "VRAM of what is not resident"
    managed = sum(tensor.layout.nbytes for tensor in offloaded.experts.tensors)
    assert 0 < offloaded.experts.offloaded_bytes < managed
    held = {t.untyped_storage().data_ptr(): t for t in offloaded.tensors().values() if offloaded.peak.is_managed(t)}
    assert managed == sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def a_stream_buffer_holds_all(offloaded: Loaded) -> None:
    """In a long prefill, kernels read only the experts' small tensors in place."""
    tensors, experts = offloaded.tensors(), offloaded.experts
    managed = {name: bits(tensor).clone() for name, tensor in tensors.items() if offloaded.peak.is_managed(tensor)}
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert offloaded.memory is not None
    staging = CpuStaging(offloaded.memory, buffer_bytes(experts), 1)
    replicas = Replicas(experts, staging.buffers)
    staging.copy(0, replicas.parts)
    own = replicas.put(0)
    assert own is not None
    for name, tensor in offloaded.tensors().items():
        assert not offloaded.peak.is_managed(tensor), f"{name} is read in place"
        assert name not in managed or torch.equal(bits(tensor), managed[name]), name
    replicas.put_back(0, own)
    assert {name: tensor.data_ptr() for name, tensor in offloaded.tensors().items()} == addresses


def reloaded(loaded: Loaded) -> str:
    """What comes of an update of the weights: not all formats take one, whether or not they are offloaded."""
    try:
        load(loaded.layer, seed=7)
        loaded.layer.quant_method.process_weights_after_loading(loaded.layer)
    except Exception as error:  # noqa: BLE001 -- whatever SGLang raises is what comes of it
        return f"{type(error).__name__}: {error}"
    return "loaded"
