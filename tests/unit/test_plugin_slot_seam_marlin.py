"""What SGLang's Marlin runner computes is computed from slots: every format that it serves, by its own code but for the
kernels, whose place a reference takes that reads rows as their source does."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from builders import marlin
from builders.configs import served_config
from builders.managers import slots_on_cpu
from builders.marlin import TOP_K, ids_of
from sglang.kernels.ops.moe import moe_align_single_token
from sglang.srt.hardware_backend.gpu.quantization import gptq_kernels
from sglang.srt.layers.moe import fused_moe_triton
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization import BASE_QUANTIZATION_METHODS, modelopt_quant, mxfp4
from sglang.srt.layers.quantization.awq import awq
from sglang.srt.layers.quantization.awq.schemes import awq_moe
from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A16Nvfp4MoE,
    CompressedTensorsWNA16MoE,
)
from sglang.srt.layers.quantization.gptq import gptq
from sglang.srt.layers.quantization.gptq.schemes import GPTQMarlinMoEScheme
from sglang.srt.runtime_context import override_platform
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.plugin.rank import loading_hooks, scheduler_hooks
from sglang_uvm_offload.plugin.rank.backend import Emulated
from sglang_uvm_offload.plugin.rank.fused_moe import _EXPERTS, LayerHooks
from sglang_uvm_offload.plugin.slots import runners
from sglang_uvm_offload.plugin.slots.deep_gemm import DeepGemmSlotSeam
from sglang_uvm_offload.plugin.slots.marlin import MarlinSlotSeam
from sglang_uvm_offload.plugin.slots.runners import no_slots_in
from sglang_uvm_offload.plugin.slots.seam import Seam
from sglang_uvm_offload.plugin.slots.triton import TritonSlotSeam
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.placement import InitialPlacement
from sglang_uvm_offload.routing.counts import Phase

pytestmark = pytest.mark.sglang

E, S, HIDDEN, INTERMEDIATE, GROUP = 4, 3, 256, 128, 64
SETTINGS = MoeRunnerConfig(num_experts=2 * E, num_local_experts=E, top_k=TOP_K, activation="silu", is_gated=True)


class Layer(torch.nn.Module):
    """What SGLang's ``FusedMoE`` tells its quantisation method."""

    layer_id, top_k, num_experts, num_local_experts, num_fused_shared_experts = 0, TOP_K, E, E, 0
    uses_expert_location = True
    moe_ep_rank, moe_ep_size, moe_tp_size, params_dtype = 0, 1, 1, torch.bfloat16
    hidden_size, intermediate_size_per_partition, moe_runner_config = HIDDEN, INTERMEDIATE, SETTINGS
    orig_dtype, _mega_moe_nvfp4 = torch.bfloat16, False

    def __init__(self) -> None:
        super().__init__()
        self.scheme: Any = None
        self.dispatcher = SimpleNamespace(local_expert_mapping=None, num_experts=2 * E)


def quantization(name: str, **stated: Any) -> Any:
    return BASE_QUANTIZATION_METHODS[name].from_config({"quant_method": name, **stated})


def of_awq(layer: Layer) -> Any:
    method = awq.AWQMoEMethod.__new__(awq.AWQMoEMethod)
    method.quant_config = config = quantization("awq_marlin", bits=4, group_size=GROUP, zero_point=True)
    layer.scheme = awq_moe.AWQMoEScheme(config)
    return method


def of_gptq(layer: Layer, bits: int = 4, sort: bool = False) -> Any:
    config = quantization("gptq_marlin", bits=bits, group_size=GROUP, desc_act=sort, sym=True, lm_head=False)
    layer.scheme, layer.moe_tp_size = GPTQMarlinMoEScheme(config), 1 + sort
    return gptq.GPTQMarlinMoEMethod(config)


def compressed(weights: dict[str, Any], kind: str) -> Any:
    group = {"targets": ["Linear"], "weights": weights}
    return quantization("compressed-tensors", format=kind, ignore=[], config_groups={"group_0": group})


def of_compressed(layer: Layer, bits: int = 4, symmetric: bool = True, order: str | None = None) -> Any:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "actorder": order}
    config = compressed({**weights, "symmetric": symmetric}, "pack-quantized")
    layer.scheme = CompressedTensorsWNA16MoE(config, config.target_scheme_map["Linear"]["weights"])
    layer.moe_tp_size = 1 if order is None else 2
    return compressed_tensors.CompressedTensorsFusedMoEMethod(config)


def of_compressed_nvfp4(layer: Layer) -> Any:
    config = compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized")
    layer.scheme = CompressedTensorsW4A16Nvfp4MoE(has_input_global_scale=True)
    return compressed_tensors.CompressedTensorsFusedMoEMethod(config)


def of_modelopt(layer: Layer) -> Any:
    stated = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "ignore": []}
    layer.quant_config = quantization("modelopt_fp4", **stated)
    return modelopt_quant.ModelOptNvFp4FusedMoEMethod(layer.quant_config)


def of_mxfp4(layer: Layer) -> Any:
    method = mxfp4.Mxfp4MoEMethod.__new__(mxfp4.Mxfp4MoEMethod)
    method.use_marlin, method._fi_kernel = True, None
    method.use_triton_kernels = method.use_deep_gemm = method.use_mega_moe = method.use_flashinfer = False
    return method


class Format(NamedTuple):
    method: Callable[[Layer], Any]
    dtype: torch.dtype
    indexed: str
    """The tensors of each GEMM that are read by expert."""


INTEGERS, PERMUTED = "weights scales", "weights scales groups permutation"
FORMATS = {
    "AWQ": Format(of_awq, torch.bfloat16, "weights scales zeros"),
    "GPTQ": Format(of_gptq, torch.float16, INTEGERS),
    "GPTQ, 8 bits": Format(lambda layer: of_gptq(layer, bits=8), torch.float16, INTEGERS),
    "GPTQ, in the order of activations": Format(lambda layer: of_gptq(layer, sort=True), torch.float16, PERMUTED),
    "compressed": Format(of_compressed, torch.bfloat16, INTEGERS),
    "compressed, 8 bits": Format(lambda layer: of_compressed(layer, bits=8), torch.bfloat16, INTEGERS),
    "compressed, with zeros": Format(lambda layer: of_compressed(layer, symmetric=False), torch.bfloat16, f"{INTEGERS} zeros"),
    "compressed, in order": Format(lambda layer: of_compressed(layer, order="group"), torch.bfloat16, PERMUTED),
    "compressed NVFP4": Format(of_compressed_nvfp4, torch.bfloat16, "weights scales global"),
    "NVFP4": Format(of_modelopt, torch.bfloat16, "weights scales global"),
    "MXFP4": Format(of_mxfp4, torch.bfloat16, "weights scales bias"),
}


class Bench:
    """A layer of a format, loaded by SGLang's own code under the plugin's hooks, its slots, and the seam."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str):
        self.format = FORMATS[kind]
        self.seam, self.gemms = MarlinSlotSeam(), []
        marlin.on_cpu(patch, self._gemm, lambda *a, **k: self.seam.around_experts(marlin.FUSED, *a, **k))
        for module, name in ((fused_moe_triton, "moe_align_block_size"), (moe_align_single_token, "moe_align_single_token")):
            patch.setattr(module, name, partial(self.seam.around_align, getattr(module, name)))
        auto = MoeRunnerBackend.MARLIN if self.format.method in (of_mxfp4, of_modelopt) else MoeRunnerBackend.AUTO
        for module in (awq_moe, gptq_kernels, modelopt_quant, mxfp4):
            patch.setattr(module, "get_moe_runner_backend", lambda: auto)
        self.layer = Layer()
        self.method = self.format.method(self.layer)
        self.experts = self._loaded()
        self.counters, self.device, self.slots = slots_on_cpu(self.experts)
        self.seam.find = dict.fromkeys(self.slots.row_bytes, self.slots).get

    def _gemm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        def reference(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.gemms.append(args)
            return marlin.gemm(*args, **kwargs)

        return self.seam._around_gemm(reference, *args, **kwargs)

    def _loaded(self) -> ExpertLayer:
        hooks = LayerHooks({})
        config = served_config(num_resident=1, slots=S)
        manager = OffloadManager(config, SimulatedDriver(), CpuRoutingCounters, lambda decide: decide(), progress=lambda: False)
        layer, method = self.layer, self.method
        with hooks.taking_over(manager, model := manager.begin_model(False)), override_platform(is_sm90=True):
            hooks._shadow(method)
            method.create_moe_runner(layer, SETTINGS)
            more = {"with_bias": True} if self.format.method is of_mxfp4 else {"weight_loader": None}
            method.create_weights(layer, E, HIDDEN, INTERMEDIATE, torch.bfloat16, **more)
            manager.place_model(model, InitialPlacement(config, None))
            load(layer)
            method.process_weights_after_loading(layer)
        model.place_slots()
        return layer.__dict__[_EXPERTS][0]

    def run(self, ids: torch.Tensor, decode: bool = True) -> torch.Tensor:
        tokens = len(ids)
        random = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, HIDDEN, generator=random).to(self.format.dtype)
        topk = StandardTopKOutput(torch.rand(ids.shape, generator=random), ids, torch.zeros(tokens, E))
        self.counters.begin_step(tokens, Phase.DECODE if decode else Phase.PREFILL)
        self.device.begin_step()
        self.gemms.clear()
        return self.method.apply(self.layer, StandardDispatchOutput(x, None, topk)).hidden_states

    def without_slots(self, ids: torch.Tensor) -> torch.Tensor:
        find, self.seam.find = self.seam.find, lambda address: None
        try:
            return self.run(ids)
        finally:
            self.seam.find = find

    def indexed(self) -> dict[str, torch.Tensor]:
        """What the two GEMMs of the last run were given by expert."""
        places = {"weights": 2, "bias": 3, "scales": 4, "global": 5, "zeros": 6, "groups": 7, "permutation": 8}
        given = {f"{name} {nth}": args[at] for nth, args in enumerate(self.gemms) for name, at in places.items()}
        return {name: tensor for name, tensor in given.items() if tensor is not None and tensor.numel()}

    def fill(self, *experts: int) -> None:
        """Fill slots with these experts, and poison their own rows."""
        for expert in experts:
            self.run(torch.tensor([[expert, expert]]))
        for tensor in self.indexed().values():
            for expert in experts:
                marlin.poison(tensor[expert])


def load(layer: Layer) -> None:
    """Weights of any bytes, scales near one, and each expert's columns in an order of its own."""
    random = torch.Generator().manual_seed(1)
    for name, parameter in layer.named_parameters():
        data = parameter.data
        if name.endswith("g_idx"):
            groups = torch.arange(data.shape[1]) // GROUP
            data.copy_(torch.stack([groups[torch.randperm(len(groups), generator=random)] for _ in range(E)]))
        elif "global_scale" in name or "scale_2" in name:
            data.copy_((0.5 + torch.rand(E, generator=random)).view(E, *[1] * (data.dim() - 1)).expand(data.shape))
        elif data.dtype.is_floating_point:
            data.copy_(torch.rand(data.shape, generator=random) / 8 + 0.06)
        elif "scale" in name:
            data.copy_(torch.randint(120, 127, data.shape, generator=random))
        else:
            data.view(torch.uint8).random_(0, 256, generator=random)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Bench]]:
    """With one thread: products are small, and threads beside other processes wait for each other."""
    monkeypatch.setattr(runners, "get_lora", lambda: SimpleNamespace(enable_lora=False))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda kind: Bench(monkeypatch, kind)
    torch.set_num_threads(threads)


BATCHES = {
    "one token": ids_of(1),
    "one token, 64-bit ids": ids_of(1, dtype=torch.int64),
    "a small batch": ids_of(5),
    "a large batch": ids_of(70),
}


ROWS = {
    "AWQ": "AWQ (Marlin)",
    "GPTQ": "GPTQ, 4 bits (Marlin)",
    "GPTQ, 8 bits": "GPTQ, 8 bits (Marlin)",
    "GPTQ, in the order of activations": "GPTQ in the order of activations (Marlin)",
    "compressed": "compressed-tensors integers (Marlin)",
    "compressed, 8 bits": "compressed-tensors integers (Marlin)",
    "compressed, with zeros": "compressed-tensors integers (Marlin)",
    "compressed, in order": "compressed-tensors integers (Marlin)",
    "compressed NVFP4": "compressed-tensors NVFP4 (Marlin)",
    "NVFP4": "NVFP4 (Marlin)",
    "MXFP4": "MXFP4 (Marlin)",
}
BY_FORMAT = [pytest.param(kind, marks=pytest.mark.works("Format", ROWS[kind])) for kind in FORMATS]


@pytest.mark.parametrize("kind", BY_FORMAT)
def test_experts_are_computed_from_their_copies(bench, kind):
    it = bench(kind)
    it.layer.quant_method = it.method
    assert (it.experts.without_pool, no_slots_in(it.layer)) == (None, None)
    expected = {name: it.without_slots(ids) for name, ids in BATCHES.items()}
    assert all(out.isfinite().all() and out.abs().max() > 0 for out in expected.values())
    assert {name.split()[0] for name in it.indexed()} == set(it.format.indexed.split())
    it.fill(1, 2, 3)
    for name, ids in BATCHES.items():
        assert not torch.equal(it.without_slots(ids), expected[name]), "the experts' own rows are poisoned"
        assert torch.equal(it.run(ids), expected[name])
        assert len(it.gemms) == 2
        assert it.gemms[0][11] is it.gemms[1][11], "one list"


def test_a_missed_expert_is_read_in_place_beside_copies(bench):
    it, ids = bench("AWQ"), ids_of(9, (0, 1, 2, 3))
    expected = it.without_slots(ids)
    it.fill(1, 3)
    assert torch.equal(it.run(ids, decode=False), expected)
    rows = set(it.gemms[0][11].tolist())
    first = it.slots.first_slot
    assert rows >= {0, 2, first, first + 1}
    assert not rows & {1, 3}


@pytest.mark.parametrize("kind", ["compressed", "NVFP4", "MXFP4"])
def test_experts_of_other_ranks_stay_out(bench, kind):
    """With expert parallelism the dispatcher has numbered the experts of this rank, and the others are -1."""
    it, ids = bench(kind), ids_of(9)
    ids[0], ids[3:6, 1] = -1, -1
    it.layer.dispatcher.local_expert_mapping = torch.arange(2 * E)
    expected = it.without_slots(ids)
    it.fill(1, 2, 3)
    assert torch.equal(it.run(ids), expected)
    assert len(it.gemms[0][12]) == 1, "SGLang counts no blocks of -1 here"
    assert it.gemms[0][11][0] == -1


@pytest.mark.parametrize("kind", ["AWQ", "GPTQ"])
def test_blocks_of_no_expert_are_counted_beside_the_padded_tokens(bench, kind):
    it, ids = bench(kind), ids_of(9)
    ids[0], ids[3:6, 1] = -1, -1
    expected = it.without_slots(ids)
    it.fill(1, 2, 3)
    assert torch.equal(it.run(ids), expected)
    assert int(it.gemms[0][12][1]) > 0


def test_the_list_is_resolved_once_a_call_and_in_no_other(bench):
    it = bench("compressed")
    resolved = []
    it.slots.resolve = lambda *given: resolved.append(given)
    ids = ids_of(5)
    it.run(ids)
    [(told, lists, later)] = resolved
    assert told is ids
    assert (lists.blocks is it.gemms[0][11], lists.padded is it.gemms[0][12], lists.block_size) == (True, True, 8)
    second = {tensor.untyped_storage().data_ptr() for name, tensor in it.indexed().items() if name.endswith("1")}
    assert later == second, "what the second GEMM reads"
    assert it.seam.around_align(lambda *given: given, ids, 8, E) == (ids, 8, E)
    assert len(resolved) == 1


def test_all_runners_are_followed_where_there_are_slots(monkeypatch):
    hooks = []
    scheduler_hooks.install(served_config(num_resident=1, slots=S), lambda target, hook, kind: hooks.append(hook))
    seams = {hook.__self__ for hook in hooks if isinstance(getattr(hook, "__self__", None), Seam)}
    assert {type(each) for each in seams} == {TritonSlotSeam, MarlinSlotSeam, DeepGemmSlotSeam}
    slots = SimpleNamespace(at=lambda address: None)
    monkeypatch.setattr(loading_hooks, "make_slots", lambda model, backend, guess: slots)
    loading = next(hook.__self__ for hook in hooks if isinstance(getattr(hook, "__self__", None), loading_hooks.LoadingHooks))
    loading.rank.backend = Emulated()
    loading._begin_slots(None, None)
    assert {each.find for each in seams} == {slots.at}


def test_the_functions_are_hooked_where_sglang_has_them():
    hooked = []
    MarlinSlotSeam().install(lambda target, hook, kind: hooked.append(target))
    *_, gemm = found = [pkgutil.resolve_name(target) for target in hooked]
    names = ["fused_marlin_moe", "moe_align_block_size", "moe_align_single_token", "moe_wna16_marlin_gemm"]
    assert [each.__name__ for each in found] == names
    names = [*inspect.signature(marlin.FUSED).parameters]
    assert tuple(names[: len(MarlinSlotSeam.first)]) == MarlinSlotSeam.first
    assert set(MarlinSlotSeam.by_expert) <= set(names)
    not_read_by_expert = {"gating_output", "topk_weights", "topk_ids", "hidden_states", "expert_map", "workspace"}
    tensors = {name for name, each in inspect.signature(marlin.FUSED).parameters.items() if "Tensor" in str(each.annotation)}
    assert tensors - not_read_by_expert == set(MarlinSlotSeam.by_expert)
    assert [*inspect.signature(gemm).parameters][2] == "b_q_weight"
