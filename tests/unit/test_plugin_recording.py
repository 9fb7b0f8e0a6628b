"""Which steps of SGLang's are recorded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from builders.locations import located
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_uvm_offload.plugin.rank.recording import Recording
from sglang_uvm_offload.routing.layer_routing import LayerRouting
from sglang_uvm_offload.routing.recorder import Recorder

pytestmark = pytest.mark.sglang


@pytest.fixture
def recording(tmp_path):
    made = Recording(tmp_path / "trace.npz")
    made.recorder = Recorder(made.path, locations=located(1, 8), top_k=2, max_rows=4, device="cpu")
    return made


def launch(recording: Recording, mode: ForwardMode, lengths: list[int] | None, draft: bool = False) -> tuple[int, int]:
    """A step of the requests a and b; returns the recorded tokens and the dropped steps."""
    nothing = torch.zeros(2, dtype=torch.int64)
    batch = ForwardBatch(mode, 2, nothing, nothing, nothing, nothing, 0, rids=["a", "b"])
    batch.seq_lens_cpu = None if lengths is None else torch.tensor(lengths)
    recording.after_forward(None, SimpleNamespace(is_draft_worker=draft), batch)
    status = recording.status()
    return status.tokens, status.dropped_steps


@pytest.mark.parametrize("mode", [mode for mode in ForwardMode if mode != ForwardMode.DECODE])
def test_only_decode_steps_are_recorded(mode, recording):
    assert launch(recording, mode, [5, 6]) == (0, 0)
    assert launch(recording, ForwardMode.DECODE, [5, 6]) == (2, 0)


@pytest.mark.parametrize("lengths", [None, [5, 6, 1]])
def test_a_step_whose_requests_lengths_are_not_known_is_dropped_and_counted(lengths, recording):
    assert launch(recording, ForwardMode.DECODE, lengths) == (0, 1)


def test_a_step_for_which_there_is_no_memory_ends_recording_and_not_the_server(recording, monkeypatch, caplog):
    assert launch(recording, ForwardMode.DECODE, [5, 6]) == (2, 0)

    def short(*args):
        raise MemoryError("no room")

    monkeypatch.setattr(recording.recorder.log, "add", short)
    assert launch(recording, ForwardMode.DECODE, [6, 7]) == (2, 0)
    assert "trace: recording stopped: MemoryError: no room" in caplog.text
    assert recording.status().stopped
    assert launch(recording, ForwardMode.DECODE, [7, 8]) == (2, 0)


def test_a_router_that_fails_ends_guessing_and_neither_the_recording_nor_the_server(recording, caplog):
    class Failing:
        def guesses(self, *_):
            raise RuntimeError("mat1 and mat2")

    recording.lookahead = Failing()
    for length in (5, 6):
        recording.record(0, LayerRouting("standard", torch.tensor([[length, 1]]), lasting=True), 0, torch.zeros(1, 4))
        recording.recorder.end_step(["a"], [length])
    recording.recorder.poll()
    assert recording.recorder.log.trace(2).ids.tolist() == [[[5, 1]], [[6, 1]]]
    assert [record.getMessage() for record in caplog.records] == [
        "Expert offload: the trace gets no more guesses: RuntimeError: mat1 and mat2"
    ]


def test_a_model_of_unknown_experts_per_token_is_refused_when_it_is_built(recording):
    assert recording.problems(SimpleNamespace(top_k=2, moe_layers=(1, 2))) == []
    (problem,) = recording.problems(SimpleNamespace(top_k=None, moe_layers=(1, 2)))
    assert problem.startswith("--expert-offload-config trace: neither this model's layers nor its config")


def test_a_model_whose_tokens_skip_moe_layers_is_refused_when_it_is_built(recording):
    (problem,) = recording.problems(SimpleNamespace(top_k=2, moe_layers=(1, 1, 2)))
    assert problem.startswith("--expert-offload-config trace: decoder layers of this model have several routers")
