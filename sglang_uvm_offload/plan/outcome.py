"""The planner's result."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Workload
from sglang_uvm_offload.plan.machine import Machine
from sglang_uvm_offload.plan.routing_curves import HitRate


@dataclass(frozen=True)
class Vram:
    """How the memory of one GPU is divided before weights load, in bytes. The parts sum up to the GPU's total."""

    in_use: int = 0
    """Used by other processes before the server starts."""
    runtime: int = 0
    """CUDA contexts and communication buffers."""
    sglang: int = 0
    """Left by --mem-fraction-static for activations and CUDA graphs."""
    headroom: int = 0
    granted: int = 0
    """Available to weights and KV cache."""


@dataclass(frozen=True)
class RankMemory:
    """VRAM of one rank of a pipeline stage, and its share of host RAM, in bytes."""

    stage: int
    moe_layers: int
    plain_weights: int
    """All weights except placed experts and lookup tables. Includes expert tensors too small to place."""
    table_bytes: int
    """Lookup tables kept in VRAM."""
    resident_bytes: int
    """Resident experts, with each tensor rounded up to the driver's blocks."""
    slot_bytes: int
    """Slots, including their rows of tensors too small to place."""
    stream_buffers: int
    stream_bytes: int
    """All stream buffers together."""
    streams_into_slots: bool
    """Whether prefill streams into slots and needs no buffer."""
    kv_bytes: int
    driver_bytes: int
    budget_bytes: int
    """SGLang's budget for weights and KV cache, minus the headroom."""
    host_bytes: int
    """Offloaded experts at the start."""

    @property
    def used_bytes(self) -> int:
        experts = self.resident_bytes + self.slot_bytes + self.stream_bytes
        return self.plain_weights + self.table_bytes + experts + self.kv_bytes + self.driver_bytes

    @property
    def spare_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes


@dataclass(frozen=True)
class Speed:
    """Predicted speed under one assumption about routing, in seconds and tokens per second."""

    routing: str
    hit_rate: float
    """Share of a layer's routed activations that residents and slots serve."""
    requests: int
    """Concurrent requests on all replicas together."""
    missed_bytes: float
    """Bytes that one rank reads or copies over the link per decode step, summed over pipeline stages."""
    decode_step_s: float
    decode_tokens_s: float
    """All requests together."""
    resident_step_s: float
    """The decode step if every expert were in VRAM."""
    prefill_chunk_s: float
    prefill_tokens_s: float
    resident_prefill_tokens_s: float
    streamed: bool = False
    """Whether prefill copies offloaded experts into slots or stream buffers, instead of reading them in place."""
    cpu_engine_step_s: float = 0.0
    """The decode step of an engine that computes routed experts on the CPU; 0 if the host memory's rate is unknown."""
    measured_on: HitRate | None = None
    """The measurement behind the hit rate; None if the user gave it."""
    slowest: Speed | None = None
    """The same prediction for the slowest published link of this kind; None if none is known."""

    @property
    def least(self) -> Speed:
        """The prediction for the slowest link, or this one if none is known."""
        return self.slowest or self

    @property
    def prefill_ratio(self) -> float:
        """Prefill speed relative to fully resident, at most 1."""
        return self.prefill_tokens_s / self.resident_prefill_tokens_s

    @property
    def cpu_engine_tokens_s(self) -> float:
        """All requests together, with as many tokens a step; 0 if the host memory's rate is unknown."""
        if not self.cpu_engine_step_s:
            return 0.0
        return self.decode_tokens_s * self.decode_step_s / self.cpu_engine_step_s

    @property
    def decode_ratio(self) -> float:
        """Decode speed relative to fully resident, at most 1."""
        return self.resident_step_s / self.decode_step_s


@dataclass(frozen=True)
class Plain:
    """A launch of SGLang without offloading, with every expert in VRAM."""

    mem_fraction_static: float
    decode_tokens_s: float
    """All requests of the workload together; 0 if the machine's rates are unknown."""
    flags: tuple[str, ...]
    environment: tuple[str, ...] = ()


@dataclass(frozen=True)
class DraftSpeed:
    """Predicted decode speed with this many draft tokens per step."""

    requests: int
    drafts: int
    decode_tokens_s: float


@dataclass(frozen=True)
class Plan:
    """A plan. If nothing fits, ``num_resident`` is None, ``problems`` gives the reasons, and ``needs`` the remedies."""

    model: str
    machine: Machine
    workload: Workload
    parallel: Parallel
    num_resident: int | None
    num_experts: int
    top_k: int
    moe_layers: int
    weights_bytes: int
    expert_bytes: int
    total_parameters: int = 0
    """Number of weights without draft layers. Each value of a packed format counts."""
    active_parameters: int = 0
    """Weights that compute one text token, including embedding and LM head."""
    quantization: str = ""
    """SGLang's name for the method; ``none`` without one."""
    slots: int = 0
    """Slots per layer."""
    mem_fraction_static: float = 0.0
    """The flag's value, before the headroom is subtracted."""
    headroom_gb: float = 0.0
    chunked_prefill_size: int = 0
    kv_tokens: int = 0
    """KV cache tokens required on each rank."""
    kv_token_bytes: float = 0.0
    vram: Vram = Vram()
    ranks: tuple[RankMemory, ...] = ()
    """One entry per pipeline stage, with no residents if nothing fits."""
    host_needed: int = 0
    """Host RAM that all ranks need: offloaded experts and processes."""
    table_bytes: int = 0
    """Size of the checkpoint's lookup tables."""
    tables_in: str = ""
    """Where SGLang keeps them; "" if there are none."""
    tables_host: int = 0
    """Host RAM that they take."""
    stream_tokens: int = 0
    """Steps of this many tokens or more stream, given slots or stream buffers."""
    hiding_chunk: int = 0
    """The smallest chunk, in tokens, whose compute hides its copies after the first layer; 0 if there is none or nothing
    streams."""
    slowest_hiding_chunk: int = 0
    """The same for the slowest published link of this kind, or for this link if none is known."""
    speeds: tuple[Speed, ...] = ()
    useless: tuple[str, ...] = ()
    """Reasons not to serve with this plan although it fits."""
    problems: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    draft_speeds: tuple[DraftSpeed, ...] = ()
    """With speculation: one entry per number of draft tokens, from 0 to the workload's."""
    draft_note: str = ""
    """The note that drafting is predicted to slow decoding; "" otherwise."""
    flags: tuple[str, ...] = ()
    """The flags of the launch that gives this plan, one string per flag, quoted for a shell."""
    environment: tuple[str, ...] = ()
    """The variables that the launch needs, as ``NAME=value``."""
    offloads: bool = False
    """Whether the launch needs this plugin."""
    plain: Plain | None = None
    """SGLang without offloading, None if VRAM does not hold every expert."""
    plain_fp8: Plain | None = None
    """The same with the KV cache in FP8, where only that makes it fit."""
    assumptions: Assumptions = field(default_factory=Assumptions)

    @property
    def fits(self) -> bool:
        return self.num_resident is not None

    @property
    def speeds_of_all(self) -> tuple[Speed, ...]:
        """Predictions for all requests of the workload at once."""
        return tuple(speed for speed in self.speeds if speed.requests == self.workload.requests)

    @property
    def cpu_engine_tokens_s(self) -> float:
        """Decoding, with all requests at once, of an engine that computes the experts on the CPU; 0 if unknown."""
        return max((speed.cpu_engine_tokens_s for speed in self.speeds_of_all), default=0.0)

    @property
    def rows(self) -> int:
        """Experts per layer in VRAM, as residents or in slots; 0 if nothing fits."""
        return (self.num_resident or 0) + self.slots

    @property
    def streams_into_slots(self) -> bool:
        """Whether prefill streams into slots on all ranks."""
        return all(rank.streams_into_slots for rank in self.ranks if rank.moe_layers)

    @property
    def stream_buffers(self) -> int:
        """Stream buffers of the rank with the fewest."""
        return min((rank.stream_buffers for rank in self.ranks if rank.moe_layers), default=0)
