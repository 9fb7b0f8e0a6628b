"""The config of a launch: what its flags request, and what the ranks decide.

The launcher parses the flags (``requested_config``), the launch checks (``plugin/checks/launch_checks``) fill in what depends
on the model and the machine, and every rank gets the result. No flag, or file that a flag names, is read twice.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from sglang_uvm_offload.flags import NEVER, flag_name
from sglang_uvm_offload.resident_ids import ResidentIds

AUTO = "auto"

Selection = Literal["first_n", "frequency", "manual"]
Adapt = Literal["off", "warmup", "continuous"]
Prefetch = Literal["none", "frequency", "speculative"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the flags alone decide. Fields are the flags and options of the same name unless stated."""

    resident_selection: Selection
    resident_ids: ResidentIds | None
    """With ``manual`` selection, the residents at load. With ``continuous`` adaptation, the always-resident experts."""
    warmup_tokens: int
    adapt: Adapt
    """``continuous`` if ``prefetch`` is not ``none``."""
    prefetch: Prefetch
    profiles: tuple[Path, ...]
    """The files of ``--expert-offload-profile``; empty without it."""
    save_profile: Path | None
    """Where to save the routing. If it is one of ``profiles``, that file may not exist yet."""
    trace: Path | None
    stats: Path | None
    headroom_gb: float
    """VRAM to leave free, in GiB."""
    stream_gb: float | None
    """``stream_buffer_gb``. None for ``auto``: as much as the planner or the rank finds room for."""
    tables_in_host: bool
    """Whether to keep lookup tables in host RAM that SGLang itself can keep only in VRAM."""
    tma: bool
    """Whether kernels may load weights with TMA."""
    draft_num_resident: int | None
    """Resident routed experts per MoE layer of a draft model, over all ranks that share the layer; None for all."""
    backend: str = "auto"
    """``uvm`` or ``emulated``; ``auto`` until the launch is checked."""
    launch_id: str = ""
    """Identifies this launch in all its processes."""
    began_at: float = 0.0
    """When the launch checks began, in seconds since the epoch."""

    @property
    def saving_flag(self) -> str:
        """The flag that sets ``save_profile``, for messages."""
        return flag_name("profile" if self.save_profile in self.profiles else "save_profile")

    @property
    def saves(self) -> bool:
        """Whether the server saves any file."""
        return bool(self.save_profile or self.trace or self.stats)

    @property
    def coactivation(self) -> bool:
        """Whether forecasts also use co-activation of experts. ``continuous`` alone means ``speculative``."""
        return self.prefetch != "frequency"

    @property
    def looks_ahead(self) -> bool:
        """Whether slots look ahead within a step. ``continuous`` alone does not, because the gain depends on the model's
        routers and has only been simulated (benchmarks/results/lookahead)."""
        return self.prefetch == "speculative"

    @property
    def residents_change(self) -> bool:
        """Whether residents may change while serving."""
        return self.adapt == "continuous" or (self.adapt == "warmup" and self.resident_selection == "frequency")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestedConfig(Settings):
    """What the flags request. None stands for ``auto``, which the ranks decide once the model is built."""

    num_resident: int | None
    slots: int | None
    stream_tokens: int | None

    def resolved(
        self,
        *,
        num_resident: int | None = None,
        slots: int | None = None,
        stream_tokens: int | None = None,
        stream_buffers: int = 0,
    ) -> OffloadConfig:
        """The config with the decided numbers. Omitted ones keep the flags' values."""
        fields: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(Settings)}
        decided: dict[str, Any] = {
            "num_resident": self.num_resident if num_resident is None else num_resident,
            "slots": self.slots if slots is None else slots,
            "stream_tokens": self.stream_tokens if stream_tokens is None else stream_tokens,
        }
        assert None not in decided.values(), f"{decided} leaves auto undecided"
        return OffloadConfig(**fields, **decided, stream_buffers=stream_buffers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadConfig(Settings):
    """What the ranks of a launch have decided, identical on each.

    requested = parse({"num_resident": "200"})
    config = requested.resolved(stream_tokens=NEVER)

    """

    num_resident: int
    """Resident routed experts per MoE layer, over all ranks that share the layer. Replicas (SGLang's redundant experts) count
    as experts."""
    slots: int
    """Slots per MoE layer in addition to its residents, over all ranks that share the layer."""
    stream_tokens: int
    """Steps with at least this many tokens stream; ``NEVER`` if none do."""
    stream_buffers: int
    """Stream buffers per rank."""

    @property
    def streams(self) -> bool:
        """Whether any step may stream."""
        return self.stream_tokens < NEVER


def expert_problems(ids: ResidentIds | None, num_resident: int, slots: int, num_experts: int, redundant: int = 0) -> list[str]:
    """Why ``num_resident``, the slots or the ids do not fit a model with ``num_experts`` routed experts per layer, plus
    ``redundant`` copies of them (``--ep-num-redundant-experts``), which ``num_resident`` includes."""
    out = [] if ids is None else ids.expert_problems(num_experts) + ids.number_problems(num_resident)
    places = num_experts + redundant
    if places < num_resident:
        copies = f" and {redundant} redundant ones" if redundant else ""
        out.append(
            f"{flag_name('num_resident')} {num_resident}: the model has {num_experts} routed experts a layer{copies}; "
            f"give at most {places}"
        )
    return out + slot_problems(slots, num_resident, places)


def slot_problems(slots: int, num_resident: int, num_experts: int) -> list[str]:
    """Why a layer cannot use this many slots beside its residents. Slots are ignored if nothing is offloaded."""
    offloaded = num_experts - num_resident
    if not 0 < offloaded < slots:
        return []
    return [
        f"{flag_name('slots')} {slots}: {num_resident} residents leave only {offloaded} of {num_experts} experts a layer "
        f"offloaded; give at most {offloaded}"
    ]
