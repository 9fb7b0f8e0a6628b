"""What a checkpoint's tensor is: its layer, whether it holds routed experts, and how ranks divide it.

By the shapes and the few words that SGLang's loaders agree on, not by one family's list: experts are numbered under a module
named for them, or stacked along the first dimension of a tensor of three dimensions or more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from sglang_uvm_offload.sizing.safetensors_header import TensorInfo

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d{1,5})\.")
_DRAFT = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.(?:(?:layers?|blocks?)\.)?(?:(\d{1,5})\.)?")
"""Draft layers that have numbers of their own: ``mtp.layers.0.`` (Qwen3-Next), ``mtp.0.`` (DeepSeek-V4), ``mtp_block.0.``
(ERNIE 4.5), ``mtp_layers.0.`` (MiMo)."""
_UNLOADED = re.compile(r"^(?:talker|code2wav|token2wav)\.")
"""The speech models other than Qwen's omni models, which SGLang skips (``models/qwen3_omni_moe.py``)."""

_ONE_EXPERT = re.compile(r"(?:^|\.)(?!\w*shared)\w*experts?\.(\d{1,6})\.(.+)$")
_EXPERT_MODULE = re.compile(r"(?:^|\.)(?!\w*shared)\w*experts?[._]")
_MOE_MODULE = re.compile(r"(?:^|\.)(?!\w*shared)(?:\w*experts?|\w*moe|mlp|ffn|feed_forward|mixer)\.")
_NO_EXPERT = re.compile(r"share|attn|attention|conv|norm|router|\bgate\.(?:weight|bias)$")
_PARAMETER = re.compile(
    r"[._]((?:(?:weight|input|output|activation|global)_)*(?:scales?|global_scale)(?:_inv|_2)?|q?weight(?:_packed|_shape|_zero_point"
    r"|_g_idx)?|bias|blocks|q?zeros|g_idx)$"
)
"""The last word of a name: which of a projection's tensors it is."""
_DOWN = re.compile(r"down|w2|fc2|output_linear|c_proj|4h_to_h")

_SHARED = re.compile(r"share\w*experts?\.|shared_mlp\.|share_expert|residual_mlp\.")
_REPLICATED = re.compile(
    r"norm|q_a_proj|kv_a_proj|\.wq_a\.|\.wkv\.|\.[fg]_a_proj|\.indexer\.|\.gate\.|\.router\.|shared_expert_gate|eh_proj"
)
_KEYS_VALUES = re.compile(r"(?:attn|attention|mixer).*\.[kv]_proj[._]")
_ATTENTION = re.compile(
    r"(?:attn|attention)\w*\.(?:\d\.)?(?:q_proj|q_b_proj|kv_b_proj|o_proj|qkv_proj|sinks|q_conv1d|[kv]_conv1d|[fgb]_b_proj|b_proj|wq_b"
    r"|wo_[ab]|query_key_value|dense|out_proj|in_proj\w*|conv1d|g_proj)\b"
    r"|\.(?:mixer|mamba|ssm|conv)\.(?:in_proj|out_proj|conv1d?|conv|q_proj|o_proj|x_proj|dt_proj|qkv_proj)\b"
)
_FEED_FORWARD = re.compile(r"\.(?:gate_proj|up_proj|down_proj|gate_up_proj|gate_and_up_proj|w1|w2|w3|w13|fc1|fc2)[._]")


@dataclass(frozen=True)
class Place:
    """Where a tensor belongs. ``stack`` is the name of the list of layers, ``path`` the name inside the layer."""

    stack: str
    layer: int
    path: str
    draft: bool = False


@dataclass(frozen=True)
class Experts:
    """A tensor of routed experts: the server-side tensor that will hold it, as ``w13.weight``, and the expert that it is of,
    None for one that stacks all experts of its layer."""

    part: str
    expert: int | None

    @property
    def down(self) -> bool:
        return self.part.startswith("w2.")


def unloaded(name: str) -> bool:
    """Whether SGLang leaves it on disk."""
    return _UNLOADED.match(name) is not None


def place(name: str) -> Place | None:
    """None outside layers. Draft layers count from 0."""
    if "mtp" in name and (draft := _DRAFT.search(name)):
        return Place("", int(draft.group(1) or 0), name[draft.end() :], draft=True)
    if found := _LAYER.search(name):
        return Place(name[: found.start(1) - 1], int(found.group(1)), name[found.end() :])
    return None


def stacked_projections(paths: Iterable[tuple[str, TensorInfo]], num_experts: int) -> frozenset[str]:
    """The projections of a layer whose experts are stacked in one tensor, by their paths in the layer. Their scales and biases
    may have fewer dimensions, and are told by the projection's name."""
    return frozenset(
        _projection(path)[0]
        for path, tensor in paths
        if len(tensor.shape) >= 3
        and tensor.shape[0] == num_experts
        and _MOE_MODULE.search(path)
        and not _NO_EXPERT.search(path)
    )


def experts_of(path: str, tensor: TensorInfo, num_experts: int, stacked: frozenset[str]) -> Experts | None:
    """None if ``tensor`` is not of routed experts, or not in a form that is known. ``stacked``: ``stacked_projections``."""
    if one := _ONE_EXPERT.search(path):
        return Experts(_part_of_one(one.group(2)), int(one.group(1)))
    projection, parameter = _projection(path)
    if projection in stacked and tensor.shape and tensor.shape[0] == num_experts:
        return Experts(_part(projection.rpartition(".")[2], parameter), None)
    return None


def named_for_experts(path: str) -> bool:
    """Whether a name claims that its tensor is of routed experts."""
    return _EXPERT_MODULE.search(path) is not None


def divisions(name: str) -> tuple[str, ...]:
    """The fields of ``LayerShape`` that count a tensor, by how ranks divide it. Unknown tensors are whole on each rank."""
    if _REPLICATED.search(name):
        return ("replicated",)
    if _SHARED.search(name):
        return ("feed_forward",)
    if _KEYS_VALUES.search(name):
        return ("keys_values",)
    if _ATTENTION.search(name):
        return ("attention",)
    return ("feed_forward",) if _FEED_FORWARD.search(name) else ("replicated", "unknown")


def _projection(path: str) -> tuple[str, str]:
    """(the projection's path, which of its tensors): ``experts.down_proj`` and ``bias`` for ``experts.down_proj_bias``."""
    found = _PARAMETER.search(path)
    return (path[: found.start()], found.group(1)) if found else (path, "weight")


@lru_cache(maxsize=256)
def _part_of_one(path: str) -> str:
    """Of one expert's tensor: a checkpoint has a hundred thousand of them, of a few names."""
    return _part(*_projection(path))


def _part(projection: str, parameter: str) -> str:
    return f"{'w2' if _DOWN.search(projection) else 'w13'}.{parameter}"
