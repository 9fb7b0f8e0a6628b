"""CPU replacements for what SGLang calls to convert experts on a GPU. They rearrange bytes differently from the kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import flashinfer
import flashinfer.fused_moe
import pytest
import torch
from builders import marlin
from deep_gemm.utils import layout
from flashinfer.fused_moe import core
from flashinfer.quantization import fp4_quantization
from humming import transform
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.deep_gemm_wrapper import configurer
from sglang.srt.layers.quantization import (
    fp8,
    fp8_utils,
    marlin_utils,
    modelopt_quant,
    mxfp4,
    mxfp4_flashinfer_cutlass_moe,
    mxfp4_flashinfer_trtllm_moe,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_mxint4_moe,
    compressed_tensors_w8a8_fp8_moe,
)
from sglang.srt.layers.quantization.quark.schemes import quark_w8a8_fp8_moe
from sglang.srt.model_loader import utils
from sglang.srt.runtime_context import get_platform
from triton_kernels.numerics_details import mxfp


def on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Installs the replacements inside ``formats.runtime``."""
    marlin.on_cpu(patch, _no_gemm)
    of_gpu(patch)
    of_flashinfer(patch)
    of_deep_gemm(patch)
    patch.setattr(transform.ops, "repack_weight", by_humming)
    for module in (fp8, modelopt_quant, compressed_tensors_w8a8_fp8_moe, quark_w8a8_fp8_moe):
        patch.setattr(module, "scaled_fp8_quant", to_fp8, raising=False)
    patch.setattr(
        mxfp, "upcast_from_mxfp", lambda x, scale, target_dtype, axis: mxfp.upcast_from_mxfp_torch(x, scale, target_dtype, axis)
    )


def of_gpu(patch: pytest.MonkeyPatch) -> None:
    """Replaces what SGLang found out about the machine at import."""
    capability = (9, 0) if get_platform().is_sm90 else (12, 0) if get_platform().is_sm120 else (10, 0)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    patch.setattr(marlin_utils, "get_device_capability", lambda *_: capability)
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    for module, name, value in (
        (fp8, "_is_cpu", False),
        (fp8, "_is_cuda", True),
        (mxfp4, "_is_cpu", False),
        (mxfp4, "_FI_HAS_SM90_CUTLASS_MXFP4", True),
        (mxfp4_flashinfer_trtllm_moe, "_USE_OFFICIAL_SHUFFLE", True),
    ):
        patch.setattr(module, name, value)
    for module in (fp8, modelopt_quant):
        patch.setattr(module, "cutlass_fp8_supported", lambda: True)
    patch.setattr(mxfp4_flashinfer_cutlass_moe, "is_flashinfer_available", lambda: True)
    settings = SimpleNamespace(moe=SimpleNamespace(flashinfer_mxfp4_moe_precision="bf16"))
    patch.setattr(mxfp4_flashinfer_cutlass_moe, "get_exec", lambda: settings)


def of_flashinfer(patch: pytest.MonkeyPatch) -> None:
    """Replaces FlashInfer, which SGLang imports only with a GPU. Keeps its row orders, which torch computes."""
    imported = (mxfp4, mxfp4_flashinfer_trtllm_moe, compressed_tensors_w4a4_mxint4_moe)
    for module in (flashinfer, core, fp4_quantization, *imported):
        for name in ("block_scale_interleave", "nvfp4_block_scale_interleave"):
            patch.setattr(module, name, lambda scale, *_, **__: scale.reshape(-1).flip(0), raising=False)
    patch.setattr(flashinfer, "nvfp4_quantize", to_nvfp4)
    for module in (flashinfer.fused_moe, mxfp4):
        for name in ("weights", "scales"):
            function = f"interleave_moe_{name}_for_sm90_mixed_gemm"
            patch.setattr(module, function, lambda x, *_, **__: x.flip(-1), raising=False)
    for module in imported:
        for name in ("get_w2_permute_indices_with_cache", "_maybe_get_cached_w3_w1_permute_indices", "convert_to_block_layout"):
            patch.setattr(module, name, getattr(core, name), raising=False)


def of_deep_gemm(patch: pytest.MonkeyPatch) -> None:
    """Replaces DeepGEMM's kernel for scales with SGLang's torch version."""
    packed = fp8_utils._get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl
    patch.setattr(layout, "get_mn_major_tma_aligned_packed_ue8m0_tensor", packed)
    patch.setattr("deep_gemm.transform_sf_into_required_layout", lambda scale, **_: packed(scale))
    for module in (deep_gemm_wrapper, configurer):
        patch.setattr(module, "DEEPGEMM_SCALE_UE8M0", True)
        patch.setattr(module, "ENABLE_JIT_DEEPGEMM", True)
    patch.setattr(utils, "should_deepgemm_weight_requant_ue8m0", lambda **_: True)


def to_fp8(weight: torch.Tensor, scale: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.tensor(0.05) if scale is None else scale
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def by_humming(inputs: torch.Tensor, weight_bits: int, activation_bits: int, **_: Any) -> torch.Tensor:
    columns = inputs.shape[-1] * 32 // weight_bits
    return inputs.flip(-1).reshape(len(inputs), columns * activation_bits // 256, -1)


def to_nvfp4(weight: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns bytes of the weight, 4 bits per value, and scales."""
    rows, columns = weight.shape
    found = weight.view(torch.uint8)
    return found[:, : columns // 2].contiguous(), found[:, -columns // 16 :].reshape(rows, columns // 16)


def _no_gemm(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("computes nothing")
