"""The contenders and their flags: every way to serve one checkpoint within one VRAM budget.

The budget is the share of the routed experts' bytes that may be in VRAM (*residency*). It includes the VRAM that a contender
needs to bring weights back. Each contender uses the settings that its own documentation or source recommends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.residency.slot_split import Slots

GIB = 1 << 30
Flags = dict[str, Any]
THREE_QUARTERS = Slots(None, {0.0: 0.75})
"""The share of the rows in VRAM that are slots, as a profile would request it."""


class CannotServe(Exception):
    """The contender has no setting that fits the budget. The message gives the reason."""


@dataclass(frozen=True)
class Budget:
    """A checkpoint and the share of its routed experts that VRAM may hold."""

    model: ModelShape
    residency: float
    warmup_tokens: int
    """The plugin selects its residents again after this many tokens."""

    @property
    def residents(self) -> int:
        """Experts per layer that fit the budget."""
        return math.floor(self.residency * self.model.num_experts + 1e-9)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the routed experts in the largest MoE layer."""
        return max(self.model.layers[index].expert_bytes for index in self.model.moe_layers)

    def offloaded_bytes(self, residents: int) -> int:
        """Bytes outside VRAM with ``residents`` experts per layer in it. All experts of a layer have the same size."""
        return self.model.expert_bytes * (self.model.num_experts - residents) // self.model.num_experts


@dataclass(frozen=True)
class Contender:
    name: str
    what: str
    flags: Callable[[Budget], Flags]
    """Returns flags for ``sglang.launch_server``. Raises ``CannotServe``."""
    residency: float | None = None
    """The only residency that it runs at; None: every residency."""
    on_cpu: str = ""
    """A caveat for its row on a machine without a GPU."""
    offload: bool = False
    """Whether this is the plugin, which reports what it offloads."""
    slots: bool = False
    """Whether it has slots; its status must then show them in use."""


def this_plugin(**more: Any) -> Callable[[Budget], Flags]:
    def flags(budget: Budget) -> Flags:
        given = {"num_resident": budget.residents, **more}
        if given.get("resident_selection") != "first_n":
            given["warmup_tokens"] = budget.warmup_tokens
        return {f"expert_offload_{name}": value for name, value in given.items()}

    return flags


def with_slots(divide: Callable[[Budget], int]) -> Callable[[Budget], Flags]:
    """``divide(budget)`` of the budget's rows are slots; the rest are residents."""

    def flags(budget: Budget) -> Flags:
        slots = divide(budget)
        if not slots:
            raise CannotServe(f"{budget.residents} of {budget.model.num_experts} experts in VRAM leave no row for slots")
        residents = budget.residents - slots
        selection = "frequency" if residents else "first_n"
        return this_plugin(num_resident=residents, slots=slots, resident_selection=selection)(budget)

    return flags


def paged_experts(budget: Budget) -> Flags:
    """As SGLang's guide says: K slots per layer (at least top-k), default CUDA graphs, no shared-expert fusion."""
    if budget.residents < budget.model.top_k:
        raise CannotServe(
            f"{budget.residents} of {budget.model.num_experts} experts fit the budget, and paged experts need at least the "
            f"{budget.model.top_k} that a token chooses"
        )
    return {
        "enable_paged_experts": True,
        "paged_experts_num_resident": budget.residents,
        "disable_shared_experts_fusion": True,
    }


def cpu_offload(budget: Budget) -> Flags:
    """Offloads whole GiB, rounded up, plus one layer: a layer's weights return to VRAM in full while it computes."""
    out = (1 - budget.residency) * budget.model.expert_bytes + budget.layer_bytes
    return {"cpu_offload_gb": math.ceil(out / GIB)}


def layer_groups(budget: Budget, prefetch_step: int = 1) -> Flags:
    """Offloads the last layers of each group and fetches them ``prefetch_step`` (SGLang's default) ahead.

    Offloads as few layers as the budget allows, counting those in transfer, in the smallest groups, so that the offloaded
    layers are as far apart as possible."""
    model = budget.model
    moe, layers = len(model.moe_layers), model.num_layers
    wanted = (1 - budget.residency) * moe + prefetch_step + 1
    choices = []
    for size in range(1, layers + 1):
        for away in range(1, size + 1):
            offloaded = sum(index % size >= size - away for index in model.moe_layers)
            if offloaded >= wanted - 1e-9:
                choices.append((offloaded, size, away))
    if not choices:
        raise CannotServe(
            f"the budget leaves {budget.residency * moe:g} of {moe} MoE layers in VRAM, and {prefetch_step + 1} offloaded "
            "layers take part of that while they compute"
        )
    _, size, away = min(choices)
    return {
        "offload_group_size": size,
        "offload_num_in_group": away,
        "offload_prefetch_step": prefetch_step,
        "offload_mode": "cpu",
    }


RESIDENT = Contender("resident", "every expert in VRAM: the reference", lambda budget: {}, residency=1.0)

_ALL = (
    RESIDENT,
    Contender(
        "first_n", "this plugin, the first N experts of each layer", this_plugin(resident_selection="first_n"), offload=True
    ),
    Contender(
        "frequency",
        "this plugin, the most used experts, chosen once after the warm-up",
        this_plugin(resident_selection="frequency"),
        offload=True,
    ),
    Contender(
        "continuous",
        "this plugin, residents that follow the traffic",
        this_plugin(resident_selection="frequency", adapt="continuous"),
        offload=True,
    ),
    Contender(
        "zero_copy",
        "this plugin with no resident: decoding reads every expert in place (a bound)",
        this_plugin(resident_selection="first_n"),
        residency=0.0,
        offload=True,
    ),
    Contender(
        "slots_only",
        "this plugin, every row in VRAM a slot",
        with_slots(lambda budget: budget.residents),
        offload=True,
        slots=True,
    ),
    Contender(
        "residents_and_slots",
        "this plugin, three of four rows in VRAM slots",
        with_slots(lambda budget: THREE_QUARTERS.of(budget.residents, budget.model.num_experts)),
        offload=True,
        slots=True,
    ),
    Contender("paged_experts", "SGLang's --enable-paged-experts", paged_experts),
    Contender(
        "cpu_offload_gb",
        "SGLang's --cpu-offload-gb",
        cpu_offload,
        on_cpu="SGLang leaves the weights of --device cpu where they are: nothing is offloaded",
    ),
    Contender("offloader_v2", "SGLang's --offload-group-size (OffloaderV2)", layer_groups),
)
CONTENDERS = {contender.name: contender for contender in _ALL}


def cells(names: list[str], residencies: list[float]) -> list[tuple[Contender, float]]:
    """What a run serves, in order: each contender at each of its residencies, reference first."""
    wanted = [CONTENDERS[name] for name in dict.fromkeys([RESIDENT.name, *names])]
    return [
        (contender, residency)
        for contender in wanted
        for residency in (residencies if contender.residency is None else [contender.residency])
    ]
