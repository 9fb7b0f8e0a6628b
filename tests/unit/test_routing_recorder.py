"""Recording on the host side: whose tokens they are, when they arrive, what bounds them, and what is saved of them."""

import logging

import numpy as np
import pytest
import torch
from builders.locations import located
from paths import SAFETENSORS

from sglang_uvm_offload.expert_location import ExpertLocation
from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.routing.counts import IdFormat
from sglang_uvm_offload.routing.recorder import RING_STEPS, Guessing, Recorder
from sglang_uvm_offload.routing.trace import Trace, is_trace

LAYERS, E, K = 3, 3000, 2


class Traffic:
    """A recorder and what it is given. Token ``n`` picks, in layer ``l``, the experts ``10 n + l`` and, next to it, -1."""

    def __init__(self, path, max_rows=8, max_tokens=1000):
        self.path = path / "trace.npz"
        self.recorder = Recorder(self.path, located(LAYERS, E), K, max_rows, "cpu", max_bytes=max_tokens * LAYERS * K * 2)
        self.tokens = 0

    def step(self, *requests, padding=0):
        """A decode step of ``(name, length)`` requests; returns the numbers of their tokens."""
        tokens = list(range(self.tokens, self.tokens + len(requests)))
        self.tokens += len(requests)
        for layer in range(LAYERS):
            ids = [[10 * n + layer, -1] for n in tokens] + [[77, 78]] * padding
            self.recorder.record(layer, torch.tensor(ids, dtype=torch.int32), IdFormat.PLAIN)
        self.recorder.end_step([name for name, _ in requests], [length for _, length in requests])
        return tokens

    def save(self):
        write = self.recorder.pending(True)
        if write is not None:
            write()

    def recorded(self):
        """The tokens of each request, by number, as saved."""
        self.save()
        trace = Trace.load(self.path)
        assert trace.num_experts == E
        numbers = trace.ids[:, 0, 0] // 10
        expected = 10 * numbers[:, None] + np.arange(LAYERS)
        assert (trace.ids[:, :, 0] == expected).all()
        assert (trace.ids[:, :, 1] == -1).all()
        return [part.tolist() for part in np.split(numbers, np.cumsum(trace.seq_len)[:-1])]


@pytest.fixture
def traffic(tmp_path):
    return Traffic(tmp_path)


@pytest.fixture
def device(traffic):
    """The events that tell when a step's ids are on the host, as on a GPU, in the order of their use. Here the ids are there at
    once."""

    class Event:
        def record(self):
            self.done = False

        def query(self):
            return self.done

        def synchronize(self):
            self.done = True

    for slot in traffic.recorder._free:
        slot.arrived = Event()
    return [slot.arrived for slot in reversed(traffic.recorder._free)]


@pytest.mark.parametrize(
    ("steps", "recorded"),
    [  # each step: requests with their lengths
        ([{"a": 5}, {"a": 6, "b": 9}, {"b": 10, "a": 7, "c": 2}], [[0, 1, 4], [2, 3], [5]]),  # one after the other
        ([{"a": length, "b": length} for length in range(100)], [list(range(0, 200, 2)), list(range(1, 200, 2))]),
        ([{"a": 5}, {"a": 6, "b": 4}, {"b": 5}, {"b": 6, "a": 7}], [[0, 1], [2, 3, 4], [5]]),  # a name that comes again
        ([{"a": 5, "b": 4}, {"a": 7, "b": 5}], [[0], [1, 3], [2]]),  # retracted and prefilled again in between
    ],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_requests_are_saved_one_after_another_each_in_its_own_order(traffic, steps, recorded, padding):
    for step in steps:
        traffic.step(*step.items(), padding=padding)
    assert traffic.recorded() == recorded


class TestSteps:
    def test_packed_ids_are_unpacked(self, traffic):
        ids = torch.tensor([[3, 2999], [40, 5]], dtype=torch.int32)
        for layer in range(LAYERS):
            traffic.recorder.record(layer, (ids << 16) | 0x3F80, IdFormat.PACKED)
        traffic.recorder.end_step(["a", "b"], [1, 1])
        traffic.save()
        assert Trace.load(traffic.path).ids.tolist() == [[row] * LAYERS for row in ids.tolist()]

    def test_the_checkpoints_ids_are_saved_wherever_experts_lie(self, tmp_path):
        backwards = ExpertLocation(np.arange(4)[::-1], range(4))
        recorder = Recorder(tmp_path / "t.npz", [backwards, ExpertLocation(np.array([0, 1, 2, 1, 3]), range(5))], 2, 4, "cpu")
        recorder.record(0, torch.tensor([[0, 3], [2, -1]]), IdFormat.PLAIN)
        recorder.record(1, torch.tensor([[4, 3], [-1, 2]]), IdFormat.PLAIN)
        recorder.end_step(["a", "b"], [1, 1])
        recorder.pending(True)()
        saved = Trace.load(tmp_path / "t.npz")
        assert saved.ids.tolist() == [[[3, 0], [3, 1]], [[1, -1], [-1, 2]]]
        assert saved.num_experts == 4

    def test_rows_beyond_the_buffer_are_left_out(self, traffic):
        long = torch.arange(200, dtype=torch.int32).reshape(100, 2)
        for id_format in IdFormat:
            traffic.recorder.record(0, long, id_format)
        traffic.step(("a", 5))
        assert traffic.recorded() == [[0]]

    def test_a_step_that_cannot_be_recorded_is_dropped_and_counted_and_told_once(self, traffic, caplog):
        traffic.step(("a", 5))
        for length in (6, 7):
            traffic.recorder.end_step(["a", *map(str, range(8))], [length] * 9)
        traffic.recorder.end_step(["a", "a"], [8, 8])
        traffic.tokens = 1
        traffic.step(("a", 9))
        assert traffic.recorded() == [[0], [1]]
        assert traffic.recorder.dropped_steps == 3
        (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert "it has 9 requests; at most 8" in said

    def test_ids_that_are_no_experts_end_the_recording_and_what_was_there_is_saved(self, traffic, device, caplog):
        traffic.step(("a", 5))
        traffic.recorder.record(1, torch.tensor([[E, 0]], dtype=torch.int32), IdFormat.PLAIN)
        traffic.recorder.end_step(["a"], [6])
        traffic.step(("a", 7))
        assert traffic.recorded() == [[0]]
        assert f"expert ids -1 to {E}, and the model has experts 0 to {E - 1}" in caplog.text


class TestGuesses:
    FOLDED = np.array([[False, False], [True, False], [True, True]])

    def guessing(self, path, max_bytes=1 << 20):
        return Recorder(path / "t.npz", located(3, E), K, 4, "cpu", max_bytes, guessing=Guessing(self.FOLDED, 3))

    def step(self, recorder, lengths):
        """Requests a and b. Token ``n`` of the step picks ``10 n + l`` in layer ``l``; ``100 n + 10 d + l`` and the two behind
        it are guessed for it ``d`` layers before."""
        token = torch.arange(2, dtype=torch.int32)[:, None]
        for layer in range(3):
            recorder.record(layer, 10 * token + torch.tensor([[layer, -1]]), IdFormat.PLAIN)
            for distance in range(1, min(layer, 2) + 1):
                recorder.record_guess(layer, distance, 100 * token + 10 * distance + layer + torch.arange(3))
        recorder.end_step(["a", "b"], lengths)

    def test_they_are_saved_with_the_token_and_the_layer_that_they_are_for(self, tmp_path):
        recorder = self.guessing(tmp_path)
        for length in range(2):
            self.step(recorder, [length, length])
        recorder.pending(True)()
        saved = Trace.load(recorder.path)
        assert saved.ids[:, :, 0].tolist() == [[0, 1, 2]] * 2 + [[10, 11, 12]] * 2
        none = [-1, -1, -1]
        of_a = [[none, none], [[11, 12, 13], none], [[12, 13, 14], [22, 23, 24]]]
        assert saved.guesses.experts[:2].tolist() == [of_a] * 2, "layers without an earlier one have none"
        assert saved.guesses.experts[2:, 2, 1].tolist() == [[122, 123, 124]] * 2
        assert (saved.guesses.folded == self.FOLDED).all()

    def test_the_experts_places_do_not_concern_them(self, tmp_path):
        """A router chooses among the checkpoint's experts, wherever they lie."""
        backwards = [ExpertLocation(np.arange(4)[::-1], range(4))] * 2
        recorder = Recorder(tmp_path / "t.npz", backwards, 1, 4, "cpu", guessing=Guessing(np.zeros((2, 1), bool), 1))
        for layer in range(2):
            recorder.record(layer, torch.tensor([[0]]), IdFormat.PLAIN)
        recorder.record_guess(1, 1, torch.tensor([[3]]))
        recorder.end_step(["a"], [1])
        recorder.pending(True)()
        saved = Trace.load(recorder.path)
        assert saved.ids.tolist() == [[[3], [3]]]
        assert saved.guesses.experts.tolist() == [[[[-1]], [[3]]]]

    def test_they_count_towards_the_bound(self, tmp_path):
        of_a_token = 2 * 3 * (K + 2 * 3)
        recorder = self.guessing(tmp_path, max_bytes=5 * of_a_token)
        for length in range(3):
            self.step(recorder, [length, length])
        recorder.poll(wait=True)
        assert (recorder.log.tokens, recorder.stopped) == (4, True)

    def test_rows_beyond_the_buffer_are_left_out(self, tmp_path):
        recorder = self.guessing(tmp_path)
        recorder.record_guess(1, 1, torch.arange(300).reshape(100, 3))
        assert recorder._buffer[:, 1, K : K + 3].tolist() == torch.arange(12).reshape(4, 3).tolist()


class TestArriving:
    def test_nothing_waits_and_what_has_arrived_is_taken_in_order(self, traffic, device):
        traffic.step(("a", 1))
        traffic.step(("a", 2))
        device[1].done = True
        assert traffic.recorder.pending(False) is None  # the second has arrived, the first has not
        device[0].done = True
        traffic.recorder.poll()
        assert traffic.recorder.log.tokens == 2
        traffic.step(("a", 3))
        assert traffic.recorded() == [[0, 1, 2]], "the end waits for what is on its way"

    def test_steps_for_which_the_host_has_no_place_are_dropped_and_a_request_begins_anew_after_them(self, traffic, device):
        for length in range(RING_STEPS + 2):
            traffic.step(("a", length))
        assert traffic.recorder.dropped_steps == 2
        for event in device:
            event.done = True
        traffic.step(("a", RING_STEPS + 2))
        first = list(range(RING_STEPS))  # which later steps have not changed
        assert traffic.recorded() == [first, [RING_STEPS + 2]]


class TestSaving:
    def test_recording_stops_at_its_bound_and_what_fitted_is_saved_and_told(self, tmp_path, caplog):
        traffic = Traffic(tmp_path, max_tokens=4)
        traffic.step(("a", 1), ("b", 1))
        traffic.step(("a", 2))
        traffic.step(("a", 3), ("b", 2))
        for length in range(4, 4 + 2 * RING_STEPS):
            traffic.step(("a", length))
        assert traffic.recorded() == [[0, 2], [1]]
        assert "recording stopped after 3 tokens" in caplog.text
        assert traffic.recorder.dropped_steps == 0
        assert [record.levelname for record in caplog.records].count("WARNING") == 1

    def test_only_what_is_new_is_saved(self, traffic, caplog):
        assert traffic.recorder.pending(True) is None
        traffic.step(("a", 5))
        with caplog.at_level(logging.INFO):
            traffic.save()
        assert f"1 tokens of 1 requests saved to {traffic.path} (0 steps not recorded)" in caplog.text
        assert traffic.recorder.pending(True) is None
        traffic.step(("a", 6))
        assert traffic.recorder.pending(True) is not None

    def test_a_save_holds_the_moment_it_was_asked_for_while_recording_goes_on(self, traffic):
        traffic.step(("a", 5), ("b", 5))
        write = traffic.recorder.pending(False)
        traffic.step(("a", 6), ("b", 6))
        traffic.recorder.poll()
        write()
        assert Trace.load(traffic.path).seq_len.tolist() == [1, 1]
        assert traffic.recorded() == [[0, 2], [1, 3]]

    def test_a_file_that_is_no_trace_is_not_replaced_and_a_save_that_failed_is_tried_again(self, traffic, caplog):
        """It may have come after the launch, which refuses it. The saver says so, and does not raise."""
        traffic.step(("a", 5))
        traffic.path.write_bytes(SAFETENSORS)
        Saver("trace", traffic.recorder.pending).finish()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert f"{traffic.path}: exists and is not a routing trace" in caplog.text
        assert traffic.path.read_bytes() == SAFETENSORS
        traffic.path.unlink()
        assert traffic.recorded() == [[0]]

    def test_only_an_npz_with_the_arrays_of_a_trace_and_no_others_is_one(self, tmp_path):
        arrays = {"ids": np.zeros((2, 1, 1), np.int8), "seq_len": np.array([2]), "num_experts": np.int64(1)}
        kinds = [
            (arrays, True),
            ({**arrays, "hidden_states": np.zeros(2)}, False),
            ({**arrays, "num_experts": np.float64(1)}, False),
            ({name: arrays[name] for name in ("ids", "seq_len")}, False),
        ]
        for number, (held, expected) in enumerate(kinds):
            np.savez(tmp_path / f"{number}.npz", **held)
            assert is_trace(tmp_path / f"{number}.npz") == expected
        Trace(**arrays).save(tmp_path / "own.npz")
        assert is_trace(tmp_path / "own.npz")
