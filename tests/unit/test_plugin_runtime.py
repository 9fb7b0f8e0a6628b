"""What a forward step is to the counters: its rows, its tokens and its phase, on one rank and on ranks that exchange tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_uvm_offload.plugin import runtime
from sglang_uvm_offload.routing.counts import ALL_ROWS, Phase


def step(monkeypatch, mode, own, everywhere=None, extends=False, a2a="none"):
    monkeypatch.setattr(runtime, "get_moe_a2a_backend", lambda: SimpleNamespace(is_none=lambda: a2a == "none"))
    batch = SimpleNamespace(
        forward_mode=mode, input_ids=[0] * own, global_num_tokens_cpu=everywhere, is_extend_in_batch=extends
    )
    return runtime._step_of(batch)


@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        (ForwardMode.DECODE, Phase.DECODE),
        (ForwardMode.TARGET_VERIFY, Phase.DECODE),
        (ForwardMode.EXTEND, Phase.PREFILL),
        (ForwardMode.MIXED, Phase.PREFILL),
    ],
)
def test_alone_a_rank_counts_its_own_rows(monkeypatch, mode, phase):
    assert step(monkeypatch, mode, 5) == (5, 5, phase)


def test_an_idle_rank_alone_counts_nothing(monkeypatch):
    assert step(monkeypatch, ForwardMode.IDLE, 0)[:2] == (0, 0)


@pytest.mark.parametrize(("mode", "own"), [(ForwardMode.IDLE, 0), (ForwardMode.DECODE, 4), (ForwardMode.EXTEND, 1000)])
def test_ranks_that_compute_gathered_tokens_give_the_step_one_name(monkeypatch, mode, own):
    """A prefill of one rank is no decode step of another that computes it too."""
    assert step(monkeypatch, mode, own, [0, 4, 1000], extends=True) == (ALL_ROWS, 1004, Phase.PREFILL)


def test_gathered_decoding_is_decoding_for_an_idle_rank_too(monkeypatch):
    assert step(monkeypatch, ForwardMode.IDLE, 0, [0, 4]) == (ALL_ROWS, 4, Phase.DECODE)
    assert step(monkeypatch, ForwardMode.IDLE, 0, [0, 0])[:2] == (0, 0)


def test_experts_that_are_sent_tokens_count_them_though_their_rank_has_none(monkeypatch):
    """SGLang gives such a rank its own count only: with an all-to-all backend it gathers nothing beforehand."""
    assert step(monkeypatch, ForwardMode.IDLE, 0, [0], a2a="deepep") == (ALL_ROWS, 1, Phase.DECODE)
    assert step(monkeypatch, ForwardMode.DECODE, 4, [4], a2a="deepep") == (ALL_ROWS, 4, Phase.DECODE)
    assert step(monkeypatch, ForwardMode.IDLE, 0, [0], extends=True, a2a="deepep")[2] is Phase.PREFILL
