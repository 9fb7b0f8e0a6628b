"""Expert kernels in plain torch, where SGLang has only Triton ones or none for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from cpu_shims.hooks import around

TRITON = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"


def install() -> None:
    around("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", skip_absent_experts)
    around(f"{TRITON}.inplace_fused_experts", inplace_experts)
    around(f"{TRITON}.outplace_fused_experts", outplace_experts)


class WithoutThem:
    """The experts' weights, followed by as many all-zero experts as are asked for, without a copy of the weights."""

    def __init__(self, weights: torch.Tensor):
        self.weights = weights
        self.zero = torch.zeros_like(weights[0])

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.weights[expert] if expert < self.weights.shape[0] else self.zero


def skip_absent_experts(
    original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, config: Any
) -> torch.Tensor:
    """The native kernel computes every id of a token; under expert parallelism some are -1: another rank's, or padding.

    Send those to experts of zeros behind the layer's own, each of a token's to a different one as the kernel expects.
    """
    ids = topk_output.topk_ids
    local = layer.w13_weight.shape[0]
    absent = ids < 0
    if local == layer.num_experts and not absent.any():
        return original(layer, x, topk_output, config)
    spare = local + torch.arange(ids.shape[1], dtype=ids.dtype).expand_as(ids)
    names = ("w13_weight", "w2_weight", "w13_weight_bias", "w2_weight_bias")
    present = {name: getattr(layer, name) for name in names if getattr(layer, name, None) is not None}
    padded = SimpleNamespace(
        num_experts=local + ids.shape[1], **{name: WithoutThem(tensor) for name, tensor in present.items()}
    )
    topk_output = topk_output._replace(
        topk_ids=torch.where(absent, spare, ids), topk_weights=topk_output.topk_weights.masked_fill(absent, 0)
    )
    return original(padded, x, topk_output, config)


def inplace_experts(original: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    hidden_states.copy_(reference_experts(hidden_states, *args, **kwargs))


def outplace_experts(original: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return reference_experts(hidden_states, *args, **kwargs)


def reference_experts(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    activation: str = "silu",
    is_gated: bool = True,
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
    *_: Any,
    routed_scaling_factor: float | None = None,
    **__: Any,
) -> torch.Tensor:
    """What the fused Triton kernels compute, expert by expert on dequantised weights."""
    assert activation == "silu"
    assert is_gated
    assert not apply_router_weight_on_input
    block = None if use_int4_w4a16 else block_shape
    output = torch.zeros(x.shape, dtype=torch.float32)
    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[token], dequantised(w1, w1_scale, w1_zp, expert, block), b1, expert).chunk(2, dim=-1)
        hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        out = linear(hidden, dequantised(w2, w2_scale, w2_zp, expert, block), b2, expert)
        output.index_add_(0, token, out * topk_weights[token, choice].float().unsqueeze(1))
    return (output * (routed_scaling_factor or 1.0)).to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias[expert].float())


def dequantised(
    weights: torch.Tensor, scales: torch.Tensor | None, zeros: torch.Tensor | None, expert: int, block: list[int] | None
) -> torch.Tensor:
    """One expert's [out, in] weight in float32."""
    weight = weights[expert]
    if scales is None:
        return weight.float()
    scale = scales[expert].float()
    if weight.dtype == torch.uint8:
        return dequantised_int4(weight, scale, None if zeros is None else zeros[expert])
    if block is not None:
        scale = scale.repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(block[1], 1)
        return weight.float() * scale[:, : weight.shape[1]]
    return weight.float() * scale.reshape(-1, 1)


def dequantised_int4(packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """Two neighbouring inputs a byte, the first in the low bits; zeros likewise along the outputs, or 8 throughout."""
    values = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).float()
    zero = torch.full_like(scale, 8.0)
    if zeros is not None:
        zero = torch.stack([zeros & 0xF, zeros >> 4], dim=1).flatten(0, 1).float()
    group = values.shape[1] // scale.shape[1]
    return (values - zero.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
