"""The target model as built, and whether the resident ids and profiles fit its layers.

The config only hints at which layers route, because model families have their own rules. The built layers decide.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from sglang.srt.runtime_context import get_parallel

from sglang_uvm_offload.config import AUTO, RequestedConfig, expert_problems
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.resident_ids import ResidentIds
from sglang_uvm_offload.routing.profile import Profile, RoutedModel


def _followed(earlier: list[int], own: list[int]) -> list[int]:
    """Append a stage's layer numbers. SGLang's models number decoder layers; its Transformers fallback numbers the MoE layers
    of each stage from 0, so those are shifted behind the earlier ones."""
    first = earlier[-1] + 1 if earlier and own and own[0] <= earlier[-1] else 0
    return earlier + [first + layer for layer in own]


class BuiltModel:
    """The MoE layers of all pipeline stages. All ranks of a pipeline must construct it at the same point."""

    def __init__(self, model: ModelExperts, top_k: int | None):
        """Renumbers the layers of ``model`` by their position in the whole model. ``top_k`` is the largest top-k of a layer on
        this rank, None if unknown."""
        parallel = get_parallel()
        part = ([layer.layer_id for layer in model.layers], (model.num_logical, model.num_places), top_k)
        stages = parallel.pp_group.all_gather_object(part) if parallel.pp_size > 1 else [part]
        self._moe_layers: list[int] = []
        for rank, (layers, _, _) in enumerate(stages):
            before, self._moe_layers = len(self._moe_layers), _followed(self._moe_layers, layers)
            if rank == parallel.pp_rank:
                self._rows = range(before, len(self._moe_layers))
                for layer, number in zip(model.layers, self._moe_layers[before:], strict=True):
                    layer.shard = dataclasses.replace(layer.shard, layer_id=number)
        self.num_experts = max(experts for _, (experts, _), _ in stages)
        """Routed experts per layer in the checkpoint."""
        self.redundant = max(places for _, (_, places), _ in stages) - self.num_experts
        self._layers = model.layers
        self.top_k = max((k for _, _, k in stages if k), default=None)

    @property
    def first(self) -> int:
        """The number of MoE layers in earlier pipeline stages."""
        return self._rows.start

    @property
    def num_places(self) -> int:
        """Places for routed experts per layer, over all ranks that share it."""
        return self.num_experts + self.redundant

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The decoder layers with a router, in order."""
        return tuple(self._moe_layers)

    def routed_model(self, name: str, architecture: str) -> RoutedModel:
        """This model's identity in profiles."""
        return RoutedModel(name, architecture, self.moe_layers, self.num_experts, self.top_k)

    def problems(self, config: RequestedConfig, profile: Profile | None, model: RoutedModel) -> list[str]:
        """Why the number of residents, the ids or the profile do not fit the built model."""
        number = AUTO if config.num_resident is None else config.num_resident
        if not self.moe_layers:
            return [f"{flag_name('num_resident')} {number}: the built model has no MoE layer"]
        ids = config.resident_ids
        problems: list[str] = []
        if config.num_resident is not None:
            problems += expert_problems(ids, config.num_resident, config.slots or 0, self.num_experts, self.redundant)
        elif ids is not None:
            problems += ids.expert_problems(self.num_experts)
        if ids is not None:
            problems += ids.layer_problems(self.moe_layers)
        if profile is not None and (different := model.differences(profile.model)):
            files = ",".join(map(str, config.profiles))
            problems.append(f"{flag_name('profile')} {files}: belongs to another model: {'; '.join(different)}")
        if not problems and config.num_resident is not None:
            problems += self.room_problems(ids, config.num_resident)
        return problems

    def room_problems(self, ids: ResidentIds | None, num_resident: int) -> list[str]:
        """Why ``num_resident`` has no room for the named experts."""
        if ids is None:
            return []
        return ids.number_problems(num_resident) or (self._replica_problems(ids, num_resident) if self.redundant else [])

    def _replica_problems(self, chosen: ResidentIds, num_resident: int) -> list[str]:
        """Why the named experts of this stage, with all replicas, exceed ``num_resident`` per layer."""
        named = sum(
            int(np.isin(layer.location.experts, list(chosen.of_layer(row))).sum())
            for row, layer in zip(self._rows, self._layers, strict=True)
        )
        allowed = num_resident * len(self._layers)
        if named <= allowed:
            return []
        return [
            f"{flag_name('resident_ids')} {chosen.text!r}: names {named} experts over {len(self._layers)} layers, including "
            f"replicas (--ep-num-redundant-experts), but {flag_name('num_resident')} {num_resident} allows {allowed}"
        ]
