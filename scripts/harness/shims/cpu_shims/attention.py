"""torch_native attention for DeepSeek's latent attention and for gpt-oss's sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cpu_shims.hooks import around

BACKEND = "sglang.srt.layers.attention.torch_native_backend"


def install() -> None:
    latent_attention_as_matrices()
    triton_means_torch_native()
    around(f"{BACKEND}.scaled_dot_product_attention", attend_to_sinks)
    around(f"{BACKEND}.TorchNativeAttnBackend.forward_extend", forward_with_sinks)
    around(f"{BACKEND}.TorchNativeAttnBackend.forward_decode", forward_with_sinks)


def latent_attention_as_matrices() -> None:
    """DeepSeek looks up how each attention backend computes latent attention; SGLang registers nothing for torch_native."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)


def triton_means_torch_native() -> None:
    """gpt-oss accepts only a few attention backends, triton among them; run torch_native under that name."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    ATTENTION_BACKENDS["triton"] = ATTENTION_BACKENDS["torch_native"]


class Sinks:
    """The sinks of the layer whose attention is being computed; the first hook below sets them, the second reads them."""

    current: torch.Tensor | None = None

    @classmethod
    @contextmanager
    def of(cls, sinks: torch.Tensor | None) -> Iterator[None]:
        cls.current = sinks
        try:
            yield
        finally:
            cls.current = None


def forward_with_sinks(original: Callable[..., Any], *args: Any, sinks: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """The backend takes no ``sinks``: hold them for the attention function that it calls."""
    with Sinks.of(sinks):
        return original(*args, **kwargs)


def attend_to_sinks(
    original: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Add a sink as one more key of each head, with a fixed score and a value of zero."""
    if Sinks.current is None:
        return original(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **kwargs)
    heads, rows, columns = query.shape[1], query.shape[2], key.shape[2]
    if attn_mask is None:
        attn_mask = torch.ones(rows, columns, dtype=torch.bool)
        attn_mask = attn_mask.tril() if is_causal else attn_mask
    scores = torch.zeros(heads, rows, columns).masked_fill(~attn_mask, float("-inf"))
    sink = Sinks.current.float().view(heads, 1, 1).expand(heads, rows, 1)
    nothing = torch.zeros_like(key[:, :, :1])
    return original(
        query,
        torch.cat([key, nothing], dim=2),
        torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=2),
        attn_mask=torch.cat([scores, sink], dim=-1).unsqueeze(0).to(query.dtype),
        **kwargs,
    )
