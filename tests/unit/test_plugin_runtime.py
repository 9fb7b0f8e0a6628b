"""What a forward step is to the counters and the slots: its rows, its tokens, its phase and where its requests end, on one rank
and on ranks that exchange tokens. And what of a rank learns of its slots."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from builders.configs import served_config
from builders.threads import no_further_thread
from sglang.srt.layers.moe.utils import MoeA2ABackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_uvm_offload.plugin.rank import loading_hooks, scheduler_hooks, step_hooks
from sglang_uvm_offload.plugin.rank.backend import Emulated
from sglang_uvm_offload.plugin.rank.state import RankState
from sglang_uvm_offload.routing.counts import ALL_ROWS, Phase

pytestmark = pytest.mark.sglang


def batch_of(mode, rows, requests=0, **more):
    """SGLang's own, of so many rows."""
    number = torch.zeros(requests, dtype=torch.int64)
    held = {"req_pool_indices": number, "seq_lens": number, "out_cache_loc": torch.zeros(rows, dtype=torch.int64)}
    ids = torch.zeros(rows, dtype=torch.int64)
    return ForwardBatch(forward_mode=mode, batch_size=requests, input_ids=ids, seq_lens_sum=0, **held, **more)


@pytest.fixture(autouse=True)
def exchange(monkeypatch):
    """Sets SGLang's all-to-all backend, at first none."""

    def through(name):
        monkeypatch.setattr(step_hooks, "get_moe_a2a_backend", lambda: MoeA2ABackend(name))

    through("none")
    return through


def step(mode, own, everywhere=None, extends=False):
    return step_hooks.step_of(batch_of(mode, own, global_num_tokens_cpu=everywhere, is_extend_in_batch=extends))


@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        (ForwardMode.DECODE, Phase.DECODE),
        (ForwardMode.TARGET_VERIFY, Phase.DECODE),
        (ForwardMode.EXTEND, Phase.PREFILL),
        (ForwardMode.MIXED, Phase.PREFILL),
    ],
)
def test_alone_a_rank_counts_its_own_rows(mode, phase):
    assert step(mode, 5) == (5, 5, phase)


def test_an_idle_rank_alone_counts_nothing():
    assert step(ForwardMode.IDLE, 0)[:2] == (0, 0)


@pytest.mark.parametrize(("mode", "own"), [(ForwardMode.IDLE, 0), (ForwardMode.DECODE, 4), (ForwardMode.EXTEND, 1000)])
def test_ranks_that_compute_gathered_tokens_give_the_step_one_name(mode, own):
    """A prefill of one rank is no decode step of another that computes it too."""
    assert step(mode, own, [0, 4, 1000], extends=True) == (ALL_ROWS, 1004, Phase.PREFILL)


def test_gathered_decoding_is_decoding_for_an_idle_rank_too():
    assert step(ForwardMode.IDLE, 0, [0, 4]) == (ALL_ROWS, 4, Phase.DECODE)
    assert step(ForwardMode.IDLE, 0, [0, 0])[:2] == (0, 0)


def test_experts_that_are_sent_tokens_count_them_though_their_rank_has_none(exchange):
    """SGLang gives such a rank the counts of all (``require_mlp_tp_gather``), or, if dense layers and the head are its own too,
    that of its own only."""
    exchange("deepep")
    assert step(ForwardMode.IDLE, 0, [0]) == (ALL_ROWS, 1, Phase.DECODE)
    assert step(ForwardMode.DECODE, 4, [4]) == (ALL_ROWS, 4, Phase.DECODE)
    assert step(ForwardMode.IDLE, 0, [0], extends=True)[2] is Phase.PREFILL
    assert step(ForwardMode.IDLE, 0, [0, 4]) == (ALL_ROWS, 4, Phase.DECODE)


@pytest.mark.parametrize(
    ("lengths", "everywhere", "unfinished", "ends"),
    [
        ([3, 1, 5], None, None, [3, 4, 9]),
        ([3, 1, 5], None, "c", [3, 4]),  # its prompt goes on in a later step
        ([3, 1, 5], None, "a", [4, 9]),
        ([9], None, "a", []),
        ([3, 1, 5], None, "of another batch", [3, 4, 9]),
        (None, None, None, list(range(1, 10))),  # decoded together
        ([9], [9, 0, 4], None, [9, 9, 13]),  # gathered: rows of all ranks
        ([9], [9, 0, 4], "a", [9, 9, 13]),
        ([9], None, "before there is a scheduler", [9]),
    ],
)
def test_prompts_end_in_a_prefill_where_the_last_rows_of_their_last_chunks_do(lengths, everywhere, unfinished, ends):
    told = []
    rank = RankState(served_config(num_resident=1, slots=2))
    rank.backend = Emulated()
    rank.manager = SimpleNamespace(begin_step=lambda *args, **kwargs: None, end_step=lambda model: None)
    rank.slots = SimpleNamespace(begin_step=lambda rows, phase, ends: told.append(ends))
    runner = SimpleNamespace(_expert_offload_model=SimpleNamespace(draft=False))
    rids = ["a", "b", "c"][: len(lengths or "abc")]
    told_of = {"extend_seq_lens_cpu": lengths, "global_num_tokens_cpu": everywhere, "is_extend_in_batch": True, "rids": rids}
    batch = batch_of(ForwardMode.EXTEND, 9, len(rids), **told_of)
    if unfinished != "before there is a scheduler":
        rank.scheduler = SimpleNamespace(chunked_req=None if unfinished is None else SimpleNamespace(rid=unfinished))
    step_hooks.StepHooks(rank).around_forward(lambda runner, batch: None, runner, batch)
    assert told == [ends]


def test_long_prompts_fill_slots_and_stream_from_them(monkeypatch):
    hooks = []
    scheduler_hooks.install(served_config(num_resident=1, slots=2), lambda target, hook, kind: hooks.append(hook))
    loading = next(hook.__self__ for hook in hooks if isinstance(getattr(hook, "__self__", None), loading_hooks.LoadingHooks))
    rank = loading.rank
    rank.backend = Emulated()
    slots = SimpleNamespace(at=lambda address: None, slot_of=lambda row: None)
    monkeypatch.setattr(loading_hooks, "make_slots", lambda model, backend: slots)
    loading._begin_slots(None)
    assert rank.slots is rank.layer_hooks.slots is slots
    streamer = rank.layer_hooks.streamer = SimpleNamespace()
    loading._begin_slots(None)
    assert streamer.slot_of is slots.slot_of


def test_a_rank_decides_and_moves_on_two_threads():
    rank = RankState(served_config(adapt="continuous"))
    rank.backend = Emulated()
    moves, decides = (one.submit(threading.get_ident).result() for one in (rank.manager.worker.executor, rank.manager._decider))
    assert len({moves, decides, threading.get_ident()}) == 3


def test_a_server_that_may_have_no_further_thread_decides_and_moves():
    rank = RankState(served_config(adapt="continuous"))
    rank.backend = Emulated()
    executors = (rank.manager.worker.executor, rank.manager._decider)
    with no_further_thread():
        assert [one.submit(int).result() for one in executors] == [0, 0]


@pytest.mark.parametrize(
    ("mode", "rows", "draft", "streams", "told"),
    [
        (ForwardMode.TARGET_VERIFY, 4, False, False, True),
        (ForwardMode.TARGET_VERIFY, 4, True, False, False),
        (ForwardMode.TARGET_VERIFY, 4, False, True, False),
        (ForwardMode.EXTEND, 4, False, False, False),
        (ForwardMode.IDLE, 0, False, False, False),
    ],
)
def test_what_chooses_the_number_of_drafts_is_told_of_each_step_that_counts_as_decoding(
    monkeypatch, mode, rows, draft, streams, told
):
    """Before the step is counted: what it polls is of whole steps."""
    happened = []
    monkeypatch.setattr(step_hooks, "is_eager", lambda runner, batch, phase: True)
    rank = RankState(served_config(draft_policy="misses"))
    rank.backend = Emulated()
    rank.manager = SimpleNamespace(begin_step=lambda *args, **kwargs: happened.append("counted"), end_step=lambda model: None)
    rank.draft_lengths = SimpleNamespace(begin_step=lambda: happened.append("told"))
    rank.layer_hooks.streamer = SimpleNamespace(streams=lambda tokens: streams, begin_step=lambda: None, end_step=lambda: None)
    runner = SimpleNamespace(_expert_offload_model=SimpleNamespace(draft=draft))
    batch = batch_of(mode, rows)
    step_hooks.StepHooks(rank).around_forward(lambda runner, batch: None, runner, batch)
    assert happened == ["told", "counted"][not told :]


@pytest.mark.parametrize(("everywhere", "rows"), [(None, 3), ([3, 4], ALL_ROWS)])
def test_a_step_that_a_graph_of_drafts_replays_counts_the_rows_before_the_padding(everywhere, rows):
    """Gathered, padding may be anywhere."""
    steps = []
    rank = RankState(served_config(draft_num_resident=2))
    rank.manager = SimpleNamespace(
        begin_step=lambda model, rows, tokens, phase: steps.append((model, rows, phase)), end_step=steps.append
    )
    graphs = SimpleNamespace(model_runner=SimpleNamespace(_expert_offload_model="draft"))
    batch = batch_of(ForwardMode.DECODE, 3, 3, positions=torch.tensor([7, 8, 9]), global_num_tokens_cpu=everywhere)
    ran = step_hooks.StepHooks(rank).around_draft_graph(
        lambda graphs, batch, more: (steps.append("ran"), more), graphs, batch, "more"
    )
    assert ran == (None, "more")
    assert steps == [("draft", rows, Phase.DECODE), "ran", "draft"]
