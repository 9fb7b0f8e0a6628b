"""What SGLang's DeepGEMM runner computes in its contiguous layout is computed from slots, by its own code but for the kernels,
whose place a reference takes that reads rows as their source does."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from builders import deep_gemm, marlin
from sglang.srt.environ import envs
from sglang.srt.layers.deep_gemm_wrapper import compile_utils
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmMoeQuantInfo, DeepGemmRunnerCore
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import MoeRunnerBackend

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.cpu.slots import CpuSlots
from sglang_uvm_offload.memory.slots import Rows, SlotLayer
from sglang_uvm_offload.plugin.slot_seam_deep_gemm import DeepGemmSlotSeam
from sglang_uvm_offload.policy.slots import WHOLE
from sglang_uvm_offload.routing.counts import Phase
from sglang_uvm_offload.slots.model import LayerSlots

E, S, TOP_K, HIDDEN, INTERMEDIATE = 4, 3, 2, 256, 128
RUN = DeepGemmRunnerCore.run
NAMES = DeepGemmSlotSeam.by_expert


def with_rows(values: torch.Tensor) -> torch.Tensor:
    """``values``, in a storage that has rows for slots. Those hold NaN."""
    whole = torch.empty(E + S, *values.shape[1:], dtype=values.dtype)
    marlin.poison(whole)
    whole[:E] = values
    return whole[:E]


class Bench:
    """A layer, its slots, and the seam around SGLang's runner."""

    def __init__(self, patch: pytest.MonkeyPatch, fp8: bool):
        self.kernels, self.seam = deep_gemm.Kernels(patch), DeepGemmSlotSeam()
        patch.setattr(DeepGemmRunnerCore, "run", lambda *a, **k: self.seam.around_run(RUN, *a, **k))
        random = torch.Generator().manual_seed(1)
        self.tensors = {}
        for name, n, k in (("w13", 2 * INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE)):
            weight = torch.randn(E, n, k, generator=random)
            self.tensors[f"{name}_weight"] = with_rows(weight.to(torch.float8_e4m3fn if fp8 else torch.bfloat16))
            if fp8:
                self.tensors[f"{name}_scale"] = with_rows(torch.rand(E, n // 128, k // 128, generator=random))
        rows = [Rows(each.data_ptr(), each.stride(0) * each.element_size()) for each in self.tensors.values()]
        served = SlotLayer(rows, E, S)
        self.counters = CpuRoutingCounters(1, E)
        self.device = CpuSlots(self.counters, [served])
        self.device.set_share(np.full((1, E), WHOLE, dtype=np.uint8))
        self.slots = LayerSlots(0, served, self.device)
        self.seam.find = dict.fromkeys(self.slots.row_bytes, self.slots).get
        self.fp8 = fp8
        config = MoeRunnerConfig(num_experts=E, num_local_experts=E, top_k=TOP_K, inplace=False)
        self.runner = MoeRunner(MoeRunnerBackend.DEEP_GEMM, config)

    def run(self, ids: torch.Tensor, decode: bool = True, **changed: torch.Tensor) -> torch.Tensor:
        tokens = len(ids)
        random = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, HIDDEN, generator=random).bfloat16()
        topk = StandardTopKOutput(torch.rand(ids.shape, generator=random), ids, torch.zeros(tokens, E))
        self.counters.begin_step(tokens, Phase.DECODE if decode else Phase.PREFILL)
        self.device.begin_step()
        self.kernels.gemms.clear()
        info = DeepGemmMoeQuantInfo(use_fp8=self.fp8, block_shape=[128, 128] if self.fp8 else None, **self.tensors | changed)
        return self.runner.run(StandardDispatchOutput(x, None, topk), info).hidden_states

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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override("compact"):
        yield lambda fp8=True: Bench(monkeypatch, fp8)
    torch.set_num_threads(threads)


def ids_of(tokens: int, experts: tuple[int, ...] = (1, 2, 3), dtype: torch.dtype = torch.int32) -> torch.Tensor:
    random = torch.Generator().manual_seed(tokens)
    picks = torch.tensor(experts)
    return torch.stack([picks[torch.randperm(len(picks), generator=random)[:TOP_K]] for _ in range(tokens)]).to(dtype)


BATCHES = {
    "one token": ids_of(1),
    "one token, 64-bit ids": ids_of(1, dtype=torch.int64),
    "a small batch": ids_of(5),
    "a large batch": ids_of(150),
}


@pytest.mark.parametrize("fp8", [True, False])
def test_experts_are_computed_from_their_copies(bench, fp8):
    it = bench(fp8)
    expected = {name: it.without_slots(ids) for name, ids in BATCHES.items()}
    assert all(out.isfinite().all() and out.abs().max() > 0 for out in expected.values())
    it.fill(1, 2, 3)
    for name, ids in BATCHES.items():
        assert not torch.equal(it.without_slots(ids), expected[name]), "the experts' own rows are poisoned"
        assert torch.equal(it.run(ids), expected[name])


@pytest.mark.parametrize("fp8", [True, False])
def test_each_tensor_of_both_gemms_is_read_at_the_copys_row(bench, fp8):
    it, ids = bench(fp8), ids_of(5)
    expected = it.without_slots(ids)
    it.fill(1, 2, 3)
    assert set(it.tensors) == set(NAMES) if fp8 else {"w13_weight", "w2_weight"}
    for name, tensor in it.tensors.items():
        slot = marlin.row(tensor, E + 1)
        kept = slot.clone()
        marlin.poison(slot)
        assert not torch.equal(it.run(ids), expected), name
        slot.copy_(kept)
        assert torch.equal(it.run(ids), expected)


def test_a_missed_expert_is_read_in_place_beside_copies(bench):
    it, ids = bench(), ids_of(9, (0, 1, 2, 3))
    expected = it.without_slots(ids)
    it.fill(1, 3)
    assert torch.equal(it.run(ids, decode=False), expected)
    assert it.rows == {0, 2, E, E + 1}


def test_padding_reads_a_slot_and_no_expert(bench):
    """Blocks of no expert read weights: expert 0's, which may be in host RAM."""
    it, ids = bench(), torch.tensor([[1, 2]] * 6)
    expected = it.without_slots(ids)
    first_of_blocks = it.kernels.gemms[0][2][:: deep_gemm.ALIGNMENT].tolist()
    assert first_of_blocks == [1, 2, -1, -1], "SGLang pads"
    assert torch.equal(it.run(ids), expected)
    assert it.kernels.gemms[0][2][:: deep_gemm.ALIGNMENT].tolist() == [E, E + 1, E, E]
    assert min(it.rows) >= E


def test_experts_of_other_ranks_stay_out(bench):
    it, ids = bench(), ids_of(9)
    ids[0], ids[3:6, 1] = -1, -1
    expected = it.without_slots(ids)
    it.fill(1, 2, 3)
    assert torch.equal(it.run(ids), expected)
    assert not expected[0].any()


def test_an_unwritten_slot_spoils_nothing(bench):
    it, ids = bench(), ids_of(9)
    it.device.set_share(np.zeros((1, E), dtype=np.uint8))  # nothing is to be filled
    expected = it.without_slots(ids)
    assert torch.equal(it.run(ids), expected)
    assert E in it.rows, "padding"


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_stays_where_any_tensor_is_not_its_own(bench, caplog, name):
    """Scales that were converted for the call have no rows for slots, so a kernel would read what lies behind them."""
    it, ids = bench(), ids_of(5)
    strange = it.tensors[name].clone()
    for _ in range(2):
        it.run(ids, **{name: strange})
        assert it.rows <= set(range(-1, E))
        assert all(len(tensor) == E for _, right, _ in it.kernels.gemms for tensor in right)
    assert caplog.text.count(f"{name} {tuple(strange.shape)} is none of the layer's tensors") == (name != "w13_weight")
    it.run(ids)
    assert max(it.rows) >= E


def test_a_tensor_at_other_rows_than_its_storage_is_not_the_layers(bench):
    it = bench()
    whole = it.tensors["w2_scale"].as_strided((E + S, 2, 1), (2, 1, 1))
    it.run(ids_of(5), w2_scale=whole[1 : 1 + E])
    assert max(it.rows) < E


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


def test_rows_are_resolved_once_a_call_one_by_one(bench):
    it, resolved = bench(), []
    it.slots.resolve = lambda *given: resolved.append(given)
    ids = ids_of(5)
    it.run(ids)
    [(told, blocks, padded, size)] = resolved
    (_, _, first), (_, _, second) = it.kernels.gemms
    assert (told is ids, blocks is first, first is second) == (True, True, True)
    assert (padded.tolist(), padded.dtype, size) == ([len(first)], torch.int32, 1)


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_at_a_gemm_leaves_nothing_behind(bench, fails):
    it, ids = bench(), ids_of(5)
    expected = it.without_slots(ids)
    it.kernels.fails_at = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        it.run(ids)
    it.kernels.fails_at = None
    assert torch.equal(it.run(ids), expected)
    assert all(len(tensor) == E for tensor in it.tensors.values())


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
    assert {*it.kernels.compiled} == {(*shape, groups) for shape in shapes for groups in (E, E + S)}
    before = {*it.kernels.compiled}
    it.without_slots(ids_of(150))
    assert {*it.kernels.compiled} == before
    assert kinds == {f"GROUPED_GEMM_NT_{'F8F8BF16' if fp8 else 'BF16'}_CONTIG"}


def test_the_runner_is_hooked_where_sglang_has_it():
    hooked = []
    DeepGemmSlotSeam().install(lambda target, hook, kind: hooked.append(target))
    [run] = [pkgutil.resolve_name(target) for target in hooked]
    assert run is RUN
    tensors = {name for name, kind in DeepGemmMoeQuantInfo.__annotations__.items() if "Tensor" in kind}
    assert tensors == set(NAMES)
