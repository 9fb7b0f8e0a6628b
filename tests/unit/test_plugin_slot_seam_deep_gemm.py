"""What SGLang's DeepGEMM runner computes in its contiguous layout is computed from slots, by its own code but for the kernels,
whose place a reference takes that reads rows as their source does."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import deep_gemm, marlin
from builders.configs import served_config
from builders.managers import slots_on_cpu
from builders.marlin import TOP_K, ids_of
from sglang.srt.environ import envs
from sglang.srt.layers.deep_gemm_wrapper import compile_utils
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmMoeQuantInfo, DeepGemmRunnerCore
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization import fp8 as quantization_fp8
from sglang.srt.layers.quantization import unquant
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import override_platform
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.plugin.rank.fused_moe import _EXPERTS, LayerHooks
from sglang_uvm_offload.plugin.slots import runners
from sglang_uvm_offload.plugin.slots.deep_gemm import DeepGemmSlotSeam
from sglang_uvm_offload.plugin.slots.runners import no_slots_in
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.placement import InitialPlacement
from sglang_uvm_offload.routing.counts import Phase

pytestmark = pytest.mark.sglang

E, S, HIDDEN, INTERMEDIATE = 4, 3, 256, 128
RUN = DeepGemmRunnerCore.run
NAMES = DeepGemmSlotSeam.by_expert


class Layer(torch.nn.Module):
    """What SGLang's ``FusedMoE`` tells its quantisation method."""

    layer_id, top_k, num_experts, num_local_experts, num_fused_shared_experts = 0, TOP_K, E, E, 0
    uses_expert_location = True
    moe_ep_rank, moe_ep_size, moe_tp_size, params_dtype = 0, 1, 1, torch.bfloat16
    hidden_size, intermediate_size_per_partition = HIDDEN, INTERMEDIATE
    moe_runner_config = MoeRunnerConfig(num_experts=E, num_local_experts=E, top_k=TOP_K, inplace=False)


class Bench:
    """A layer, loaded by SGLang's own code under the plugin's hooks, its slots, and the seam around SGLang's runner."""

    def __init__(self, patch: pytest.MonkeyPatch, fp8: bool):
        self.kernels, self.seam = deep_gemm.Kernels(patch), DeepGemmSlotSeam()
        patch.setattr(DeepGemmRunnerCore, "run", lambda *a, **k: self.seam.around_run(RUN, *a, **k))
        for module in (quantization_fp8, unquant):
            patch.setattr(module, "get_moe_runner_backend", lambda: MoeRunnerBackend.DEEP_GEMM)
        self.layer: Any = Layer()
        self.method: Any
        if fp8:
            self.method = Fp8MoEMethod(Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128]))
        else:
            self.method = UnquantizedFusedMoEMethod(use_deep_gemm=True)
            self.method._forward_method = self.method.forward_cuda
        self.experts = self._loaded()
        held = {name.replace("_weight_scale_inv", "_scale"): each.data for name, each in self.layer.named_parameters()}
        self.tensors = {name: held[name] for name in NAMES if name in held}
        self.counters, self.device, self.slots = slots_on_cpu(self.experts)
        self.seam.find = dict.fromkeys(self.slots.row_bytes, self.slots).get
        self.first = self.slots.first_slot
        for tensor in self.tensors.values():
            for slot in range(S):
                marlin.poison(marlin.row(tensor, self.first + slot))

    def _loaded(self) -> ExpertLayer:
        hooks = LayerHooks({})
        config = served_config(num_resident=1, slots=S)
        manager = OffloadManager(config, SimulatedDriver(), CpuRoutingCounters, lambda decide: decide(), progress=lambda: False)
        layer, method = self.layer, self.method
        random = torch.Generator().manual_seed(1)
        with hooks.taking_over(manager, model := manager.begin_model(False)), override_platform(is_sm90=True):
            hooks._shadow(method)
            method.create_moe_runner(layer, layer.moe_runner_config)
            method.create_weights(layer, E, HIDDEN, INTERMEDIATE, torch.bfloat16, weight_loader=None)
            manager.place_model(model, InitialPlacement(config, None))
            for name, each in layer.named_parameters():
                each.data.copy_((torch.rand if "scale" in name else torch.randn)(each.shape, generator=random))
            method.process_weights_after_loading(layer)
        model.place_slots()
        return layer.__dict__[_EXPERTS][0]

    def run(self, ids: torch.Tensor, decode: bool = True) -> torch.Tensor:
        return self._step(ids, decode, lambda dispatched: self.method.apply(self.layer, dispatched))

    def run_with(self, ids: torch.Tensor, **changed: torch.Tensor) -> torch.Tensor:
        """With other tensors than the layer's."""
        info = DeepGemmMoeQuantInfo(use_fp8=True, block_shape=[128, 128], **self.tensors | changed)
        return self._step(ids, True, lambda dispatched: self.method.runner.run(dispatched, info))

    def _step(self, ids: torch.Tensor, decode: bool, compute: Callable[[StandardDispatchOutput], Any]) -> torch.Tensor:
        tokens = len(ids)
        random = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, HIDDEN, generator=random).bfloat16()
        topk = StandardTopKOutput(torch.rand(ids.shape, generator=random), ids, torch.zeros(tokens, E))
        self.counters.begin_step(tokens, Phase.DECODE if decode else Phase.PREFILL)
        self.device.begin_step()
        self.kernels.gemms.clear()
        return compute(StandardDispatchOutput(x, None, topk)).hidden_states

    def without_slots(self, ids: torch.Tensor) -> torch.Tensor:
        find, self.seam.find = self.seam.find, lambda address: None
        try:
            return self.run(ids)
        finally:
            self.seam.find = find

    def fill(self, *experts: int) -> None:
        """Fill slots with these experts, and poison their own rows."""
        for expert in experts:
            self.run(torch.tensor([[expert, expert]]))
        for tensor in self.tensors.values():
            for expert in experts:
                marlin.poison(tensor[expert])

    @property
    def rows(self) -> set[int]:
        """That the GEMMs of the last run read."""
        assert len(self.kernels.gemms) == 2
        return {row for _, _, indices in self.kernels.gemms for row in indices.tolist()}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    """With one thread: products are small, and threads beside other processes wait for each other."""
    monkeypatch.setattr(runners, "get_lora", lambda: SimpleNamespace(enable_lora=False))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override("compact"):
        yield lambda fp8=True: Bench(monkeypatch, fp8)
    torch.set_num_threads(threads)


BATCHES = {
    "one token": ids_of(1),
    "one token, 64-bit ids": ids_of(1, dtype=torch.int64),
    "a small batch": ids_of(5),
    "a large batch": ids_of(150),
}


BY_FORMAT = [
    pytest.param(True, marks=pytest.mark.works("Format", "FP8 in blocks (DeepGEMM)")),
    pytest.param(False, marks=pytest.mark.works("Format", "BF16 (DeepGEMM)")),
]


@pytest.mark.parametrize("fp8", BY_FORMAT)
def test_experts_are_computed_from_their_copies(bench, fp8):
    it = bench(fp8)
    it.layer.quant_method = it.method
    with override_platform(is_sm90=True):
        assert (it.experts.without_pool, no_slots_in(it.layer)) == (None, None)
    expected = {name: it.without_slots(ids) for name, ids in BATCHES.items()}
    assert all(out.isfinite().all() and out.abs().max() > 0 for out in expected.values())
    it.fill(1, 2, 3)
    for name, ids in BATCHES.items():
        assert not torch.equal(it.without_slots(ids), expected[name]), "the experts' own rows are poisoned"
        assert torch.equal(it.run(ids), expected[name])


def test_a_missed_expert_is_read_in_place_beside_copies(bench):
    it, ids = bench(), ids_of(9, (0, 1, 2, 3))
    expected = it.without_slots(ids)
    it.fill(1, 3)
    assert torch.equal(it.run(ids, decode=False), expected)
    assert it.rows == {0, 2, it.first, it.first + 1}


def test_padding_reads_a_slot_and_no_expert(bench):
    """Blocks of no expert read weights: expert 0's, which may be in host RAM."""
    it, ids = bench(), torch.tensor([[1, 2]] * 6)
    expected = it.without_slots(ids)
    first_of_blocks = it.kernels.gemms[0][2][:: deep_gemm.ALIGNMENT].tolist()
    assert first_of_blocks == [1, 2, -1, -1], "SGLang pads"
    assert torch.equal(it.run(ids), expected)
    assert it.kernels.gemms[0][2][:: deep_gemm.ALIGNMENT].tolist() == [it.first, it.first + 1, it.first, it.first]
    assert min(it.rows) >= it.first


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_stays_where_any_tensor_is_not_its_own(bench, caplog, name):
    """Scales that were converted for the call have no rows for slots, so a kernel would read what lies behind them."""
    it, ids = bench(), ids_of(5)
    strange = it.tensors[name].clone()
    for _ in range(2):
        it.run_with(ids, **{name: strange})
        assert it.rows <= set(range(-1, E))
        assert all(len(tensor) == E for _, right, _ in it.kernels.gemms for tensor in right)
    assert caplog.text.count(f"{name} {tuple(strange.shape)} is not a tensor of the layer") == (name != "w13_weight")
    it.run(ids)
    assert max(it.rows) >= it.first


def test_the_masked_layout_is_computed_in_place(bench):
    it = bench()
    it.slots.resolve = lambda *_: pytest.fail("resolved")
    state: dict[str, Any] = {"topk_ids": ids_of(5)}
    rows = type("Rows", (), {"use_masked_gemm": True, "m_indices": None})()
    info = DeepGemmMoeQuantInfo(use_fp8=True, **it.tensors)
    assert it.seam.around_run(lambda *args, **kwargs: (args, kwargs), None, rows, info, state, hooks=None) == (
        (None, rows, info, state),
        {"hooks": None},
    )


@pytest.mark.parametrize("fp8", [True, False])
def test_kernels_for_experts_with_and_without_slots_are_compiled_at_the_first_call(bench, monkeypatch, fp8):
    """A server warms up with slots, and a prefill that streams has none."""
    it, kinds = bench(fp8), set()

    def compiled(kind: Any, n: int, k: int, groups: int) -> None:
        kinds.add(kind.name)
        it.kernels.compiled.append((n, k, groups))

    monkeypatch.setattr(compile_utils, "_maybe_compile_deep_gemm_one_type_all", compiled)
    it.run(ids_of(1))
    shapes = [(2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    assert {*it.kernels.compiled} == {(*shape, groups) for shape in shapes for groups in (E, it.first + S)}
    before = {*it.kernels.compiled}
    it.without_slots(ids_of(150))
    assert {*it.kernels.compiled} == before
    assert kinds == {f"GROUPED_GEMM_NT_{'F8F8BF16' if fp8 else 'BF16'}_CONTIG"}


def test_kernels_for_all_rows_warm_up_with_the_layers_own(bench, monkeypatch):
    """SGLang's warm-up allocates weights of as many experts, which would be those of all layers."""
    it, made, needed = bench(True), [], []

    def create(kind: Any, num_groups: int, **sizes: int) -> Any:
        made.append(SimpleNamespace(groups=num_groups, lhs_q="tokens", rhs_q="weights", rhs_s="scales"))
        return made[-1]

    def warm_up(kind: Any, n: int, k: int, groups: int) -> None:
        sizes = {"max_m": 1, "n": n, "k": k, "num_groups": groups}
        needed.append(executor.get_memory_requirement(kind, **sizes))
        executor.create(kind, **sizes)

    executor = compile_utils._BaseWarmupExecutor
    monkeypatch.setattr(executor, "create", staticmethod(create))
    monkeypatch.setattr(compile_utils, "_maybe_compile_deep_gemm_one_type_all", warm_up)
    it.run(ids_of(1))
    assert executor.create is create, "SGLang's own warm-ups stay as they are"
    alone, rows = made[:2]
    assert (alone.groups, alone.rhs_q, rows.groups, rows.lhs_q) == (E, "weights", 1, "tokens")
    assert needed[1] < needed[0]
    assert len(rows.rhs_q) == len(rows.rhs_s) == it.first + S
    assert rows.rhs_q.data_ptr() == it.tensors["w13_weight"].data_ptr()


def test_the_runner_is_hooked_where_sglang_has_it():
    hooked = []
    DeepGemmSlotSeam().install(lambda target, hook, kind: hooked.append(target))
    [run] = [pkgutil.resolve_name(target) for target in hooked]
    assert run is RUN
    tensors = {name for name, kind in DeepGemmMoeQuantInfo.__annotations__.items() if "Tensor" in kind}
    assert tensors == set(NAMES)
