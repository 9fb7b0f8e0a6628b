"""SGLang's physical-to-logical expert map: read for the built layers, and reread whenever SGLang rearranges experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
from sglang.srt.runtime_context import get_device, get_parallel

from sglang_uvm_offload.expert_location import ExpertLocation
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.plugin import compat
from sglang_uvm_offload.residency.rearranging import Rearranging

UPDATER = "sglang.srt.eplb.expert_location_updater.ExpertLocationUpdater.update"
"""SGLang's function that copies rows of expert tensors within and between ranks, then updates the map."""


def shard_of(layer: Any) -> LayerShard:
    """This rank's shard of a ``FusedMoE`` layer, including the location of its routed experts."""
    shard = LayerShard(
        layer.layer_id, layer.num_local_experts, layer.num_fused_shared_experts, layer.moe_ep_rank, layer.moe_ep_size
    )
    if not compat.uses_expert_location(layer) or get_global_expert_location_metadata() is None:
        return shard
    return replace(shard, location=ExpertLocation(_experts_at(layer.layer_id), shard.places))


def _experts_at(layer_id: int) -> np.ndarray:
    """The layer's row of the map, which has one per decoder layer. A copy, because SGLang updates the map in place."""
    at: torch.Tensor = get_global_expert_location_metadata().physical_to_logical_map_cpu[layer_id]
    return at.numpy().astype(np.int64)


def around_update(rearranging: Rearranging, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hook on SGLang's rearranging of experts, which runs after a step of the target on all ranks at once."""
    rearranging.begin()
    result = update(*args, **kwargs)
    if get_device().device == "cuda":
        torch.cuda.current_stream().synchronize()  # SGLang's writes must finish before experts move again
    locations = [
        ExpertLocation(_experts_at(layer.layer_id), layer.location.places) for layer in rearranging.manager.target.layers
    ]
    rearranging.end(locations, get_parallel().moe_ep_group.all_gather_object)
    return result
