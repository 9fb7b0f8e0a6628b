"""What streaming means for a launch: its threshold, the graphs that SGLang may capture, and the buffers of a rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders.configs import served_config
from builders.launch import resolved as sglang_resolved
from sglang.srt.model_executor.cuda_graph_config import Backend
from transformers import PretrainedConfig

from sglang_uvm_offload.config import NEVER, OffloadConfig
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES
from sglang_uvm_offload.memory.protocol import MemoryInfo
from sglang_uvm_offload.plugin.launch import stream_settings
from sglang_uvm_offload.plugin.rank.backend import Emulated
from sglang_uvm_offload.plugin.rank.step_hooks import is_eager
from sglang_uvm_offload.plugin.rank.stream_buffers import make_streamer, room_in_vram
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.routing.counts import Phase
from sglang_uvm_offload.sizing.rates import StreamRates

pytestmark = pytest.mark.sglang

GIB = 1 << 30


def config(**flags: Any) -> OffloadConfig:
    return served_config(**flags)


# ---- the threshold ----


def streamed_from(
    num_experts: int = 256,
    top_k: int | None = 8,
    planned: int | None = None,
    rates: StreamRates | None = None,
    longest: int = 8192,
    slots: int = 0,
    **flags: Any,
) -> int:
    """Tokens. ``planned``: stream buffers."""
    text = PretrainedConfig(**{"num_experts_per_tok": top_k})
    requested = parse({"num_resident": 4, **flags})
    assert requested is not None
    assert requested.num_resident is not None
    return stream_settings.stream_tokens(requested, requested.num_resident, slots, planned, num_experts, text, rates, longest)


def test_auto_streams_from_where_a_step_uses_nearly_all_experts():
    assert streamed_from() == 1024
    assert streamed_from(128) == 512
    assert streamed_from(top_k=None) == 1024, "a model that does not state it"


@pytest.mark.parametrize(("reads", "tokens"), [(50.0, 1024), (60.0, 1024), (35.0, 512), (20.0, 128)])
def test_a_link_that_reads_slowly_streams_earlier(reads, tokens):
    """It copies at 50 GB/s. A step of 64 tokens is expected to use 87 % of 256 experts, one of 16 tokens 40 %."""
    rates = StreamRates(reads * 1e9, 50e9, 400e9)
    assert streamed_from(rates=rates) == tokens
    assert streamed_from(rates=rates, stream_tokens="300") == 300


@pytest.mark.parametrize(("in_vram", "tokens"), [(200, 1024), (230, 4096), (240, 8192), (248, NEVER)])
def test_the_more_is_in_vram_the_longer_a_step_must_be_to_stream(in_vram, tokens, caplog):
    """A layer's offloaded experts are read at 50 GB/s while its others are copied at 400: 1.1, 1.9 and 3.9 times. A chunk of
    8,192 tokens reads them 2.5 times in place."""
    caplog.set_level("INFO")
    rates = StreamRates(50e9, 50e9, 400e9)
    assert streamed_from(rates=rates, num_resident=in_vram - 100, slots=100) == tokens
    assert ("pays from 16384 tokens on, and a step has at most 8192" in caplog.text) == (tokens == NEVER)
    assert streamed_from(rates=rates, num_resident=in_vram, longest=16384) == min(tokens, 16384)
    assert streamed_from(rates=rates, num_resident=in_vram, stream_tokens="300") == 300
    assert streamed_from(rates=rates, num_resident=in_vram, stream_buffer_gb=4) == min(tokens, 16384)


@pytest.mark.parametrize(("given", "tokens"), [(0, 0), ("300", 300), ("inf", NEVER)])
def test_a_number_is_taken_as_it_is(given, tokens):
    assert streamed_from(stream_tokens=given) == tokens


@pytest.mark.parametrize(
    ("planned", "flags", "told"),
    [(0, {}, 1), (1, {}, 0), (0, {"stream_tokens": "inf"}, 0), (0, {"num_resident": 256}, 0), (None, {}, 0)],
)
def test_a_launch_that_has_no_room_for_buffers_is_told_that_long_prompts_are_slow(caplog, planned, flags, told):
    streamed_from(planned=planned, **flags)
    assert caplog.text.count("no room for a stream buffer next to the KV cache: long prompts") == told


def test_what_slots_hold_is_offloaded():
    assert streamed_from(rates=StreamRates(50e9, 50e9, 400e9), num_resident=4, slots=252) == 1024


def test_nothing_streams_without_buffers_or_offloaded_experts():
    assert streamed_from(stream_buffer_gb=0, stream_tokens=5) == NEVER
    assert streamed_from(num_resident=256) == NEVER
    assert streamed_from(planned=0) == NEVER
    assert not config(stream_tokens="inf").streams


# ---- prefill graphs ----


def launched(sizes: list[int], dp: int = 1, backend: str = Backend.BREAKABLE) -> Any:
    groups = {"tp_size": dp, "attn_dp_size": dp} if dp > 1 else {}
    return sglang_resolved(cuda_graph_backend_prefill=backend, cuda_graph_bs_prefill=sizes, **groups)


def graphs(cfg: Any, **flags: Any) -> Any:
    settings = stream_settings.graph_settings(replace(config(**flags), stream_tokens=streamed_from(**flags)), cfg)
    assert set(settings) <= {"cuda_graph_config"}
    return settings.get("cuda_graph_config")


def test_prefill_graphs_are_captured_below_the_threshold_and_decode_graphs_as_before():
    cfg = launched([4, 64, 100, 101, 8192])
    capped = graphs(cfg, stream_tokens=101)
    assert (capped.prefill.bs, capped.prefill.max_bs, capped.prefill.backend) == ([4, 64, 100], 100, Backend.BREAKABLE)
    assert capped.decode == cfg.cuda_graph_config.decode
    assert cfg.cuda_graph_config.prefill.bs == [4, 64, 100, 101, 8192], "the resolved arguments are not edited"


def test_groups_of_data_parallel_attention_share_the_threshold():
    assert graphs(launched([4, 25, 26, 64], dp=4), stream_tokens=101).prefill.bs == [4, 25]


def test_without_a_size_below_the_threshold_there_are_no_prefill_graphs():
    assert graphs(launched([4, 8]), stream_tokens=0).prefill.backend == Backend.DISABLED


def test_graphs_stay_where_nothing_they_replay_would_stream():
    assert graphs(launched([4, 8, 100]), stream_tokens=101) is None
    assert graphs(launched([4, 8192]), stream_tokens="inf") is None
    assert graphs(launched([4, 8192]), stream_buffer_gb=0) is None
    assert graphs(launched([4, 8192], backend=Backend.DISABLED), stream_tokens=10) is None


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
        layer = ExpertLayer(EmulatedMemory(), LayerShard(index, count), lambda layout, chosen=chosen: layout.holding(chosen))
        module = torch.nn.Module()
        with AllocationMode(count, layer.allocate):
            module.w13 = torch.empty(count, BLOCK_BYTES, dtype=torch.uint8)
        layer.sync_tensors(module)
        made.append(layer)
    return made


LARGEST = 8 * BLOCK_BYTES


def made(room: int | None = None, among: list[ExpertLayer] | None = None, planned: int | None = None, **flags: Any) -> Any:
    tokens = streamed_from(planned=planned, **flags)
    checked = replace(config(**flags), stream_tokens=tokens, stream_buffers=planned)
    return make_streamer(checked, Emulated(), EmulatedMemory(), among or layers(), room, lambda row, nbytes: None)


def buffers(*arguments: Any, **named: Any) -> int:
    streamer = made(*arguments, **named)
    assert streamer is None or streamer.nbytes == streamer.buffers * LARGEST
    return 0 if streamer is None else streamer.buffers


def test_auto_makes_two_buffers_of_the_largest_layer():
    assert buffers() == 2
    assert buffers(room=100 * GIB) == 2


def test_where_nobody_counted_auto_leaves_half_of_what_is_left_to_the_cache():
    assert buffers(room=4 * LARGEST) == 2
    assert buffers(room=4 * LARGEST - 1) == 1
    assert buffers(room=2 * LARGEST - 1) == 0
    assert buffers(room=-GIB) == 0


def test_auto_makes_as_many_as_were_planned_if_they_fit():
    assert buffers(room=2 * LARGEST, planned=2) == 2
    assert buffers(room=2 * LARGEST - 1, planned=2) == 1
    assert buffers(room=9 * LARGEST, planned=1) == 1
    assert buffers(room=9 * LARGEST, planned=0) == 0


def test_a_given_size_makes_as_many_as_it_holds_at_most_two():
    assert buffers(stream_buffer_gb=LARGEST / GIB) == 1
    assert buffers(stream_buffer_gb=2 * LARGEST / GIB) == 2
    assert buffers(stream_buffer_gb=100) == 2


def test_a_given_size_that_cannot_be_is_refused_by_its_flag():
    with pytest.raises(FlagError, match=r"--expert-offload-stream-buffer-gb 0\.001: the largest layer takes 16\.0 MiB; give"):
        made(stream_buffer_gb=0.001)
    with pytest.raises(
        FlagError, match=r"--expert-offload-stream-buffer-gb 1: buffers of 32\.0 MiB do not fit in the 31\.0 MiB"
    ):
        made(room=31 << 20, stream_buffer_gb=1)


def test_no_buffer_is_made_where_nothing_can_stream():
    assert buffers(stream_tokens="inf") == 0
    assert buffers(stream_buffer_gb=0) == 0
    assert buffers(among=layers(resident=8), adapt="off", resident_selection="first_n") == 0
    assert buffers(among=layers((8,), resident=8), adapt="continuous") == 1 + 1, "residents may change"


def test_the_room_is_what_is_free_but_for_the_share_that_sglang_leaves():
    memory: Any = EmulatedMemory()
    assert room_in_vram(memory, 10.0, 0.9) is None
    memory.device_type = "cuda"
    memory.info = lambda: MemoryInfo(5 * GIB, 20 * GIB, 0)
    assert room_in_vram(memory, 10.0, 0.9) == pytest.approx(4 * GIB)


def test_layers_too_small_to_place_need_no_buffer():
    assert PAGE_BYTES < BLOCK_BYTES
    small = ExpertLayer(EmulatedMemory(), LayerShard(0, 4), lambda layout: np.zeros(layout.num_extents, dtype=bool))
    assert made(among=[small]) is None


def test_a_stage_of_dense_layers_needs_no_buffer():
    checked = replace(config(), stream_tokens=streamed_from())
    assert make_streamer(checked, Emulated(), EmulatedMemory(), [], 0, lambda row, nbytes: None) is None
