"""Builds one of SGLang's architectures with the plugin's hooks on, and accounts for every byte of its experts. In a process of
its own, in which SGLang is imported: ``python -c "from architectures.build import main; main('Glm4MoeForCausalLM')"``."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from architectures.tiny import EXPERTS, TINY, USUAL, text_config, tiny_config
from builders.configs import served_config
from sglang.srt.distributed.bootstrap import init_parallel_runtime
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.platforms import current_platform
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import SpawnRanks, get_model, publish
from sglang.srt.server_args import ServerArgs
from transformers import PretrainedConfig

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.plan.moe_shape import stated_experts, stated_top_k
from sglang_uvm_offload.plugin.meta.tensors import counted_layer
from sglang_uvm_offload.plugin.rank.fused_moe import LayerHooks
from sglang_uvm_offload.plugin.since import VERSION
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.placement import InitialPlacement

Result = TypeVar("Result")


@dataclass
class Built:
    """A model with ``experts`` routed experts a layer. Tensors by name, in bytes."""

    experts: int
    stated: tuple[int | None, int | None]
    """The experts of a layer, and those of a token, that the launch reads from the config."""
    managed: list[dict[str, Any]]
    """One entry for each layer that was taken over."""
    modules: dict[str, dict[str, Any]]
    """SGLang's routed layers, by name."""
    outside: dict[str, list[int]]
    """The shapes of all tensors outside of these layers."""
    planned: dict[str, Any]
    """What ``plan`` takes from the model, as one layer."""


def start() -> None:
    """SGLang's runtime of a single rank, as of a scheduler on a CPU that serves some model."""
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config("Qwen3MoeForCausalLM", EXPERTS).to_dict()
        Path(folder, "config.json").write_text(json.dumps(config))
        arguments = ServerArgs(model_path=folder, device="cpu", attention_backend="torch_native", mem_fraction_static=0.3)
        arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    initialize_moe_config()
    # Attention plays no part here, and not every model's is made for a CPU.
    factory.get_rope_cpu = lambda *arguments: factory.get_rope(*arguments[:8])
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[return-value]
    torch.cuda.Stream = lambda *_, **__: None
    current_platform.get_device = lambda *_: "cpu"
    if dots3 := sys.modules.get("sglang.srt.models.dots3_common.modeling"):
        vars(dots3)["_require_cuda"] = lambda: None
    torch.set_default_dtype(torch.bfloat16)


def hooked() -> LayerHooks:
    """The plugin's hooks, in place."""
    hooks = LayerHooks({})
    hooks.install(HookRegistry.register)
    HookRegistry.apply_hooks()
    return hooks


def build(architecture: str, experts: int, hooks: LayerHooks) -> Built:
    config = tiny_config(architecture, experts)
    text = text_config(config)
    stated = stated_experts(text), stated_top_k(text)

    def taken_over() -> tuple[OffloadManager, ModelExperts, torch.nn.Module]:
        manager = OffloadManager(served, EmulatedMemory(), CpuRoutingCounters, lambda d: d(), lambda: False)
        with hooks.taking_over(manager, model := manager.begin_model(draft=False)):
            return manager, model, construct(architecture, config)

    served = served_config(num_resident=2)
    manager, model, module = completed(taken_over)
    manager.place_model(model, InitialPlacement(served, None))
    manager.finish_model(model)
    layers = {name: part for name, part in module.named_modules() if isinstance(part, FusedMoE)}
    inside = tuple(f"{name}." for name in layers)
    planned = counted_layer(module, stated[1], hidden=1)
    return Built(
        experts,
        stated,
        [
            {
                "layer": layer.layer_id,
                "experts": layer.num_experts,
                "managed": sum(tensor.layout.nbytes for tensor in layer.tensors),
                "plain": layer.plain_bytes,
            }
            for layer in model.layers
        ],
        {name: described(part) for name, part in layers.items()},
        {name: [*t.shape] for name, t in (*module.named_parameters(), *module.named_buffers()) if not name.startswith(inside)},
        {"bytes": planned.sums["expert_bytes"], "experts": planned.experts, "top_k": planned.top_k},
    )


def completed(tried: Callable[[], Result]) -> Result:
    """What ``tried`` returns once configs have what it asks of them."""
    while True:
        try:
            return tried()
        except AttributeError as error:
            if not isinstance(error.obj, PretrainedConfig) or error.name not in {**TINY, **USUAL}:
                raise
            setattr(error.obj, error.name, {**TINY, **USUAL}[error.name])


def build_without_plugin(architecture: str) -> None:
    config = tiny_config(architecture, EXPERTS)
    completed(lambda: construct(architecture, config))


def construct(architecture: str, config: PretrainedConfig) -> torch.nn.Module:
    """As SGLang's loader does, from a checkpoint without other files."""
    model = ModelRegistry.models[architecture]
    overrides = _shared_experts(model, config)
    with tempfile.TemporaryDirectory() as folder, get_model().override(model_path=folder, **overrides):
        return model(config=config, quant_config=None)


def _shared_experts(model: type, config: PretrainedConfig) -> dict[str, Any]:
    if VERSION < (0, 5, 23):  # a model decides by itself
        return {}
    from sglang.srt.layers.moe.utils import resolve_shared_experts_config

    return {"shared_experts": resolve_shared_experts_config(model, config, None)}


def described(layer: Any) -> dict[str, Any]:
    experts = layer.num_local_experts
    held = [t for t in (*layer.parameters(), *layer.buffers()) if t.ndim and t.shape[0] == experts]
    return {
        "layer": layer.layer_id,
        "experts": experts,
        "shared": layer.num_fused_shared_experts,
        "top_k": layer.top_k,
        "is_shared": layer.is_shared_fused_moe,
        "bytes": sum(t.nbytes for t in held),
    }


def main(*names: str, plugin: bool = True) -> None:
    """Print what came of each: the model with as many experts and with twice as many, nothing without the ``plugin``, or the
    error."""
    start()
    hooks = hooked() if plugin else None
    came: dict[str, Any] = {}
    for name in names:
        try:
            if hooks is None:
                came[name] = build_without_plugin(name)
            else:
                came[name] = [asdict(build(name, experts, hooks)) for experts in (EXPERTS, 2 * EXPERTS)]
        except Exception as error:  # noqa: BLE001 -- whatever ends it is what came of it
            came[name] = f"{type(error).__name__}: {error}"
    print("RESULT", json.dumps(came), flush=True)
