"""What the target model turned out to be once it was built, and whether the files that name its layers fit it.

A config's rules for which layers route are a guess where a family has rules of its own. The layers that were built are not.
"""

from __future__ import annotations

from sglang.srt.runtime_context import get_parallel

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.placement import InitialPlacement, ids_from
from sglang_uvm_offload.routing.profile import RoutedModel


class EarlierStages:
    """The MoE layers that earlier pipeline stages built. Each stage tells the next, which waits for it before it places its
    first layer; only where ids by layer or a profile are asked for, so that stages otherwise are built at the same time."""

    def __init__(self, config: OffloadConfig):
        ids, parallel = config.resident_ids, get_parallel()
        self._told = parallel.pp_size > 1 and (bool(config.profiles) or (ids is not None and ids.per_layer is not None))
        self._layers: list[int] | None = None if self._told and parallel.pp_rank > 0 else []

    def layers(self) -> list[int]:
        """Waits until the stage before is built."""
        if self._layers is None:
            parallel = get_parallel()
            self._layers = parallel.pp_group.recv_object(src=parallel.pp_rank - 1)
        return self._layers

    def tell_next(self, own: list[int]) -> None:
        """This stage is built, with layers that say they are ``own``."""
        parallel = get_parallel()
        if self._told and parallel.pp_rank + 1 < parallel.pp_size:
            parallel.pp_group.send_object(_followed(self.layers(), own), dst=parallel.pp_rank + 1)


def _followed(earlier: list[int], own: list[int]) -> list[int]:
    return earlier + [ids_from(earlier, own[0]) + layer for layer in own]


class BuiltModel:
    """The MoE layers of all pipeline stages. Every rank of a pipeline must make it at the same point."""

    def __init__(self, model: ModelExperts, top_k: int | None):
        """``top_k``: the most routed experts that a layer of this rank picks for a token, None where nobody says. Gives the
        layers of ``model`` the numbers that they have in the whole model."""
        parallel = get_parallel()
        part = ([layer.layer_id for layer in model.layers], model.num_experts, top_k)
        stages = parallel.pp_group.all_gather_object(part) if parallel.pp_size > 1 else [part]
        self._moe_layers: list[int] = []
        for rank, (layers, _, _) in enumerate(stages):
            before, self._moe_layers = len(self._moe_layers), _followed(self._moe_layers, layers)
            if rank == parallel.pp_rank:
                for layer, number in zip(model.layers, self._moe_layers[before:], strict=True):
                    layer.layer_id = number
        self.num_experts = max(experts for _, experts, _ in stages)
        self.top_k = max((k for _, _, k in stages if k), default=None)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The decoder layers that route, in order."""
        return tuple(self._moe_layers)

    def routed_model(self, name: str, architecture: str) -> RoutedModel:
        """What profiles of this model say that they are of."""
        return RoutedModel(name, architecture, self.moe_layers, self.num_experts, self.top_k)

    def check(self, placement: InitialPlacement, model: RoutedModel) -> None:
        """Raise ``FlagError`` where N, ids or a profile do not fit the layers and experts that were built."""
        config, profile = placement.config, placement.profile
        if not self.moe_layers:
            return
        problems = config.expert_problems(self.num_experts)
        if config.resident_ids is not None:
            problems += config.resident_ids.layer_problems(self.moe_layers)
        if profile is not None and (different := model.differences(profile.model)):
            problems.append(f"{flag_name('profile')}: is of another model: {'; '.join(different)}")
        if problems:
            raise FlagError(problems)
