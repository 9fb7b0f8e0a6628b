"""The planner's input and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Workload
from sglang_uvm_offload.plan.machine import Machine
from sglang_uvm_offload.plan.routing_curves import HitRate


@dataclass(frozen=True)
class Vram:
    """How the memory of one GPU is divided before any weight loads. Bytes; together they are its total."""

    in_use: int = 0
    """By others, before the start."""
    runtime: int = 0
    """CUDA contexts, and buffers of collectives."""
    sglang: int = 0
    """What SGLang's static fraction leaves for activations and CUDA graphs."""
    headroom: int = 0
    granted: int = 0
    """To weights and KV cache."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of VRAM of one rank of a pipeline stage, and its share of host RAM."""

    stage: int
    moe_layers: int
    plain_weights: int
    """Everything but routed experts and lookup tables, and expert tensors too small to place."""
    table_bytes: int
    """Lookup tables that are in VRAM."""
    resident_bytes: int
    """Resident experts: whole pages, each tensor rounded up to the driver's blocks."""
    slot_bytes: int
    """Slots, and the rows for them of tensors too small to place."""
    stream_buffers: int
    stream_bytes: int
    """All stream buffers."""
    streams_into_slots: bool
    """Whether prefill streams into slots, and needs no buffer."""
    kv_bytes: int
    driver_bytes: int
    budget_bytes: int
    """SGLang's budget for weights and KV cache, less the headroom."""
    host_bytes: int
    """Offloaded experts, at start."""

    @property
    def used_bytes(self) -> int:
        experts = self.resident_bytes + self.slot_bytes + self.stream_bytes
        return self.plain_weights + self.table_bytes + experts + self.kv_bytes + self.driver_bytes

    @property
    def spare_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes


@dataclass(frozen=True)
class Speed:
    """Predicted speed for one assumption on routing. Seconds, and tokens a second."""

    routing: str
    hit_rate: float
    """Share of a layer's routed activations that residents and slots serve."""
    requests: int
    """Concurrent requests, over all replicas."""
    missed_bytes: float
    """That one rank reads or copies over the link in a decode step, summed over pipeline stages."""
    decode_step_s: float
    decode_tokens_s: float
    """Of all requests together."""
    resident_step_s: float
    """The decode step with every expert in VRAM, as if they fitted."""
    prefill_chunk_s: float
    prefill_tokens_s: float
    resident_prefill_tokens_s: float
    streamed: bool = False
    """Whether prefill copies offloaded experts into stream buffers, instead of reading them in place."""
    cpu_engine_step_s: float = 0.0
    """The decode step of an engine that computes all routed experts on the CPU, 0 if the host memory's rate is unknown."""
    measured_on: HitRate | None = None
    """What the hit rate was measured on, None if it was given."""
    slowest: Speed | None = None
    """The same over a link of the worst published rate, None if none is known."""

    @property
    def least(self) -> Speed:
        """The worse of the two."""
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
    """Predicted decoding with so many draft tokens a step."""

    requests: int
    drafts: int
    decode_tokens_s: float


@dataclass(frozen=True)
class Plan:
    """``num_resident`` is None if nothing fits; ``problems`` then has the reasons and ``needs`` the remedies."""

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
    """Weights, draft layers left out. Those of packed formats count one by one."""
    active_parameters: int = 0
    """Weights that one token of text is computed with; embedding and head count."""
    quantization: str = ""
    """SGLang's name of the method, ``none`` without one."""
    slots: int = 0
    """Of each layer."""
    mem_fraction_static: float = 0.0
    """The flag's value: before the headroom is subtracted."""
    headroom_gb: float = 0.0
    chunked_prefill_size: int = 0
    kv_tokens: int = 0
    """Tokens of KV cache required on each rank."""
    kv_token_bytes: float = 0.0
    vram: Vram = Vram()
    ranks: tuple[RankMemory, ...] = ()
    """One for each pipeline stage; without any resident if nothing fits."""
    host_needed: int = 0
    """Host RAM of the machine: offloaded experts of all ranks, and their processes."""
    table_bytes: int = 0
    """Lookup tables in the checkpoint."""
    tables_in: str = ""
    """Where SGLang keeps them, "" without any."""
    tables_host: int = 0
    """What of the host RAM they take."""
    stream_tokens: int = 0
    """Steps of this many tokens or more stream, if there are stream buffers."""
    hiding_chunk: int = 0
    """The tokens of the smallest chunk whose computing hides its copies but for the first layer's; 0 if there is none, or no
    stream buffer."""
    slowest_hiding_chunk: int = 0
    """The same over a link of the worst published rate, or over this one where none is known."""
    speeds: tuple[Speed, ...] = ()
    useless: tuple[str, ...] = ()
    """Reasons not to serve with a plan that fits."""
    problems: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    draft_speeds: tuple[DraftSpeed, ...] = ()
    """With drafts: for each number of draft tokens from none to the workload's."""
    draft_note: str = ""
    """The one of the notes that says that drafts cost more than they bring."""
    flags: tuple[str, ...] = ()
    """Of the launch that gives this plan; one string per flag, quoted for a shell."""
    environment: tuple[str, ...] = ()
    """The variables that the launch needs, as ``NAME=value``."""
    offloads: bool = False
    """Whether the launch needs this plugin."""
    plain: Plain | None = None
    """SGLang without offloading, None if VRAM does not hold every expert."""
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
        """Residents and slots of a layer, all in VRAM; 0 if nothing fits."""
        return (self.num_resident or 0) + self.slots

    @property
    def streams_into_slots(self) -> bool:
        """Whether all ranks do."""
        return all(rank.streams_into_slots for rank in self.ranks if rank.moe_layers)

    @property
    def stream_buffers(self) -> int:
        """Of the rank that has fewest."""
        return min((rank.stream_buffers for rank in self.ranks if rank.moe_layers), default=0)
