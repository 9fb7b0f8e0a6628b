"""A rank's models while they load: their MoE layers are placed one by one, as SGLang builds them, or once all are built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from sglang_uvm_offload.config import OffloadConfig, Settings
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.mover import layer_bar
from sglang_uvm_offload.residency.placement import EVERYTHING, InitialPlacement, LayerPlacement
from sglang_uvm_offload.residency.selection import rank_share


class Loading:
    """One model after the other: ``begin``, ``add_layer`` for each MoE layer, ``place`` where it was not done layer by layer,
    ``end``."""

    def __init__(self, config: Settings, memory: Memory, progress: Callable[[], bool]):
        """``progress``: whether this rank shows progress bars."""
        self._settings = config
        self.memory = memory
        self.progress = progress
        self.models: list[ModelExperts] = []
        self.placement: InitialPlacement
        """The first residents of the target model, once they are decided."""
        self._place: Callable[[LayerShard], LayerPlacement] | None
        """Of the model that is being built; None until ``place``."""
        self._most_slots: int | None = 0

    def reserve(self, draft: bool, most_slots: int | None) -> ModelExperts:
        """Begin a model whose layers are address space until ``place``. ``most_slots``: of a layer, over all ranks that share
        it; None for as many as experts."""
        self._place, self._most_slots = None, most_slots
        return self._begun(draft)

    def place(self, model: ModelExperts, placement: InitialPlacement | None) -> None:
        """``placement``: of the target model; None for a draft model."""
        if placement is not None:
            self.placement = placement
        of_layer = self._placement_of_draft() if placement is None else placement.of_layer
        for layer in model.layers:
            chosen = of_layer(_shard(layer))
            layer.place(chosen.choose, chosen.kept, 0 if model.draft else self._slots_of_rank(layer.shard))
            self._bar.update()

    def replace(self, num_resident: int) -> list[tuple[ExpertLayer, np.ndarray]]:
        """What each layer of the target keeps in VRAM (``bool[extents]``) with another number of residents."""
        self.placement = self.placement.with_residents(num_resident)
        layers = next(model for model in self.models if not model.draft).layers
        return [(layer, layer.replace(self.placement.of_layer(_shard(layer)).choose)) for layer in layers]

    def begin(self, draft: bool, placement: InitialPlacement | None) -> ModelExperts:
        if draft:
            self._place = self._placement_of_draft()
        else:
            if placement is None:
                assert isinstance(self._settings, OffloadConfig), "residents are not decided"
                placement = InitialPlacement(self._settings, None)
            self.placement, self._place = placement, placement.of_layer
        return self._begun(draft)

    def _begun(self, draft: bool) -> ModelExperts:
        model = ModelExperts(draft)
        self.models.append(model)
        self._bar = layer_bar("Placing experts", None, self.progress())
        return model

    def _placement_of_draft(self) -> Callable[[LayerShard], LayerPlacement]:
        """The first experts, as many as the draft flag keeps resident."""
        number = self._settings.draft_num_resident
        if number is None:
            return lambda shard: EVERYTHING
        config = dataclasses.replace(self.placement.config, num_resident=number, resident_ids=None)
        return InitialPlacement(config, None).of_layer

    def add_layer(self, model: ModelExperts, shard: LayerShard) -> ExpertLayer:
        if self._place is None:
            most = shard.routed if self._most_slots is None else rank_share(self._most_slots, shard.ep_rank, shard.ep_size)
            layer = ExpertLayer(self.memory, shard, None, reserved_slots=0 if model.draft else most)
        else:
            placement = self._place(shard)
            slots = 0 if model.draft else self._slots_of_rank(shard)
            layer = ExpertLayer(self.memory, shard, placement.choose, placement.kept, num_slots=slots)
            self._bar.update()
        model.layers.append(layer)
        model.num_experts = max(model.num_experts, shard.num_places)
        return layer

    def _slots_of_rank(self, shard: LayerShard) -> int:
        """None where nothing is offloaded."""
        if self.placement.config.num_resident >= shard.num_places:
            return 0
        return rank_share(self.placement.config.slots, shard.ep_rank, shard.ep_size)

    def end(self, model: ModelExperts, may_be_empty: bool) -> None:
        """The model is loaded. Raises ``FlagError`` if it has nothing to offload, unless it ``may_be_empty``."""
        self._bar.close()
        layers = model.layers
        if not (model.draft or any(layer.tensors for layer in layers) or (may_be_empty and not layers)):
            found = "no MoE layer" if not layers else f"{len(layers)} MoE layers, none with experts large enough to place"
            raise FlagError([f"{flag_name('num_resident')} {self.placement.config.num_resident}: the model has {found}"])


def _shard(layer: ExpertLayer) -> LayerShard:
    """With the layer's id in the whole model."""
    return dataclasses.replace(layer.shard, layer_id=layer.layer_id)
