"""Weights that SGLang's own quantisation methods create and rearrange end in managed memory, wherever they keep them."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
from builders.configs import served_config
from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from simulated_driver import SimulatedDriver
from triton_kernels.tensor_details import layout as layouts

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Span
from sglang_uvm_offload.plugin import enforce
from sglang_uvm_offload.plugin.rank.fused_moe import _EXPERTS, LayerHooks
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.placement import InitialPlacement

pytestmark = pytest.mark.sglang

E, HIDDEN, INTERMEDIATE = 4, 512, 512
LAYOUTS = {
    "below sm_90": (layouts.StridedLayout(-2), layouts.StridedLayout(-2)),
    "sm_90": (layouts.HopperMXValueLayout(-2, mma_version=3), layouts.HopperMXScaleLayout(-2, num_warps=8)),
}


class Layer(torch.nn.Module):
    """What SGLang's ``FusedMoE`` tells its quantisation method."""

    layer_id, top_k, num_local_experts, num_fused_shared_experts, moe_ep_rank, moe_ep_size = 0, 2, E, 0, 0, 1
    uses_expert_location = True


def triton_kernel_method() -> Mxfp4MoEMethod:
    """As for ``--moe-runner-backend triton_kernel``, SGLang's choice for gpt-oss on these GPUs."""
    method = Mxfp4MoEMethod.__new__(Mxfp4MoEMethod)
    method.use_triton_kernels, method._fi_kernel = True, None
    method.use_marlin = method.use_deep_gemm = method.use_mega_moe = method.use_flashinfer = False
    return method


def created(method: Mxfp4MoEMethod) -> tuple[SimulatedDriver, Layer, ExpertLayer]:
    memory, layer, hooks = SimulatedDriver(), Layer(), LayerHooks({})
    config = served_config(num_resident=1)
    manager = OffloadManager(config, memory, CpuRoutingCounters, lambda decide: decide(), progress=lambda: False)
    with hooks.taking_over(manager, model := manager.begin_model(draft=False)):
        hooks._shadow(method)
        method.create_weights(layer, E, HIDDEN, INTERMEDIATE, torch.bfloat16, with_bias=True)
        manager.place_model(model, InitialPlacement(config, None))
    return memory, layer, layer.__dict__[_EXPERTS][0]


@pytest.mark.works("Format", "MXFP4 (triton_kernel)")
@pytest.mark.parametrize("gpu", LAYOUTS)
def test_mxfp4_weights_in_tensors_of_triton_kernels_are_managed(gpu, monkeypatch):
    for name, chosen in zip(("w", "w_scale"), LAYOUTS[gpu], strict=True):
        monkeypatch.setattr(layouts, f"make_default_matmul_mxfp4_{name}_layout", lambda chosen=chosen, **_: chosen)
    plain, method = triton_kernel_method(), triton_kernel_method()
    memory, layer, experts = created(method)
    expected = Layer()
    plain.create_weights(expected, E, HIDDEN, INTERMEDIATE, torch.bfloat16, with_bias=True)
    for (name, parameter), other in zip(layer.named_parameters(), expected.parameters(), strict=True):
        values = torch.randint(120, parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        parameter.data.copy_(values)
        other.data.copy_(values)
    method.process_weights_after_loading(layer)
    plain.process_weights_after_loading(expected)
    managed = {tensor.address: tensor for tensor in experts.tensors}
    for name in ("w13", "w2"):
        weight = getattr(method, f"{name}_weight_triton_tensor").storage.data
        assert torch.equal(weight, getattr(plain, f"{name}_weight_triton_tensor").storage.data)
        assert managed[weight.untyped_storage().data_ptr()].layout.nbytes == weight.nbytes
    scale = method.w13_precision_config.b_mx_scale.storage.data
    assert torch.equal(scale, plain.w13_precision_config.b_mx_scale.storage.data)
    assert memory.device_used == experts.resident_bytes
    assert experts.offloaded_bytes >= 3 / 4 * 3 * HIDDEN * INTERMEDIATE // 2 * E
    experts.promote(np.ones_like(experts.resident_extents()))
    assert experts.offloaded_bytes == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_experts_are_no_part_of_what_is_compiled_around_them(compiled, monkeypatch):
    """Nor does SGLang replace their kernel by PyTorch's, as it would for one token."""
    traced: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        traced.append(graph)
        return graph

    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.is_torch_compile, method._forward_method = False, None
    monkeypatch.setattr(method, "_resolve_forward_method", lambda: None, raising=False)
    method.__dict__["apply"] = lambda layer, x: x @ layer.weights
    layer, hooks = Layer(), LayerHooks({}, compiled=compiled)
    layer.weights = torch.eye(4)
    hooks._enter = lambda layer: None
    hooks.observe = lambda *args, **kwargs: None
    hooks._shadow(method)
    step = torch.compile(lambda x: method.apply(layer, x + 1) * 2, backend=note)
    assert torch.equal(step(torch.zeros(2, 4)), torch.full((2, 4), 2.0))
    found = [node.target for graph in traced for node in graph.graph.nodes if node.op == "call_function"]
    assert (operator.matmul in found) != compiled
    method.enter_torch_compile(num_tokens=1)
    assert method.is_torch_compile != compiled


def test_weights_that_a_method_hides_end_the_launch_by_name():
    method = triton_kernel_method()

    def hide(layer: torch.nn.Module) -> None:
        method.hidden = [layer.w13_weight, layer.w2_weight]
        del layer.w13_weight, layer.w2_weight

    method.process_weights_after_loading = hide
    _, layer, _ = created(method)
    with pytest.raises(FlagError, match=r"num-resident: .* of MoE layer 0 are missing .*; use another --moe-runner-backend"):
        method.process_weights_after_loading(layer)


def test_a_fault_of_memory_in_an_update_ends_the_server_before_sglang_loads_again(monkeypatch):
    """SGLang catches what an update raises, and reads from the checkpoint that failed."""
    told: list[str] = []

    def end(message: str) -> None:
        told.append(message)
        raise SystemExit

    def refuse(*_: object) -> None:
        raise ManagedMemoryError("allocate", "w13", Span(0, 8), "no host RAM")

    method = triton_kernel_method()
    _, layer, experts = created(method)
    layer.__dict__[_EXPERTS][1].counters = CpuRoutingCounters(1, E)
    monkeypatch.setattr(enforce, "end", end)
    monkeypatch.setattr(experts, "sync_tensors", refuse)
    monkeypatch.setattr(AllocationMode, "__enter__", refuse)
    with pytest.raises(SystemExit):
        method.process_weights_after_loading(layer)
    (message,) = told
    assert "a weight update failed" in message
    assert "no host RAM" in message


def test_weights_that_are_processed_anew_wait_for_the_moves_under_way(monkeypatch):
    """As after an update of the weights, which may replace the tensors that are moving."""
    waited = []
    monkeypatch.setattr(OffloadManager, "wait_for_moves", lambda manager: waited.append(len(waited)))
    method = triton_kernel_method()
    method.process_weights_after_loading = lambda layer: waited.append("processed")
    _, layer, _ = created(method)
    method.process_weights_after_loading(layer)
    assert waited == [0, "processed"]
