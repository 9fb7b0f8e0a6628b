"""LoRA adapters of routed experts. SGLang wraps such a layer and bypasses its quantisation method's ``apply``, the hook that
counts routing and starts streaming. Adapters of other modules do not affect MoE layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.plugin.rank.fused_moe import LayerHooks

logger = logging.getLogger(__name__)

_WRAPPER = "sglang.srt.lora.layers.FusedMoEWithLoRA"
_RUNNERS = ("_lora_runner", "_moe_lora_runner")
"""The wrapper's attribute (one of these) that holds the runner, which computes the layer from the dispatched tokens."""


class ExpertAdapters:
    """Counts the routing of layers with adapters. Such layers always read their experts in place: SGLang records their tensor
    addresses once, and its LoRA kernels do not support slots."""

    def __init__(self, layers: LayerHooks):
        self._layers = layers

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(f"{_WRAPPER}.__init__", self._after_init, HookType.AFTER)

    def _after_init(self, result: Any, wrapper: Any, base_layer: Any, *args: Any, **kwargs: Any) -> None:
        if not self._layers.serves(base_layer):
            return
        self._read_in_place()
        for name in _RUNNERS:
            runner = wrapper.__dict__.get(name)
            if runner is not None:
                self._count(runner, base_layer)

    def _read_in_place(self) -> None:
        if self._layers.streamer is not None or self._layers.slots is not None:
            logger.warning(
                "Expert offload: experts with LoRA adapters are read in place: steps do not stream, and slots are unused"
            )
        self._layers.streamer = self._layers.slots = None

    def _count(self, runner: Any, layer: Any) -> None:
        run = runner.run

        def count_and_run(dispatch_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._layers.observe(layer, dispatch_output, in_place=True)
            return run(dispatch_output, *args, **kwargs)

        runner.run = count_and_run
