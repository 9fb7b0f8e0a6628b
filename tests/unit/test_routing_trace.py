"""Reading traces that may be anything, and batching their requests into steps."""

import contextlib
import io
import os
import pickle
import zipfile

import numpy as np
import pytest
from damage import flipped_bytes

from sglang_uvm_offload.routing import trace as trace_module
from sglang_uvm_offload.routing.trace import Trace, TraceError


def some(seq_len=(2, 3, 1), layers=2, k=2, experts=8, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, experts, (sum(seq_len), layers, k))
    return Trace(ids, np.array(seq_len), experts)


def write(path, **arrays):
    np.savez(path, **arrays)
    return path


GOOD = {"ids": np.zeros((3, 2, 1), np.uint8), "seq_len": np.array([1, 2], np.int32), "num_experts": np.int64(4)}


class TestFile:
    def test_what_is_saved_is_loaded(self, tmp_path):
        saved = some()
        saved.save(tmp_path / "t.npz")
        loaded = Trace.load(tmp_path / "t.npz")
        assert (loaded.ids == saved.ids).all()
        assert (loaded.seq_len == saved.seq_len).all()
        assert loaded.num_experts == 8

    def test_unsigned_ids_and_missing_experts_are_fine(self, tmp_path):
        assert Trace.load(write(tmp_path / "a.npz", **GOOD)).num_layers == 2
        loaded = Trace.load(write(tmp_path / "b.npz", **{**GOOD, "ids": np.full((3, 2, 1), -1, np.int8)}))
        assert loaded.ids.max() == -1

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"ids": np.zeros((3, 2), np.uint8)}, "token, layer, k"),
            ({"ids": np.zeros((3, 0, 1), np.uint8)}, r"one layer and one expert a token, not \[3, 0, 1\]"),
            ({"ids": np.zeros((3, 2, 0), np.uint8)}, r"one layer and one expert a token, not \[3, 2, 0\]"),
            ({"ids": np.zeros((3, 2, 1))}, "integers"),
            ({"ids": np.full((3, 2, 1), 4)}, "0..0|-1..3"),
            ({"ids": np.full((3, 2, 1), -2)}, "-1..3"),
            ({"ids": np.array([[[None]]] * 3, dtype=object)}, "plain array|declares"),
            ({"seq_len": np.array([1, 1])}, "2 tokens"),
            ({"seq_len": np.array([4, -1])}, "seq_len must"),
            ({"seq_len": np.array([1.0, 2.0])}, "seq_len must"),
            ({"seq_len": np.array([2**63, 2**63 + 3], np.uint64)}, "seq_len must"),
            ({"seq_len": np.array([[1, 1], [1, 0]])}, r"seq_len must be integers \[request\], not int64 \[2, 2\]"),
            ({"seq_len": np.zeros((0, 3), int)}, r"not int64 \[0, 3\]"),
            ({"num_experts": np.int64(0)}, "num_experts"),
            ({"num_experts": np.int64(10**9)}, "num_experts"),
            ({"num_experts": np.float64(4)}, "num_experts"),
            ({"num_experts": np.array([4, 4])}, "num_experts"),
        ],
    )
    def test_what_is_no_trace_is_refused_with_the_reason(self, tmp_path, change, message):
        with pytest.raises(TraceError, match=message):
            Trace.load(write(tmp_path / "t.npz", **{**GOOD, **change}))

    @pytest.mark.parametrize("seq_len", [3, [3], [[3]], [[1], [2]], [[1, 2]]])
    def test_lengths_along_one_axis_are_those_of_the_requests(self, tmp_path, seq_len):
        loaded = Trace.load(write(tmp_path / "t.npz", **{**GOOD, "seq_len": np.array(seq_len)}))
        assert loaded.seq_len.tolist() == np.ravel(seq_len).tolist()

    @pytest.mark.parametrize("missing", GOOD)
    def test_a_missing_array_is_named(self, tmp_path, missing):
        with pytest.raises(TraceError, match=missing):
            Trace.load(write(tmp_path / "t.npz", **{k: v for k, v in GOOD.items() if k != missing}))

    def test_other_files_and_truncated_ones_are_refused(self, tmp_path):
        path = tmp_path / "t.npz"
        path.write_bytes(b"not a zip file at all")
        with pytest.raises(TraceError, match="npz"):
            Trace.load(path)
        some().save(path)
        whole = path.read_bytes()
        for length in range(0, len(whole), 97):
            path.write_bytes(whole[:length])
            with pytest.raises(TraceError):
                Trace.load(path)

    def test_flipped_bytes_never_raise_anything_else(self, tmp_path):
        path = tmp_path / "t.npz"
        some((20, 30)).save(path)
        for _ in flipped_bytes(path):
            with contextlib.suppress(TraceError):
                Trace.load(path)

    def test_a_declared_size_is_not_believed(self, tmp_path):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 2, 1)})
        lie = io.BytesIO()
        np.lib.format.write_array_header_1_0(lie, {"descr": "|u1", "fortran_order": False, "shape": (10**6, 2, 1)})
        for head, message in ((header, "bytes, more than"), (lie, "declares")):
            with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
                archive.writestr("ids.npy", head.getvalue() + bytes(10))
            with pytest.raises(TraceError, match=message):
                Trace.load(tmp_path / "t.npz")

    def test_nothing_is_unpickled(self, tmp_path):
        class Payload:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "executed"),)

        body = pickle.dumps(Payload())
        body += bytes(-len(body) % 8)
        header = io.BytesIO()
        shape = (len(body) // 8, 1, 1)
        np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": shape})
        with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
            archive.writestr("ids.npy", header.getvalue() + body)
        with pytest.raises(TraceError, match="plain array"):
            Trace.load(tmp_path / "t.npz")
        assert not (tmp_path / "executed").exists()

    def test_more_than_the_bound_is_refused_before_it_is_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr(trace_module, "MAX_BYTES", 5)
        with pytest.raises(TraceError, match="more than 5"):
            Trace.load(write(tmp_path / "t.npz", **GOOD))

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            Trace.load(tmp_path / "t.npz")


class TestSteps:
    def test_one_request_at_a_time_is_its_tokens_in_order(self):
        assert some().steps(range(3), 1).ravel().tolist() == [0, 1, 2, 3, 4, 5]

    def test_a_slot_takes_the_next_request_when_its_request_ends(self):
        assert some((2, 3, 1)).steps(range(3), 2).tolist() == [[0, 2], [1, 3], [5, 4]]

    def test_more_slots_than_requests(self):
        assert some((2, 1)).steps(range(2), 4).tolist() == [[0, 2, -1, -1], [1, -1, -1, -1]]

    def test_every_token_runs_once(self):
        trace = some((5, 0, 7, 1, 3, 9))
        for batch in (1, 2, 3, 8):
            steps = trace.steps(range(6), batch)
            assert sorted(steps[steps >= 0].tolist()) == list(range(25))

    def test_no_request(self):
        assert some().steps(range(0), 3).shape == (0, 3)
        assert some().activated(some().steps(range(0), 3)).shape == (0, 2, 8)

    def test_no_slot(self):
        with pytest.raises(ValueError, match="at least 1"):
            some().steps(range(3), 0)

    def test_split_parts_the_requests(self):
        assert some().split(0.5) == (range(0, 1), range(1, 3))
        assert some().split(0) == (range(0), range(3))
        assert some().split(1) == (range(3), range(3, 3))
        with pytest.raises(ValueError, match="fraction"):
            some().split(1.5)

    def test_split_takes_the_share_that_was_written(self):
        """Of what a float of it comes to in requests, a little less than a whole number is that number."""
        hundred = some((1,) * 100)
        assert [len(hundred.split(percent / 100)[0]) for percent in range(101)] == list(range(101))
        assert [len(some().split(third)[0]) for third in (1 / 3, 0.33, 2 / 3, 0.99)] == [1, 0, 2, 2]

    def test_a_step_activations_what_any_of_its_tokens_uses(self):
        ids = np.array([[[0, 1]], [[2, 2]], [[1, 3]]])
        trace = Trace(ids, np.array([2, 1]), 5)
        activated = trace.activated(trace.steps(range(2), 2))
        assert [np.flatnonzero(step[0]).tolist() for step in activated] == [[0, 1, 3], [2]]

    def test_the_id_minus_one_activations_nothing(self):
        trace = Trace(np.array([[[-1, 2], [-1, -1]]]), np.array([1]), 4)
        activated = trace.activated(trace.steps(range(1), 1))
        assert np.argwhere(activated).tolist() == [[0, 0, 2]]
