"""The target model as built, and whether the ids and profiles for its layers fit it.

The config only suggests which layers route, because a model family may have its own rules. The built layers decide.
"""

from __future__ import annotations

import numpy as np
from sglang.srt.runtime_context import get_parallel

from sglang_uvm_offload.config import OffloadConfig, expert_problems
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.placement import InitialPlacement, ids_from
from sglang_uvm_offload.resident_ids import ResidentIds
from sglang_uvm_offload.routing.profile import RoutedModel


class EarlierStages:
    """The MoE layers of earlier pipeline stages. Each stage sends them to the next, which waits for them before it places its
    first layer. Only per-layer ids and profiles need this; without them all stages are built at the same time."""

    def __init__(self, config: OffloadConfig):
        ids, parallel = config.resident_ids, get_parallel()
        self._is_sent = parallel.pp_size > 1 and (bool(config.profiles) or (ids is not None and ids.per_layer is not None))
        self._layers: list[int] | None = None if self._is_sent and parallel.pp_rank > 0 else []

    def layers(self) -> list[int]:
        """Wait until the previous stage is built."""
        if self._layers is None:
            parallel = get_parallel()
            self._layers = parallel.pp_group.recv_object(src=parallel.pp_rank - 1)
        return self._layers

    def send_to_next(self, own: list[int]) -> None:
        """Call this once this stage is built. ``own``: the ids that its MoE layers were built with."""
        parallel = get_parallel()
        if self._is_sent and parallel.pp_rank + 1 < parallel.pp_size:
            parallel.pp_group.send_object(_followed(self.layers(), own), dst=parallel.pp_rank + 1)


def _followed(earlier: list[int], own: list[int]) -> list[int]:
    return earlier + [ids_from(earlier, own[0]) + layer for layer in own]


class BuiltModel:
    """The MoE layers of all pipeline stages. Every rank of a pipeline must construct it at the same point."""

    def __init__(self, model: ModelExperts, top_k: int | None):
        """``top_k``: the most routed experts per token of a layer on this rank, None if unknown. Renumbers the layers of
        ``model`` by their position in the whole model."""
        parallel = get_parallel()
        part = ([layer.layer_id for layer in model.layers], (model.num_logical, model.num_experts), top_k)
        stages = parallel.pp_group.all_gather_object(part) if parallel.pp_size > 1 else [part]
        self._moe_layers: list[int] = []
        for rank, (layers, _, _) in enumerate(stages):
            before, self._moe_layers = len(self._moe_layers), _followed(self._moe_layers, layers)
            if rank == parallel.pp_rank:
                self._rows = range(before, len(self._moe_layers))
                for layer, number in zip(model.layers, self._moe_layers[before:], strict=True):
                    layer.layer_id = number
        self.num_experts = max(experts for _, (experts, _), _ in stages)
        """Routed experts of a layer in the checkpoint."""
        self.redundant = max(places for _, (_, places), _ in stages) - self.num_experts
        self._layers = model.layers
        self.top_k = max((k for _, _, k in stages if k), default=None)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The decoder layers with a router, in order."""
        return tuple(self._moe_layers)

    def routed_model(self, name: str, architecture: str) -> RoutedModel:
        """The identity of this model in profiles."""
        return RoutedModel(name, architecture, self.moe_layers, self.num_experts, self.top_k)

    def check(self, placement: InitialPlacement, model: RoutedModel) -> None:
        """Raise ``FlagError`` if N, the ids or the profile do not fit the built layers and experts."""
        config, profile = placement.config, placement.profile
        if not self.moe_layers:
            raise FlagError([f"{flag_name('num_resident')} {config.num_resident}: the model was built without a MoE layer"])
        problems = expert_problems(config.resident_ids, config.num_resident, config.slots, self.num_experts, self.redundant)
        if config.resident_ids is not None:
            problems += config.resident_ids.layer_problems(self.moe_layers)
            if self.redundant and not problems:
                problems += self._replica_problems(config, config.resident_ids)
        if profile is not None and (different := model.differences(profile.model)):
            files = ",".join(map(str, config.profiles))
            problems.append(f"{flag_name('profile')} {files}: is of another model: {'; '.join(different)}")
        if problems:
            raise FlagError(problems)

    def _replica_problems(self, config: OffloadConfig, chosen: ResidentIds) -> list[str]:
        """Why the named experts of this stage, with all their replicas, exceed N per layer."""
        named = sum(
            int(np.isin(layer.location.experts, list(chosen.of_layer(row))).sum())
            for row, layer in zip(self._rows, self._layers, strict=True)
        )
        allowed = config.num_resident * len(self._layers)
        if named <= allowed:
            return []
        return [
            f"{flag_name('resident_ids')} {chosen.text!r}: names {named} experts over {len(self._layers)} layers, including "
            f"replicas (--ep-num-redundant-experts), but {flag_name('num_resident')} {config.num_resident} allows {allowed}"
        ]
