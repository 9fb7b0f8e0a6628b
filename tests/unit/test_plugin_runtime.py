"""What a forward step is to the counters and the slots: its rows, its tokens, its phase and where its requests end, on one rank
and on ranks that exchange tokens. And what of a rank learns of its slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from builders.configs import served_config
from builders.gathered import IDLE, Local, gathered
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


def step(mode, rows, **more):
    return step_hooks.step_of(batch_of(mode, rows, **more))


def gathered_step(ranks, own, a2a="none", **sizes):
    """The step of rank ``own``."""
    return step(*ranks[own], **gathered(ranks, own, a2a, **sizes))


DECODES, PREFILLS = Local(ForwardMode.DECODE, 4), Local(ForwardMode.EXTEND, 1000)


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


@pytest.mark.parametrize("own", range(3))
def test_ranks_that_compute_gathered_tokens_give_the_step_one_name(own):
    """A prefill of one rank is no decode step of another that computes it too."""
    assert gathered_step([IDLE, DECODES, PREFILLS], own) == (ALL_ROWS, 1004, Phase.PREFILL)


def test_gathered_decoding_is_decoding_for_an_idle_rank_too():
    assert gathered_step([IDLE, DECODES], 0) == (ALL_ROWS, 4, Phase.DECODE)
    assert gathered_step([IDLE, IDLE], 0)[:2] == (0, 0)


def test_experts_that_are_sent_tokens_count_them_though_their_rank_has_none(exchange):
    """SGLang gives such a rank the counts of all, or, if dense layers and the head are its own too, that of its own only."""
    exchange("deepep")
    own = {"a2a": "deepep", "dense_tp_size": 1}
    assert gathered_step([IDLE, DECODES], 0, **own) == (ALL_ROWS, 1, Phase.DECODE)
    assert gathered_step([IDLE, DECODES], 1, **own) == (ALL_ROWS, 4, Phase.DECODE)
    assert gathered_step([IDLE, PREFILLS], 0, **own) == (ALL_ROWS, 1, Phase.PREFILL)
    assert gathered_step([IDLE, DECODES], 0, "deepep") == (ALL_ROWS, 4, Phase.DECODE)


@pytest.mark.parametrize(
    ("lengths", "others", "unfinished", "requests"),
    [
        ([3, 1, 5], (), None, [(0, 3), (3, 4), (4, 9)]),
        ([3, 1, 5], (), "c", [(0, 3), (3, 4)]),  # its prompt goes on in a later step
        ([3, 1, 5], (), "a", [(3, 4), (4, 9)]),
        ([9], (), "a", []),
        ([3, 1, 5], (), "of another batch", [(0, 3), (3, 4), (4, 9)]),
        (None, (), None, [(row, row + 1) for row in range(9)]),  # decoded together
        ([9], (IDLE, DECODES), None, [(0, 9), (9, 9), (9, 13)]),  # gathered: rows of all ranks
        ([9], (IDLE, DECODES), "a", [(0, 9), (9, 9), (9, 13)]),
        ([9], (), "before there is a scheduler", [(0, 9)]),
    ],
)
def test_prompts_end_in_a_prefill_where_the_last_rows_of_their_last_chunks_do(lengths, others, unfinished, requests):
    begun = []
    rank = RankState(served_config(num_resident=1, slots=2))
    rank.backend = Emulated()
    rank.manager = SimpleNamespace(begin_step=lambda *args, **kwargs: None, end_step=lambda model: None)
    rank.slots = SimpleNamespace(begin_step=lambda rows, phase, requests, streams: begun.append(requests))
    runner = SimpleNamespace(_expert_offload_model=SimpleNamespace(draft=False))
    rids = ["a", "b", "c"][: len(lengths or "abc")]
    shared = gathered([Local(ForwardMode.EXTEND, 9), *others], 0) if others else {}
    batch = batch_of(ForwardMode.EXTEND, 9, len(rids), extend_seq_lens_cpu=lengths, rids=rids, **shared)
    if unfinished != "before there is a scheduler":
        rank.scheduler = SimpleNamespace(chunked_req=None if unfinished is None else SimpleNamespace(rid=unfinished))
    step_hooks.StepHooks(rank).around_forward(lambda runner, batch: None, runner, batch)
    assert begun == [requests]


def test_a_server_that_may_have_no_further_thread_decides_and_moves():
    rank = RankState(served_config(adapt="continuous"))
    rank.backend = Emulated()
    executors = (rank.manager.mover.executor, rank.manager._decider)
    with no_further_thread():
        assert [one.submit(int).result() for one in executors] == [0, 0]


@pytest.mark.parametrize(("others", "rows"), [((), 3), ((DECODES,), ALL_ROWS)])
def test_a_step_that_a_graph_of_drafts_replays_counts_the_rows_before_the_padding(others, rows):
    """Gathered, padding may be anywhere."""
    steps = []
    rank = RankState(served_config(draft_num_resident=2))
    rank.manager = SimpleNamespace(
        begin_step=lambda model, rows, tokens, phase: steps.append((model, rows, phase)), end_step=steps.append
    )
    graphs = SimpleNamespace(model_runner=SimpleNamespace(_expert_offload_model="draft"))
    shared = gathered([Local(ForwardMode.DECODE, 3), *others], 0) if others else {}
    batch = batch_of(ForwardMode.DECODE, 3, 3, positions=torch.tensor([7, 8, 9]), **shared)
    ran = step_hooks.StepHooks(rank).around_draft_graph(
        lambda graphs, batch, more: (steps.append("ran"), more), graphs, batch, "more"
    )
    assert ran == (None, "more")
    assert steps == [("draft", rows, Phase.DECODE), "ran", "draft"]


@pytest.mark.parametrize(("tokens", "streams"), [(7, False), (8, True)])
def test_slots_are_told_of_a_step_that_streams_before_it_brings_anything(tokens, streams):
    calls = []
    rank = RankState(served_config(num_resident=1, slots=2))
    rank.backend = Emulated()
    rank.manager = SimpleNamespace(
        begin_step=lambda *args, streams: calls.append(("manager", streams)), end_step=lambda model: calls.append("end")
    )
    rank.slots = SimpleNamespace(begin_step=lambda *args, streams: calls.append(("slots", streams)))
    rank.layer_hooks.streamer = SimpleNamespace(
        streams=lambda tokens: tokens >= 8,
        begin_step=lambda: calls.append("brings"),
        end_step=lambda: calls.append("brought"),
    )
    runner = SimpleNamespace(_expert_offload_model=SimpleNamespace(draft=False))
    batch = batch_of(ForwardMode.EXTEND, tokens, 1, extend_seq_lens_cpu=[tokens], rids=["a"])
    step_hooks.StepHooks(rank).around_forward(lambda runner, batch: calls.append("ran"), runner, batch)
    around = (["brings"], ["brought"]) if streams else ([], [])
    assert calls == [("manager", streams), ("slots", streams), *around[0], "ran", *around[1], "end"]


def test_the_code_that_computes_a_layer_finds_its_slots(monkeypatch):
    hooks = []
    scheduler_hooks.install(served_config(num_resident=1, slots=2), lambda target, hook, kind: hooks.append(hook))
    loading = next(hook.__self__ for hook in hooks if isinstance(getattr(hook, "__self__", None), loading_hooks.LoadingHooks))
    rank = loading.rank
    rank.backend = Emulated()
    slots = SimpleNamespace(at=lambda address: None)
    monkeypatch.setattr(loading_hooks, "make_slots", lambda model, backend, guess: slots)
    loading._begin_slots(None, None)
    assert rank.slots is rank.layer_hooks.slots is slots
    assert rank.seams
    assert all(seam.find is slots.at for seam in rank.seams)
