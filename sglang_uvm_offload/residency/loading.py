"""A rank's models while they load: their MoE layers are placed one by one, as SGLang builds them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.host_pages import mean_stretch
from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.mover import layer_bar
from sglang_uvm_offload.residency.placement import EVERYTHING, InitialPlacement, LayerPlacement
from sglang_uvm_offload.residency.selection import rank_share

logger = logging.getLogger(__name__)

SAMPLED_BLOCKS = 256
"""At most so many blocks of offloaded experts are looked up: a few milliseconds."""


class Loading:
    """One model after the other: ``begin``, ``add_layer`` for each MoE layer, ``end``."""

    def __init__(self, config: OffloadConfig, memory: Memory, progress: Callable[[], bool]):
        """``progress``: whether this rank shows progress bars."""
        self.config = config
        self.memory = memory
        self.progress = progress
        self.models: list[ModelExperts] = []
        self.placement = InitialPlacement(config, None)
        """The first residents of the target model."""
        self._place: Callable[[LayerShard], LayerPlacement] = self.placement.of_layer
        """Of the model that is being built."""

    def begin(self, draft: bool, placement: InitialPlacement | None) -> ModelExperts:
        model = ModelExperts(draft)
        self.models.append(model)
        if draft:
            self._place = self._placement_of_draft()
        else:
            self.placement = placement or InitialPlacement(self.config, None)
            self._place = self.placement.of_layer
        self._bar = layer_bar("Placing experts", None, self.progress())
        return model

    def _placement_of_draft(self) -> Callable[[LayerShard], LayerPlacement]:
        """The first experts, as many as the draft flag keeps resident."""
        number = self.config.draft_num_resident
        if number is None:
            return lambda shard: EVERYTHING
        return InitialPlacement(dataclasses.replace(self.config, num_resident=number, resident_ids=None), None).of_layer

    def add_layer(self, model: ModelExperts, shard: LayerShard) -> ExpertLayer:
        placement = self._place(shard)
        slots = 0 if model.draft else self._slots_of_rank(shard)
        layer = ExpertLayer(self.memory, shard, placement.choose, placement.kept, num_slots=slots)
        model.layers.append(layer)
        model.num_experts = max(model.num_experts, shard.num_places)
        self._bar.update()
        return layer

    def _slots_of_rank(self, shard: LayerShard) -> int:
        """None where nothing is offloaded."""
        if self.config.num_resident >= shard.num_places:
            return 0
        return rank_share(self.config.slots, shard.ep_rank, shard.ep_size)

    def end(self, model: ModelExperts, may_be_empty: bool) -> None:
        """The model is loaded. Raises ``FlagError`` if it has nothing to offload, unless it ``may_be_empty``."""
        self._bar.close()
        layers = model.layers
        if not (model.draft or any(layer.tensors for layer in layers) or (may_be_empty and not layers)):
            found = "no MoE layer" if not layers else f"{len(layers)} MoE layers, none with experts large enough to place"
            raise FlagError([f"{flag_name('num_resident')} {self.config.num_resident}: the model has {found}"])
        if not model.draft and self.memory.device_type != "cpu" and self.progress():
            _tell_stretches(layers)


def _tell_stretches(layers: Sequence[ExpertLayer]) -> None:
    blocks = np.array([block for layer in layers for tensor in layer.tensors for block in tensor.offloaded_blocks()])
    if not blocks.size:
        return
    mean = mean_stretch(blocks[:: -(-blocks.size // SAMPLED_BLOCKS)].tolist())
    if mean is None:
        logger.info("Expert offload: the kernel does not show this process how long the stretches of its host pages are")
    else:
        logger.info("Expert offload: offloaded experts lie in physical stretches of %.0f KiB on average", mean / 1024)
