"""Hooks on SGLang's ``FusedMoE``: its experts' memory, and the routing it computes with.

The layer's quantisation method stays the object it is (SGLang asks for its class in many places); three of its methods are
shadowed in the instance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.config import FlagError, flag_name
from sglang_uvm_offload.expert_layer import ExpertLayer, ExpertsLost
from sglang_uvm_offload.manager import ModelExperts, OffloadManager
from sglang_uvm_offload.plugin.recording import Recording
from sglang_uvm_offload.routing import IdFormat
from sglang_uvm_offload.takeover import AllocationMode

_EXPERTS = "_expert_offload"
_BUILDING = "_expert_offload_building"
_FUSED_MOE = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"


class LayerHooks:
    """Takes over every routed MoE layer that is built while ``taking_over``."""

    def __init__(self, count_required: bool, recording: Recording | None = None):
        self.count_required = count_required
        self.recording = recording
        self.top_k = 0
        """The most routed experts that a layer of the target model picks for a token; found where there is recording."""
        self._into: tuple[OffloadManager, ModelExperts] | None = None
        self.uncounted: set[str] = set()
        """Forms of routing that show no expert ids; they were served, but not counted."""

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(f"{_FUSED_MOE}.__init__", self._around_init, HookType.AROUND)
        add(f"{_FUSED_MOE}.__setattr__", self._around_setattr, HookType.AROUND)

    @contextmanager
    def taking_over(self, manager: OffloadManager, model: ModelExperts) -> Iterator[None]:
        self._into = (manager, model)
        try:
            yield
        finally:
            self._into = None

    def _around_init(self, original: Callable[..., None], layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if self._into is None or layer.is_shared_fused_moe:
            original(layer, *args, **kwargs)
            return
        layer.__dict__[_BUILDING] = True
        try:
            original(layer, *args, **kwargs)
        finally:
            del layer.__dict__[_BUILDING]

    def _around_setattr(self, original: Callable[..., None], layer: torch.nn.Module, name: str, value: Any) -> None:
        original(layer, name, value)
        if name == "quant_method" and value is not None and _BUILDING in layer.__dict__:
            self._shadow(value)

    def _shadow(self, method: Any) -> None:
        if _EXPERTS in method.__dict__:
            return
        create_weights = method.create_weights
        process_weights_after_loading = method.process_weights_after_loading
        apply = method.apply
        count = self._count if self.recording is None else self._count_and_record

        def create_managed_weights(layer: torch.nn.Module, num_experts: int, *args: Any, **kwargs: Any) -> None:
            experts = self._add(layer)
            assert num_experts == experts.num_experts, (num_experts, experts.num_experts)
            with AllocationMode(num_experts, experts.allocate):
                create_weights(layer, num_experts, *args, **kwargs)
            experts.settle(layer, method)

        def process_managed_weights(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            experts = _experts_of(layer)
            with AllocationMode(experts.num_experts, experts.allocate):
                result = process_weights_after_loading(layer, *args, **kwargs)
            try:
                experts.settle(layer, method)
            except ExpertsLost as lost:
                raise FlagError([f"{flag_name('num_resident')}: {lost}; choose another --moe-runner-backend"]) from lost
            return result

        def apply_and_count(layer: torch.nn.Module, dispatch_output: Any, *args: Any, **kwargs: Any) -> Any:
            count(layer, dispatch_output)
            return apply(layer, dispatch_output, *args, **kwargs)

        method.__dict__[_EXPERTS] = True
        method.__dict__["create_weights"] = create_managed_weights
        method.__dict__["process_weights_after_loading"] = process_managed_weights
        method.__dict__["apply"] = apply_and_count

    def _add(self, layer: Any) -> ExpertLayer:
        assert self._into is not None, "a MoE layer outside a model"
        manager, model = self._into
        row = len(model.layers)
        experts = manager.add_layer(
            model,
            layer.layer_id,
            layer.num_local_experts,
            layer.num_fused_shared_experts,
            layer.moe_ep_rank,
            layer.moe_ep_size,
        )
        layer.__dict__[_EXPERTS] = (experts, model, row)
        if self.recording is not None and not model.draft:
            self.top_k = max(self.top_k, layer.top_k - layer.num_fused_shared_experts)
        return experts

    def _count(self, layer: Any, dispatch_output: Any) -> None:
        experts, model, row = layer.__dict__[_EXPERTS]
        counters = model.counters
        if counters is None:
            return
        # A dispatcher with a top-k output hands tokens over as the router saw them; one without (DeepEP) has exchanged them,
        # and in its low-latency form its ids are still those that this rank sent: only the received counts are its experts'.
        routing = _routing_of(dispatch_output)
        received = getattr(routing, "masked_m", None)
        ragged = getattr(routing, "a_ragged_metadata", None)
        ids = getattr(routing, "topk_ids", None)
        packed = getattr(routing, "packed_topk_ids", None)
        if received is not None:
            counters.count_histogram(row, received)
        elif ragged is not None:
            counters.count_histogram(row, ragged.slice_sizes)
        elif ids is not None:
            counters.count(row, ids, self._id_of_first_expert(layer, experts), IdFormat.PLAIN)
        elif packed is not None:
            counters.count(row, packed, self._id_of_first_expert(layer, experts), IdFormat.PACKED)
        else:
            self._not_counted(type(routing).__name__)

    def _count_and_record(self, layer: Any, dispatch_output: Any) -> None:
        self._count(layer, dispatch_output)
        _, model, row = layer.__dict__[_EXPERTS]
        if self.recording is not None and not model.draft:
            self.recording.record(row, _routing_of(dispatch_output), layer.num_fused_shared_experts)

    def _id_of_first_expert(self, layer: Any, experts: ExpertLayer) -> int:
        """Expert-parallel ids are local, but for runners that keep the model's own numbering."""
        return experts.first_expert if getattr(layer.dispatcher, "skip_local_expert_mapping", False) else 0

    def _not_counted(self, form: str) -> None:
        if self.count_required:
            raise FlagError(
                [
                    f"{flag_name('resident_selection')} frequency: this MoE runner routes inside its kernel ({form}) and shows "
                    "no expert ids to count; choose first_n or manual, or another --moe-runner-backend"
                ]
            )
        self.uncounted.add(form)


def _routing_of(dispatch_output: Any) -> Any:
    return getattr(dispatch_output, "topk_output", None) or dispatch_output


def _experts_of(layer: torch.nn.Module) -> ExpertLayer:
    return layer.__dict__[_EXPERTS][0]
