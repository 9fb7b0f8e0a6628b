"""A replay's results as records, which ``replay --json`` prints and a report validates."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from sglang_uvm_offload.replay.policies import SHIPPED
from sglang_uvm_offload.residency.status import MAX_LAYERS
from sglang_uvm_offload.units import Count, Share

Amount = Annotated[float, Meta(ge=0, le=1e30)]


class Replay(Struct, frozen=True):
    """One policy's result over the scored steps. ``hit_rate``: the share of activations served from VRAM; 0 without
    activations. Bytes and seconds count reads and moves over the link."""

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
    """Hit rates of up to 100 equal spans of the scored steps."""


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
    """Averages for steps with this many draft tokens, over steps that begin at each scored token."""

    drafts: int
    kept_per_step: float
    """Tokens kept per step, including the target's own."""
    read_bytes_per_step: float
    read_bytes_per_token: float
    """Bytes read per kept token."""
    token_seconds: float
    """Seconds per kept token: its share of the step's link time and of the rest of the step."""


class Foreseen(Struct, frozen=True):
    """How a predictor foresees the misses of the layers that it guesses, averaged over the scored steps."""

    policy: str
    predictor: str
    distance: int | None
    """How many MoE layers ahead a guess is made; None for a predictor that serves as comparison."""
    layers: int
    """The number of guessed layers."""
    misses_per_step: float
    brought_per_step: float
    """Guessed experts that are not held."""
    recall: float
    """The share of misses that are fetched."""
    precision: float
    """The share of fetched experts that are misses."""


class Scope(Struct, frozen=True):
    """What a replay scores, and the hardware that it takes."""

    requests: Count
    """Scored requests; ``steps`` are scored steps."""
    steps: Count
    warmup_requests: Count
    warmup_steps: Count
    layers: Count
    """Layers with routing."""
    num_experts: Count
    num_resident: Count
    """Resident experts per layer."""
    residency: Share
    batch: Count
    link_gbps: Amount
    link_assumed: bool
    expert_bytes: Count
    expert_bytes_assumed: bool
    shipped: str = SHIPPED
