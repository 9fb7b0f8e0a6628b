"""Every way to serve one checkpoint in one VRAM budget: who takes part, and with which flags.

The budget is the share of the routed experts' bytes that may be in VRAM (*residency*). Where a way needs room in VRAM to bring
weights back, that room is part of its budget. Settings are those that each one's own documents or source recommend.
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
"""Of the rows in VRAM, as a profile would ask for it."""


class CannotServe(Exception):
    """This contender has no setting for this budget. The message has the reason."""


@dataclass(frozen=True)
class Budget:
    """One checkpoint, and the share of its routed experts that VRAM may hold."""

    model: ModelShape
    residency: float
    warmup_tokens: int
    """After which this plugin chooses its residents anew."""

    @property
    def residents(self) -> int:
        """Experts of each layer that the budget holds."""
        return math.floor(self.residency * self.model.num_experts + 1e-9)

    @property
    def layer_bytes(self) -> int:
        """Routed experts of the largest MoE layer."""
        return max(self.model.layers[index].expert_bytes for index in self.model.moe_layers)

    def offloaded_bytes(self, residents: int) -> int:
        """What is out of VRAM with so many experts of each layer in it. The experts of a layer are alike."""
        return self.model.expert_bytes * (self.model.num_experts - residents) // self.model.num_experts


@dataclass(frozen=True)
class Contender:
    name: str
    what: str
    flags: Callable[[Budget], Flags]
    """Flags of ``sglang.launch_server``. Raises ``CannotServe``."""
    residency: float | None = None
    """Its only budget; None: it takes part at every residency."""
    on_cpu: str = ""
    """What must be known of its row on a machine without a GPU."""
    offload: bool = False
    """Whether it is this plugin, which reports what it offloads."""
    slots: bool = False
    """Whether it has slots, which its status must show in use."""


def this_plugin(**more: Any) -> Callable[[Budget], Flags]:
    def flags(budget: Budget) -> Flags:
        given = {"num_resident": budget.residents, **more}
        if given.get("resident_selection") != "first_n":
            given["warmup_tokens"] = budget.warmup_tokens
        return {f"expert_offload_{name}": value for name, value in given.items()}

    return flags


def with_slots(divide: Callable[[Budget], int]) -> Callable[[Budget], Flags]:
    """So many of the budget's rows (``divide``) are slots, the rest residents."""

    def flags(budget: Budget) -> Flags:
        slots = divide(budget)
        if not slots:
            raise CannotServe(f"{budget.residents} of {budget.model.num_experts} experts in VRAM leave no row for slots")
        residents = budget.residents - slots
        selection = "frequency" if residents else "first_n"
        return this_plugin(num_resident=residents, slots=slots, resident_selection=selection)(budget)

    return flags


def paged_experts(budget: Budget) -> Flags:
    """SGLang's document: K slots a layer, at least top-k; its default graphs; no fused shared experts."""
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
    """Whole GiB only, and a layer's weights come back to VRAM as a whole while it computes: rounded up, and one layer more."""
    out = (1 - budget.residency) * budget.model.expert_bytes + budget.layer_bytes
    return {"cpu_offload_gb": math.ceil(out / GIB)}


def layer_groups(budget: Budget, prefetch_step: int = 1) -> Flags:
    """Groups of layers, the last ones of each offloaded and fetched ``prefetch_step`` (its default) ahead: as few layers as
    hold the budget together with those on their way, in the smallest groups, so that they lie as far apart as they can."""
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
    """What a run serves, in order: each contender at each of its residencies, the reference first."""
    wanted = [CONTENDERS[name] for name in dict.fromkeys([RESIDENT.name, *names])]
    return [
        (contender, residency)
        for contender in wanted
        for residency in (residencies if contender.residency is None else [contender.residency])
    ]
