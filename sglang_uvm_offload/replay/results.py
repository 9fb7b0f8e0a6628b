"""What a replay found, as records: ``replay --json`` prints them, and a report checks them when it reads them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from sglang_uvm_offload.replay.policies import SHIPPED
from sglang_uvm_offload.residency.status import MAX_LAYERS
from sglang_uvm_offload.units import Count, Share

Amount = Annotated[float, Meta(ge=0, le=1e30)]


class Replay(Struct, frozen=True):
    """One policy's result over the scored steps. ``hit_rate``: the share of activations that VRAM served, 0 without any. Bytes
    and seconds are those of the link: reads plus moves."""

    policy: str
    residency: Share
    batch: Count
    hit_rate: Share
    moves_per_step: Amount
    read_bytes_per_step: Amount
    moved_bytes_per_step: Amount
    step_seconds: Amount
    per_layer_hit_rate: Annotated[list[Share], Meta(max_length=MAX_LAYERS)]
    hit_rate_over_time: Annotated[list[Share], Meta(max_length=1000)]
    """Hit rate of each of up to 100 equal spans of the scored steps."""


class Split(Struct, frozen=True):
    """The result of one split of each layer's VRAM over the scored steps. Seconds are link time: reads plus fills."""

    slot_share: float
    """The share of VRAM in slots that was asked for; ``residents`` and ``slots`` are whole experts."""
    residents: int
    slots: int
    hit_rate: float
    fills_per_step: float
    read_bytes_per_step: float
    filled_bytes_per_step: float
    step_seconds: float


class DraftReads(Struct, frozen=True):
    """Of steps with so many draft tokens, on average over steps that begin at each scored token."""

    drafts: int
    kept_per_step: float
    """Tokens, one of them the target's own."""
    read_bytes_per_step: float
    read_bytes_per_token: float
    """For each kept one."""
    token_seconds: float
    """The time of its share of a step: on the link, and of what a step takes beside."""


class Foreseen(Struct, frozen=True):
    """Of the misses of the layers that a predictor guesses, on average over the scored steps."""

    policy: str
    predictor: str
    distance: int | None
    """The MoE layers by which a guess comes before its layer; None for a predictor for comparison."""
    layers: int
    """Those that are guessed."""
    misses_per_step: float
    brought_per_step: float
    """Guessed experts that are not held."""
    recall: float
    """The share of the misses that are brought."""
    precision: float
    """The share of what is brought that is a miss."""


class Scope(Struct, frozen=True):
    """What a replay scores, and the hardware that it takes."""

    requests: Count
    """Scored, and so are ``steps``."""
    steps: Count
    warmup_requests: Count
    warmup_steps: Count
    layers: Count
    """Those that route."""
    num_experts: Count
    num_resident: Count
    """Of each layer."""
    residency: Share
    batch: Count
    link_gbps: Amount
    link_assumed: bool
    expert_bytes: Count
    expert_bytes_assumed: bool
    shipped: str = SHIPPED
