"""Hooks on SGLang's ``FusedMoE``: they allocate its experts in managed memory and observe its routing.

The layer's quantisation method stays the same object, because SGLang checks its class in many places. The hooks shadow three of
its methods on the instance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher
from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.experts.layer import ExpertLayer, ExpertsLost
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.memory.protocol import ManagedMemoryError
from sglang_uvm_offload.plugin import enforce
from sglang_uvm_offload.plugin.compat import moe_runner_backend
from sglang_uvm_offload.plugin.rank.expert_map import shard_of
from sglang_uvm_offload.plugin.rank.recording import Recording
from sglang_uvm_offload.plugin.rank.start_clock import StartPhase
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import IdFormat
from sglang_uvm_offload.routing.layer_routing import LayerRouting
from sglang_uvm_offload.streaming.model_slots import ModelSlots
from sglang_uvm_offload.streaming.streamer import Reading, Streamer

_EXPERTS = "_expert_offload_layer"
_HOOKED = "_expert_offload_hooked"
_BUILDING = "_expert_offload_building"
_UNREAD = ("w13_blockscale_swizzled", "w2_blockscale_swizzled")
"""NVFP4 scales in FlashInfer's layout, which SGLang allocates in every layer."""
_FUSED_MOE = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"


class LayerHooks:
    """Takes over every routed MoE layer that is built inside ``taking_over``."""

    def __init__(
        self,
        counting: Mapping[str, str],
        recording: Recording | None = None,
        compiled: bool = False,
        timing: Callable[[StartPhase], AbstractContextManager[None]] = lambda phase: nullcontext(),
    ):
        self.timing = timing
        """Called around each startup phase that runs in these hooks."""
        self.counting = counting
        """The flags that need counted routing, each with what to use instead."""
        self.compiled = compiled
        """Whether ``torch.compile`` traces the model's decode steps."""
        self.recording = recording
        self.top_k = 0
        """The largest top-k of the target's layers, without shared experts; 0 if they have no such attribute (OLMoE)."""
        self._into: tuple[OffloadManager, ModelExperts] | None = None
        self._manager: OffloadManager | None = None
        self.streamer: Streamer | None = None
        """The streamer of the loaded target; None if nothing streams."""
        self.slots: ModelSlots | None = None
        """The slots of the loaded target; None if no layer has any."""
        self.uncounted: set[str] = set()
        """Routing formats without expert ids, which were served but not counted."""

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(f"{_FUSED_MOE}.__init__", self._around_init, HookType.AROUND)
        add(f"{_FUSED_MOE}.__setattr__", self._around_setattr, HookType.AROUND)

    @contextmanager
    def taking_over(self, manager: OffloadManager, model: ModelExperts) -> Iterator[None]:
        self._into, self._manager = (manager, model), manager
        try:
            yield
        finally:
            self._into = None

    @contextmanager
    def leaving_alone(self) -> Iterator[None]:
        """Ignore layers built in this block, which do not belong to the served model."""
        into, self._into = self._into, None
        try:
            yield
        finally:
            self._into = into

    def storage_written(self, storage: torch.UntypedStorage) -> None:
        """Something was written to ``storage``, perhaps while a model is being built."""
        if self._into is not None and storage.nbytes() >= PAGE_BYTES:
            for experts in self._into[1].layers:
                experts.storage_written(storage)

    def serves(self, layer: torch.nn.Module) -> bool:
        """Whether the layer's experts were taken over."""
        return _EXPERTS in layer.__dict__

    def _around_init(self, original: Callable[..., None], layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if self._into is None or layer.is_shared_fused_moe:
            original(layer, *args, **kwargs)
            return
        layer.__dict__[_BUILDING] = True
        try:
            original(layer, *args, **kwargs)
        finally:
            del layer.__dict__[_BUILDING]
        if _free_unread(layer):
            layer.__dict__[_EXPERTS][0].sync_tensors(layer, layer.quant_method)

    def _around_setattr(self, original: Callable[..., None], layer: torch.nn.Module, name: str, value: Any) -> None:
        original(layer, name, value)
        if name == "quant_method" and value is not None and _BUILDING in layer.__dict__:
            self._shadow(value)

    def _shadow(self, method: Any) -> None:
        if _HOOKED in method.__dict__:
            return
        create_weights = method.create_weights
        process_weights_after_loading = method.process_weights_after_loading
        apply = method.apply

        def create_managed_weights(layer: torch.nn.Module, num_experts: int, *args: Any, **kwargs: Any) -> None:
            experts = self._add(layer)
            assert num_experts == experts.num_experts, (num_experts, experts.num_experts)
            with self.timing(StartPhase.PLACE):
                with AllocationMode(num_experts, partial(experts.allocate, written_later=True), experts.write):
                    create_weights(layer, num_experts, *args, **kwargs)
                experts.sync_tensors(layer, method)

        def process_managed_weights(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            experts, model, _ = layer.__dict__[_EXPERTS]
            if self._manager is not None:
                self._manager.wait_for_moves()  # a weight update may replace tensors that are being moved
            try:
                with self.timing(StartPhase.CONVERT):
                    with AllocationMode(experts.num_experts, experts.allocate, experts.write):
                        result = process_weights_after_loading(layer, *args, **kwargs)
                    if experts.num_slots:
                        experts.join_pool(partial(model.pool_for, experts))
                    experts.sync_tensors(layer, method)
            except (ExpertsLost, ManagedMemoryError) as fault:
                if model.counters is not None:  # already loaded, so this is a weight update
                    # SGLang would catch the error, load again, and serve whatever weights result.
                    enforce.end(f"sglang-uvm-offload: a weight update failed: {fault}")
                if isinstance(fault, ManagedMemoryError):
                    raise
                raise FlagError([f"{flag_name('num_resident')}: {fault}; use another --moe-runner-backend"]) from fault
            return result

        def apply_and_observe(layer: torch.nn.Module, dispatch_output: Any, *args: Any, **kwargs: Any) -> Any:
            reading = self._enter(layer)
            routing = self.observe(layer, dispatch_output, in_place=reading is None)
            if not isinstance(reading, Reading):
                with self._looking_ahead(layer, routing, dispatch_output):
                    return apply(layer, dispatch_output, *args, **kwargs)
            assert self.streamer is not None
            failed = True
            try:
                result = apply(layer, dispatch_output, *args, **kwargs)
                failed = False
                return result
            finally:
                self.streamer.leave(reading, failed)

        if self.compiled:
            # Traced code calls this hook untraced, and the layer keeps its own kernel at every batch size: at batch 1, SGLang
            # would let PyTorch gather the experts of each token into a copy.
            apply_and_observe = torch.compiler.disable(apply_and_observe)
            method.__dict__["enter_torch_compile"] = lambda num_tokens: None
        method.__dict__[_HOOKED] = True
        method.__dict__["create_weights"] = create_managed_weights
        method.__dict__["process_weights_after_loading"] = process_managed_weights
        method.__dict__["apply"] = apply_and_observe

    def _add(self, layer: Any) -> ExpertLayer:
        assert self._into is not None, "a MoE layer outside a model"
        manager, model = self._into
        index = len(model.layers)
        experts = model.add_layer(manager.memory, shard_of(layer))
        layer.__dict__[_EXPERTS] = (experts, model, index)
        if not model.draft and layer.top_k is not None:
            self.top_k = max(self.top_k, layer.top_k - layer.num_fused_shared_experts)
        return experts

    def _enter(self, layer: torch.nn.Module) -> Reading | str | None:
        """``Streamer.enter`` for a layer of the target; None for a draft's layers or without a streamer."""
        if self.streamer is None:
            return None
        _, model, index = layer.__dict__[_EXPERTS]
        return None if model.draft else self.streamer.enter(index)

    @contextmanager
    def _looking_ahead(self, layer: Any, routing: LayerRouting | None, dispatch_output: Any) -> Iterator[None]:
        if self.slots is None or not self.slots.looks_ahead or layer.__dict__[_EXPERTS][1].draft:
            yield
            return
        index = layer.__dict__[_EXPERTS][2]
        as_routed = routing is not None and routing.lasting
        self.slots.begin_layer(getattr(dispatch_output, "hidden_states", None) if as_routed else None)
        try:
            yield
        finally:
            self.slots.end_layer(index)

    def observe(self, layer: Any, dispatch_output: Any, *, in_place: bool = True) -> LayerRouting | None:
        """Count the routing of the layer's next forward, which reads its experts ``in_place`` or streams them, and record it in
        the trace if there is one. Returns the routing; None if nothing is counted."""
        experts, model, index = layer.__dict__[_EXPERTS]
        if model.counters is None:
            return None
        routing = _routing_of(layer, dispatch_output, experts)
        if not routing.count(model.counters, index, in_place=in_place):
            self._not_counted(routing.form, model.draft)
        if self.recording is not None and not model.draft:
            hidden = getattr(dispatch_output, "hidden_states", None)
            self.recording.record(index, routing, layer.num_fused_shared_experts, hidden)
        return routing

    def _not_counted(self, form: str, draft: bool) -> None:
        """Refuse uncountable routing that ``built_runners`` did not find in the built model. A draft model passes: all of its
        experts are resident."""
        if self.counting and not draft:
            raise FlagError(
                [
                    f"{flag}: this MoE runner routes inside its kernel ({form}) and exposes no expert ids to count; use "
                    f"another --moe-runner-backend, or {instead}"
                    for flag, instead in self.counting.items()
                ]
            )
        self.uncounted.add(form)


def _routing_of(layer: Any, dispatch_output: Any, experts: ExpertLayer) -> LayerRouting:
    """The routing in a dispatcher's output. A dispatcher with a top-k output keeps tokens as the router saw them. One without
    (DeepEP) has exchanged them; in low-latency mode, the ids are still those that this rank sent."""
    shown = getattr(dispatch_output, "topk_output", None) or dispatch_output
    ids, id_format = getattr(shown, "topk_ids", None), IdFormat.PLAIN
    if ids is None:
        ids, id_format = getattr(shown, "packed_topk_ids", None), IdFormat.PACKED
    received = getattr(shown, "masked_m", None)
    if received is None and (ragged := getattr(shown, "a_ragged_metadata", None)) is not None:
        received = ragged.slice_sizes
    own_numbering = getattr(layer.dispatcher, "skip_local_expert_mapping", False)
    # Other dispatchers reuse their buffers; the next layer overwrites the ids.
    lasting = isinstance(layer.dispatcher, StandardDispatcher)
    first = experts.first_expert if own_numbering else 0
    return LayerRouting(type(shown).__name__, ids, id_format, first, received, lasting)


def _free_unread(layer: Any) -> bool:
    """Free ``_UNREAD`` in a layer that Marlin computes: one byte per 16 4-bit weights, never written. Returns whether any
    existed."""
    names = [name for name in _UNREAD if getattr(layer, name, None) is not None]
    backend = moe_runner_backend(layer) if names else None
    if backend is None or not backend.is_marlin():
        return False
    for name in names:
        delattr(layer, name)
    return True
