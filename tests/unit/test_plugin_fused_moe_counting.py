"""Each form in which SGLang hands routing to a MoE layer is counted, or refused by name where it shows no experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from builders.locations import located
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLDispatchOutput, DeepEPNormalDispatchOutput
from sglang.srt.layers.moe.token_dispatcher.mooncake import MooncakeEPDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher, StandardDispatchOutput
from sglang.srt.layers.moe.topk import (
    BypassedTopKOutput,
    PackedTopKOutput,
    StandardTopKOutput,
    StandardTopKOutputPacked,
    TritonKernelTopKOutput,
)
from triton_kernels.tensor_details.ragged_tensor import RaggedTensorMetadata

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plugin.rank.built_runners import counting_flags
from sglang_uvm_offload.plugin.rank.fused_moe import _EXPERTS, LayerHooks
from sglang_uvm_offload.plugin.rank.recording import Recording
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.routing.counts import ALL_ROWS, Phase
from sglang_uvm_offload.routing.recorder import Recorder

pytestmark = pytest.mark.sglang

COUNTING = counting_flags(parse({"num_resident": 4}))
IDS = torch.tensor([[4, 5], [5, -1]], dtype=torch.int32)
SIZES = torch.tensor([0, 3, 1, 0], dtype=torch.int32)


def standard(topk) -> StandardDispatchOutput:
    return StandardDispatchOutput(hidden_states=None, hidden_states_scale=None, topk_output=topk)


def ragged() -> TritonKernelTopKOutput:
    metadata = RaggedTensorMetadata.__new__(RaggedTensorMetadata)
    object.__setattr__(metadata, "slice_sizes", SIZES)
    return TritonKernelTopKOutput(metadata, None, None, None, 2)


PACKED = (IDS << 16) | 0x3F80
FORMS = {
    "standard": (standard(StandardTopKOutput(None, IDS, None)), [1, 2, 0, 0]),
    "standard with packed ids": (standard(StandardTopKOutputPacked(None, IDS, None, PACKED)), [1, 2, 0, 0]),
    "packed": (standard(PackedTopKOutput(PACKED, None)), [1, 2, 0, 0]),
    "triton_kernels": (standard(ragged()), [0, 3, 1, 0]),
    "deepep normal": (DeepEPNormalDispatchOutput(None, None, IDS, None, []), [1, 2, 0, 0]),
    "deepep low latency": (DeepEPLLDispatchOutput(None, None, torch.tensor([[0, 1]]), None, SIZES, 4), [0, 3, 1, 0]),
}


@pytest.fixture
def layer():
    """A layer whose runner keeps the model's numbering, on the rank that holds experts 4 to 7."""
    counters = CpuRoutingCounters(1, 4)
    counters.begin_step(ALL_ROWS, Phase.DECODE)
    made = SimpleNamespace(dispatcher=SimpleNamespace(skip_local_expert_mapping=True))
    made.__dict__[_EXPERTS] = (SimpleNamespace(first_expert=4), SimpleNamespace(counters=counters, draft=False), 0)
    made.counters = counters
    return made


@pytest.mark.parametrize("form", FORMS)
def test_routing_is_counted_in_every_form(form, layer):
    dispatched, expected = FORMS[form]
    LayerHooks(COUNTING).observe(layer, dispatched)
    assert layer.counters.read().routed()[0].tolist() == expected


def test_local_ids_of_expert_parallel_ranks_are_not_shifted(layer):
    layer.dispatcher.skip_local_expert_mapping = False
    LayerHooks(COUNTING).observe(layer, standard(StandardTopKOutput(None, IDS - 4, None)))
    assert layer.counters.read().routed()[0].tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize(("dispatcher", "lasting"), [(StandardDispatcher, True), (MooncakeEPDispatcher, False)])
def test_ids_wait_for_the_steps_end_only_where_no_tokens_are_exchanged(dispatcher, lasting, layer, monkeypatch):
    """Each class as SGLang has it, without the process groups that its ``__init__`` asks for."""
    layer.dispatcher = dispatcher.__new__(dispatcher)
    layer.dispatcher.skip_local_expert_mapping = True
    said = []
    monkeypatch.setattr(layer.counters, "count", lambda *arguments, **named: said.append(named["lasting"]))
    LayerHooks(COUNTING).observe(layer, standard(StandardTopKOutput(None, IDS, None)))
    assert said == [lasting]


BYPASSED = standard(BypassedTopKOutput(None, None, None))


def test_routing_inside_the_kernel_is_refused_where_it_must_be_counted_and_noted_where_not(layer):
    with pytest.raises(FlagError, match=r"frequency: this MoE runner routes inside its kernel \(BypassedTopKOutput\)"):
        LayerHooks(COUNTING).observe(layer, BYPASSED)
    hooks = LayerHooks({})
    hooks.observe(layer, BYPASSED)
    assert hooks.uncounted == {"BypassedTopKOutput"}
    assert layer.counters.read().counts.sum() == 0


def test_a_draft_model_may_route_inside_its_kernel(layer):
    layer.__dict__[_EXPERTS][1].draft = True
    hooks = LayerHooks(COUNTING)
    hooks.observe(layer, BYPASSED)
    assert hooks.uncounted == {"BypassedTopKOutput"}


SHARED = torch.tensor([[4, 5, 8], [5, -1, 8]], dtype=torch.int32)
"""``IDS`` with the id of a fused shared expert behind them, as the router's kernels write it."""
WITH_IDS = {
    "standard": StandardTopKOutput(None, SHARED, None),
    "standard with packed ids": StandardTopKOutputPacked(None, SHARED, None, SHARED << 16),
    "packed": PackedTopKOutput((SHARED << 16) | 0x3F80, None),
}


@pytest.fixture
def recording(tmp_path):
    made = Recording(tmp_path / "trace.npz")
    made.recorder = Recorder(made.path, locations=located(1, 8), top_k=2, max_rows=4, device="cpu")
    return made


@pytest.fixture
def traced(layer, recording):
    """The layer with one fused shared expert, and what computes it: counts, records, and answers with what it was given."""
    layer.num_fused_shared_experts = 1
    layer.counters = CpuRoutingCounters(1, 5)
    layer.counters.begin_step(ALL_ROWS, Phase.DECODE)
    layer.__dict__[_EXPERTS] = (SimpleNamespace(first_expert=4), SimpleNamespace(counters=layer.counters, draft=False), 0)
    names = ("create_weights", "process_weights_after_loading", "apply")
    layer.quant_method = SimpleNamespace(**{name: lambda layer, *given: given for name in names})
    LayerHooks(COUNTING, recording=recording)._shadow(layer.quant_method)
    return layer


def recorded(recording) -> list:
    recording.recorder.end_step(["a", "b"], [1, 1])
    recording.recorder.poll()
    return recording.recorder.log.trace(recording.recorder.log.tokens).ids.tolist()


@pytest.mark.parametrize("form", WITH_IDS)
def test_a_trace_holds_the_routed_experts_of_every_form_that_shows_ids(form, traced, recording):
    dispatched = standard(WITH_IDS[form])
    assert traced.quant_method.apply(traced, dispatched) == (dispatched,)
    assert recorded(recording) == [[[4, 5]], [[5, -1]]]
    assert traced.counters.read().routed()[0].tolist() == [1, 2, 0, 0, 2]


def test_a_draft_model_is_counted_and_not_recorded(traced, recording):
    traced.__dict__[_EXPERTS][1].draft = True
    traced.quant_method.apply(traced, standard(WITH_IDS["standard"]))
    assert recorded(recording) == [[[-1, -1]], [[-1, -1]]]
    assert traced.counters.read().routed().sum() > 0


@pytest.mark.parametrize("form", ["BypassedTopKOutput", "TritonKernelTopKOutput"])
def test_a_trace_of_routing_that_shows_no_ids_is_refused(form, traced, recording):
    routing = BypassedTopKOutput(None, None, None) if form.startswith("Bypassed") else ragged()
    hooks = LayerHooks({}, recording=recording)
    with pytest.raises(FlagError, match=rf"--expert-offload-config trace: this MoE runner shows no expert ids \({form}\)"):
        hooks.observe(traced, standard(routing))


def test_a_layer_that_picks_more_experts_than_it_was_built_for_is_refused(traced):
    traced.num_fused_shared_experts = 0
    with pytest.raises(FlagError, match="3 routed experts per token, but was built for 2"):
        traced.quant_method.apply(traced, standard(WITH_IDS["standard"]))
