"""What streaming means for a launch: its threshold, the graphs that SGLang may capture, and the buffers of a rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders.configs import requested_config, served_config
from builders.launch import resolved_args
from builders.managers import placed_layer
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import SpawnRanks, create_context, get_exec, use_context

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.flags import NEVER
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.plan.rates import StreamRates
from sglang_uvm_offload.plugin.launch import stream_settings
from sglang_uvm_offload.plugin.rank.backend import Emulated
from sglang_uvm_offload.plugin.rank.buffers import make_streamer
from sglang_uvm_offload.plugin.rank.prefill_graphs import limit_prefill_graphs
from sglang_uvm_offload.plugin.rank.step_hooks import is_eager
from sglang_uvm_offload.routing.counts import Phase

pytestmark = pytest.mark.sglang


def config(**flags: Any) -> OffloadConfig:
    return served_config(**flags)


# ---- the threshold ----


def streamed_from(
    num_experts: int = 256,
    top_k: int = 8,
    rates: StreamRates | None = None,
    longest: int = 8192,
    in_vram: int = 4,
    slots: int = 0,
    **flags: Any,
) -> int:
    """Tokens. ``in_vram``: residents and slots of a layer."""
    return stream_settings.stream_tokens(requested_config(**flags), in_vram - slots, slots, num_experts, top_k, rates, longest)


def test_auto_streams_from_where_a_step_uses_nearly_all_experts():
    assert streamed_from() == 1024
    assert streamed_from(128) == 512


@pytest.mark.parametrize(("reads", "tokens"), [(50.0, 1024), (60.0, 1024), (35.0, 512), (20.0, 128)])
def test_a_link_that_reads_slowly_streams_earlier(reads, tokens):
    """It copies at 50 GB/s. A step of 64 tokens is expected to use 87 % of 256 experts, one of 16 tokens 40 %."""
    rates = StreamRates(reads * 1e9, 50e9, 400e9)
    assert streamed_from(rates=rates) == tokens
    assert streamed_from(rates=rates, stream_tokens="300") == 300


@pytest.mark.parametrize(("in_vram", "tokens"), [(200, 1024), (230, 4096), (240, 8192), (248, NEVER)])
def test_the_more_is_in_vram_the_longer_a_step_must_be_to_stream(in_vram, tokens):
    """A layer's offloaded experts are read at 50 GB/s while its others are copied at 400: 1.1, 1.9 and 3.9 times. A chunk of
    8,192 tokens reads them 2.5 times in place."""
    rates = StreamRates(50e9, 50e9, 400e9)
    assert streamed_from(rates=rates, in_vram=in_vram) == tokens
    assert streamed_from(rates=rates, in_vram=in_vram, longest=16384) == min(tokens, 16384)
    assert streamed_from(rates=rates, in_vram=in_vram, stream_tokens="300") == 300
    assert streamed_from(rates=rates, in_vram=in_vram, stream_buffer_gb=4) == min(tokens, 16384)


@pytest.mark.parametrize(("given", "tokens"), [(0, 0), ("300", 300), ("inf", NEVER)])
def test_a_number_is_taken_as_it_is(given, tokens):
    assert streamed_from(stream_tokens=given) == tokens


def test_what_slots_hold_is_offloaded():
    assert streamed_from(rates=StreamRates(50e9, 50e9, 400e9), in_vram=256, slots=252) == 1024


def test_nothing_streams_without_buffers_or_offloaded_experts():
    assert streamed_from(stream_buffer_gb=0, stream_tokens=5) == NEVER
    assert streamed_from(in_vram=256) == NEVER
    assert not config(stream_tokens="inf").streams


# ---- prefill graphs ----


def graphs(tokens: int, sizes: list[int], dp: int = 1, backend: str = Backend.BREAKABLE) -> Any:
    """The graphs of a rank whose steps of ``tokens`` or more stream, where a launch asks for prefill graphs of ``sizes``."""
    groups = {"tp_size": dp, "enable_dp_attention": True, "attn_dp_size": dp} if dp > 1 else {}
    given = resolved_args(cuda_graph_backend_prefill=backend, cuda_graph_bs_prefill=sizes, **groups)
    ranks = SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0)
    with use_context(create_context(given, role="scheduler", ranks=ranks)):
        before = get_exec().graph.cuda_graph_config
        limit_prefill_graphs(tokens)
        after = get_exec().graph.cuda_graph_config
        assert after.decode == before.decode
        assert before.prefill.bs == sizes, "the launch's arguments are not edited"
        return after.prefill


def test_prefill_graphs_are_captured_below_the_threshold():
    capped = graphs(101, [4, 64, 100, 101, 8192])
    assert (capped.bs, capped.max_bs, capped.backend) == ([4, 64, 100], 100, Backend.BREAKABLE)


def test_without_a_size_below_the_threshold_there_are_no_prefill_graphs():
    assert graphs(0, [4, 8]).backend == Backend.DISABLED


def test_graphs_stay_where_nothing_they_replay_would_stream():
    assert graphs(101, [4, 8, 100]).bs == [4, 8, 100]
    assert graphs(NEVER, [4, 8192]).bs == [4, 8192]
    assert graphs(10, [4, 8192], backend=Backend.DISABLED).backend == Backend.DISABLED


@pytest.mark.parametrize(
    ("phase", "requests", "captured", "eager"),
    [
        (Phase.PREFILL, 1, [1, 8], True),
        (Phase.DECODE, 8, [1, 8], False),
        (Phase.DECODE, 9, [1, 8], True),
        (Phase.DECODE, 1, [], True),
    ],
)
def test_a_step_streams_only_if_no_graph_replays_it(phase, requests, captured, eager):
    runner, batch = SimpleNamespace(decode_cuda_graph_capture_bs=captured), SimpleNamespace(batch_size=requests)
    assert is_eager(runner, batch, phase) == eager


# ---- buffers ----


def layers(experts: tuple[int, ...] = (4, 8), resident: int = 2) -> list[ExpertLayer]:
    """Layers of one tensor, whose experts are a block of the driver each."""
    made = []
    for index, count in enumerate(experts):
        chosen = np.arange(count) < resident
        layer = placed_layer(EmulatedMemory(), LayerShard(index, count), lambda layout, chosen=chosen: layout.holding(chosen))
        module = torch.nn.Module()
        with AllocationMode(count, layer.allocate):
            module.w13 = torch.empty(count, BLOCK_BYTES, dtype=torch.uint8)
        layer.sync_tensors(module)
        made.append(layer)
    return made


LARGEST = 8 * BLOCK_BYTES


def made(among: list[ExpertLayer] | None = None, count: int = 2, **flags: Any) -> Any:
    decided = replace(config(**{"stream_tokens": 1024, **flags}), stream_buffers=count)
    return make_streamer(
        decided, Emulated(), EmulatedMemory(), layers() if among is None else among, None, lambda row, nbytes: None
    )


@pytest.mark.parametrize("count", [1, 2])
def test_as_many_buffers_of_the_largest_layer_are_made_as_were_decided(count):
    streamer = made(count=count)
    assert (streamer.buffers, streamer.nbytes) == (count, count * LARGEST)


@pytest.mark.parametrize(("count", "flags", "told"), [(0, {}, 1), (0, {"stream_tokens": "inf"}, 0), (1, {}, 0)])
def test_a_launch_that_has_no_room_for_buffers_is_told_that_long_prompts_are_slow(caplog, count, flags, told):
    assert (made(count=count, **flags) is None) == (count == 0)
    assert caplog.text.count("no VRAM for a stream buffer next to the KV cache: long prompts") == told


def test_no_buffer_is_made_where_nothing_can_stream():
    assert made(stream_tokens="inf") is None
    assert made(among=layers(resident=8), adapt="off", resident_selection="first_n") is None
    assert made(among=layers((8,), resident=8), adapt="continuous").buffers == 2, "residents may change"


def test_a_stage_of_dense_layers_needs_no_buffer():
    assert made(among=[]) is None
