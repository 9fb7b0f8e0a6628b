"""Runs SGLang's code around its DeepGEMM kernels on a CPU. References in torch replace the kernels and index as they do."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.moe import ep_moe_kernels
from sglang.kernels.ops.quantization import fp8_kernel
from sglang.srt.layers.deep_gemm_wrapper import compile_utils, entrypoint
from sglang.srt.layers.moe.moe_runner import deep_gemm

BLOCK = 128
ALIGNMENT = 64


class Kernels:
    """``gemms`` records each call's arguments without its output; ``compiled`` records N, K and the groups of each session."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.gemms: list[tuple[Any, Any, torch.Tensor]] = []
        self.compiled: list[tuple[int, int, int]] = []
        self.fails_at: int | None = None
        package = SimpleNamespace(
            m_grouped_fp8_gemm_nt_contiguous=self._gemm,
            m_grouped_bf16_gemm_nt_contiguous=self._gemm,
            fp8_m_grouped_gemm_nt_masked=self._masked,
            get_mk_alignment_for_contiguous_layout=lambda: ALIGNMENT,
        )
        for module, name, function in (
            (entrypoint, "deep_gemm", package),
            (entrypoint, "_ensure_cuda", lambda pair: pair),
            (compile_utils, "_maybe_compile_deep_gemm_one_type_all", lambda kind, *key: self.compiled.append(key)),
            (ep_moe_kernels, "fused_moe_dispatch_index", _count),
            (ep_moe_kernels, "ep_scatter", _scatter),
            (ep_moe_kernels, "tma_align_input_scale", lambda scale: scale),
            (ep_moe_kernels, "post_reorder_deepgemm", _gather),
            (fp8_kernel, "sglang_per_token_group_quant_fp8", _quantized),
            (deep_gemm, "_legacy_silu_and_mul", _silu_and_mul),
            (
                deep_gemm,
                "get_exec",
                lambda: SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False)),
            ),
            (deep_gemm, "get_parallel", lambda: SimpleNamespace(tp_group=None)),
            (deep_gemm, "is_allocation_symmetric", lambda: False),
            (deep_gemm, "use_symmetric_memory", lambda *_, **__: contextlib.nullcontext()),
        ):
            patch.setattr(module, name, function, raising=False)

    def _gemm(self, left: Any, right: Any, out: torch.Tensor, indices: torch.Tensor) -> None:
        """Acts as DeepGEMM's scheduler for the contiguous layout on Hopper: a block of rows takes the expert of its first row.
        A block without an expert reads expert 0's weights and computes nothing. Weights are bounds-checked; scales are at base
        + expert * stride."""
        if self.fails_at == len(self.gemms):
            raise RuntimeError("out of memory")
        self.gemms.append((left, right, indices))
        a, scale_a = left if isinstance(left, tuple) else (left, None)
        b, scale_b = right if isinstance(right, tuple) else (right, None)
        num_groups, n, k = b.shape
        assert (b.stride(), len(a), indices.dtype) == ((n * k, k, 1), len(indices), torch.int32)
        if scale_b is not None:
            assert scale_b.shape == (num_groups, n // BLOCK, k // BLOCK), "as DeepGEMM checks it"
            assert scale_b.is_contiguous()
        out.fill_(float("nan"))
        for start in range(0, len(indices), ALIGNMENT):
            at = int(indices[start])
            assert at < num_groups, "out of bounds"
            if at < 0:
                continue
            rows = slice(start, start + ALIGNMENT)
            x, weight = a[rows].float(), b[at].float()
            if scale_a is not None and scale_b is not None:
                x = x * scale_a[rows].repeat_interleave(BLOCK, 1)
                weight = weight * scale_b[at].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            out[rows] = (x @ weight.T).to(out.dtype)

    def _masked(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("the masked layout")


def _count(ids: torch.Tensor, num_experts: int, m_max: int, expert_start: int) -> tuple[torch.Tensor, torch.Tensor]:
    own = ids[ids >= 0].flatten().long()
    return torch.bincount(own, minlength=num_experts).int(), torch.empty(ids.numel())


def _quantized(x: torch.Tensor, group: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().view(len(x), -1, group)
    scale = groups.abs().amax(-1).clamp_min(1e-10) / 448
    return (groups / scale[..., None]).view(x.shape).to(torch.float8_e4m3fn), scale


def _scatter(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    ids: torch.Tensor,
    padded: torch.Tensor,
    valid: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    indices: torch.Tensor,
    places: torch.Tensor,
    **_: Any,
) -> None:
    """Acts as ``ep_scatter``: padding rows have no expert and keep what was there."""
    out.view(torch.uint8).fill_(0xFF)  # NaN
    places.fill_(-1)
    at = 0
    for expert, (room, count) in enumerate(zip(padded.tolist(), valid.tolist(), strict=True)):
        indices[at : at + room] = -1
        indices[at : at + count] = expert
        for nth, (token, choice) in enumerate((ids == expert).nonzero().tolist()):
            out.view(torch.uint8)[at + nth] = x.view(torch.uint8)[token]
            if scale is not None:
                out_scale[at + nth] = scale[token]
            places[token, choice] = at + nth
        at += room
    assert at == len(indices)


def _silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    gate, up = x.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _gather(
    down: torch.Tensor, out: torch.Tensor, places: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *_: Any
) -> None:
    kept = ids >= 0
    routes = down[places.clamp_min(0).long()].float() * weights[..., None]
    out.copy_(torch.where(kept[..., None], routes, 0).sum(1))
