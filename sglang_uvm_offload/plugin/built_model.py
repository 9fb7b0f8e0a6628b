"""The target model as it was built, and whether the ids and profiles for its layers fit it.

Which layers route is only a guess from the config: a model family may have rules of its own. The built layers are the truth.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.runtime_context import get_parallel

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.placement import InitialPlacement
from sglang_uvm_offload.routing.profile import RoutedModel
from sglang_uvm_offload.sizing.moe_shape import moe_shape


def layers_before(config: OffloadConfig, text_config: Any) -> int:
    """The number of MoE layers in earlier pipeline stages, for ids that are listed by layer. It follows the config's rules, so
    ``BuiltModel.check`` verifies it against the built model."""
    parallel = get_parallel()
    if parallel.pp_rank == 0 or config.resident_ids is None or config.resident_ids.per_layer is None:
        return 0
    shape = moe_shape(text_config)
    start, _ = get_pp_indices(text_config.num_hidden_layers, parallel.pp_rank, parallel.pp_size)
    return sum(layer < start for layer in shape.moe_layers) if shape is not None else 0


class BuiltModel:
    """The MoE layers of all pipeline stages. Every rank of a pipeline must construct it at the same point."""

    def __init__(self, model: ModelExperts, top_k: int | None):
        """``top_k``: the most routed experts per token of a layer on this rank, None if unknown."""
        parallel = get_parallel()
        part = ([layer.layer_id for layer in model.layers], model.num_experts, top_k)
        stages = parallel.pp_group.all_gather_object(part) if parallel.pp_size > 1 else [part]
        self.stages: list[list[int]] = [layers for layers, _, _ in stages]
        self.num_experts = max(experts for _, experts, _ in stages)
        self.top_k = max((k for _, _, k in stages if k), default=None)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The decoder layers with a router, in order."""
        return tuple(layer for stage in self.stages for layer in stage)

    def routed_model(self, name: str, architecture: str) -> RoutedModel:
        """The identity of this model in profiles."""
        return RoutedModel(name, architecture, self.moe_layers, self.num_experts, self.top_k)

    def check(self, placement: InitialPlacement, model: RoutedModel) -> None:
        """Raise ``FlagError`` if the ids or the profile are for other layers than the built ones."""
        ids, profile = placement.config.resident_ids, placement.profile
        problems = []
        if ids is not None and ids.per_layer is not None:
            before = sum(len(stage) for stage in self.stages[: get_parallel().pp_rank])
            if len(ids.per_layer) != len(self.moe_layers) or placement.layers_before != before:
                problems.append(
                    f"{flag_name('resident_ids')}: lists {len(ids.per_layer)} layers, but the model has {len(self.moe_layers)} "
                    f"MoE layers: {', '.join(map(str, self.moe_layers))}"
                )
        if profile is not None and (different := model.differences(profile.model)):
            problems.append(f"{flag_name('profile')}: is of another model: {'; '.join(different)}")
        if problems:
            raise FlagError(problems)
