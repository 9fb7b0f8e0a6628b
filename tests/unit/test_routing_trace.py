"""Reading traces that may be anything, and batching their requests into steps."""

import io
import os
import pickle
import zipfile

import numpy as np
import pytest

from sglang_uvm_offload.routing import trace as trace_module
from sglang_uvm_offload.routing.guesses import Guesses
from sglang_uvm_offload.routing.trace import Trace, TraceError, is_trace


def some(seq_len=(2, 3, 1)):
    ids = np.random.default_rng(0).integers(0, 8, (sum(seq_len), 2, 2))
    return Trace(ids, np.array(seq_len), 8)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.npz"


def write(path, **arrays):
    np.savez(path, **arrays)
    return path


GOOD = {"ids": np.zeros((3, 2, 1), np.uint8), "seq_len": np.array([1, 2], np.int32), "num_experts": np.int64(4)}


GUESSES = {"guesses": np.zeros((3, 2, 2, 4), np.int8), "guesses_folded": np.zeros((2, 2), bool)}


class TestGuesses:
    def test_what_is_saved_is_loaded_and_counts_as_a_trace(self, path):
        experts = np.random.default_rng(0).integers(-1, 8, (6, 2, 2, 3))
        saved = Trace(some().ids, some().seq_len, 8, Guesses(experts, np.array([[False, False], [True, False]])))
        saved.save(path)
        loaded = Trace.load(path).guesses
        assert (loaded.experts == experts).all()
        assert loaded.experts.dtype == np.int16
        assert loaded.folded.tolist() == [[False, False], [True, False]]
        assert is_trace(path)
        assert np.load(path)["guesses"].dtype == np.int8

    def test_a_trace_without_them_is_one(self, path):
        some().save(path)
        assert Trace.load(path).guesses is None
        assert np.load(path).files == ["ids", "seq_len", "num_experts"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"guesses": np.zeros((3, 2, 2), np.int8)}, r"\[token, layer, distance, rank\], not int8 \[3, 2, 2\]"),
            ({"guesses": np.zeros((3, 2, 2, 4))}, "must be integers"),
            ({"guesses": np.zeros((2, 2, 2, 4), np.int8)}, "of 3 tokens and 2 layers"),
            ({"guesses": np.zeros((3, 1, 2, 4), np.int8)}, "of 3 tokens and 2 layers"),
            ({"guesses": np.zeros((3, 2, 0, 4), np.int8)}, r"1\.\.8 distances and 1\.\.4 experts"),
            ({"guesses": np.zeros((3, 2, 9, 4), np.int8)}, r"1\.\.8 distances"),
            ({"guesses": np.zeros((3, 2, 2, 5), np.int8)}, r"1\.\.4 experts"),
            ({"guesses": np.full((3, 2, 2, 4), 4)}, r"-1\.\.3, and are 4\.\.4"),
            ({"guesses": np.full((3, 2, 2, 4), -2)}, r"-1\.\.3"),
            ({"guesses": np.full((3, 2, 2, 4), None)}, "plain array|declares"),
            ({"guesses_folded": np.zeros((2, 2), np.uint8)}, r"must be bool \[2, 2\], not uint8"),
            ({"guesses_folded": np.zeros((2, 1), bool)}, r"not bool \[2, 1\]"),
            ({"guesses_folded": np.zeros(10**4, bool)}, "bytes, more than"),
        ],
    )
    def test_what_is_none_is_refused_with_the_reason(self, path, change, message):
        with pytest.raises(TraceError, match=message):
            Trace.load(write(path, **{**GOOD, **GUESSES, **change}))

    @pytest.mark.parametrize("alone", GUESSES)
    def test_one_array_without_the_other_is_refused(self, path, alone):
        with pytest.raises(TraceError, match="both or neither"):
            Trace.load(write(path, **GOOD, **{alone: GUESSES[alone]}))
        assert not is_trace(path)

    def test_their_declared_size_is_not_believed(self, path):
        Trace.load(write(path, **GOOD, **GUESSES))
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|i1", "fortran_order": False, "shape": (10**12, 2, 2, 4)})
        write(path, **GOOD, guesses_folded=GUESSES["guesses_folded"])
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("guesses.npy", header.getvalue() + bytes(10))
        with pytest.raises(TraceError, match=r"guesses .* bytes, more than"):
            Trace.load(path)


class TestFile:
    def test_what_is_saved_is_loaded(self, path):
        saved = some()
        saved.save(path)
        loaded = Trace.load(path)
        assert (loaded.ids == saved.ids).all()
        assert (loaded.seq_len == saved.seq_len).all()
        assert loaded.num_experts == 8
        Trace(np.full((3, 2, 1), -1), np.array([3]), 8).save(path)
        assert Trace.load(path).ids.max() == -1

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"ids": np.zeros((3, 2), np.uint8)}, "token, layer, k"),
            ({"ids": np.zeros((3, 0, 1), np.uint8)}, r"one layer and one expert a token, not \[3, 0, 1\]"),
            ({"ids": np.zeros((3, 1025, 1), np.uint8)}, "at most 1024 layers"),
            ({"ids": np.zeros((3, 2, 1))}, "integers"),
            ({"ids": np.full((3, 2, 1), 4)}, "-1..3"),
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
    def test_what_is_no_trace_is_refused_with_the_reason(self, path, change, message):
        with pytest.raises(TraceError, match=message):
            Trace.load(write(path, **{**GOOD, **change}))

    @pytest.mark.parametrize(
        ("padding", "stored"),
        [(255, np.uint8), (255, np.int32), (65535, np.uint16), (2**32 - 1, np.uint32), (2**64 - 1, np.uint64)],
    )
    def test_an_unsigned_minus_one_means_no_expert(self, path, padding, stored):
        ids = np.array([[[0], [3]], [[1], [padding]], [[2], [2]]], dtype=stored)
        found = Trace.load(write(path, **{**GOOD, "ids": ids}))
        assert found.ids[..., 0].tolist() == [[0, 3], [1, -1], [2, 2]]
        if stored == np.uint8:  # an expert of a model that has so many
            assert Trace.load(write(path, **{**GOOD, "ids": ids, "num_experts": np.int64(256)})).ids[1, 1] == 255

    def test_other_ids_beyond_the_models_are_refused_beside_it(self, path):
        ids = np.array([[[0], [200]], [[1], [255]], [[2], [2]]], dtype=np.uint8)
        with pytest.raises(TraceError, match=r"-1\.\.3, and are -1\.\.200"):
            Trace.load(write(path, **{**GOOD, "ids": ids}))

    @pytest.mark.parametrize("seq_len", [3, [3], [[1], [2]], [[1, 2]]])
    def test_lengths_along_one_axis_are_those_of_the_requests(self, path, seq_len):
        loaded = Trace.load(write(path, **{**GOOD, "seq_len": np.array(seq_len)}))
        assert loaded.seq_len.tolist() == np.ravel(seq_len).tolist()

    @pytest.mark.parametrize("missing", GOOD)
    def test_a_missing_array_is_named(self, path, missing):
        with pytest.raises(TraceError, match=missing):
            Trace.load(write(path, **{k: v for k, v in GOOD.items() if k != missing}))

    @pytest.mark.parametrize(
        ("shape", "message"),
        [((10**12, 2, 1), "bytes, more than"), ((10**6, 2, 1), "declares"), (((1 << 28) + 1, 1, 1), "numbers, more than")],
    )
    def test_a_declared_size_is_not_believed(self, path, shape, message):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("ids.npy", header.getvalue() + bytes(10))
        with pytest.raises(TraceError, match=message):
            Trace.load(path)

    def test_nothing_is_unpickled(self, path, tmp_path):
        class Payload:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "executed"),)

        body = pickle.dumps(Payload())
        body += bytes(-len(body) % 8)
        header = io.BytesIO()
        shape = (len(body) // 8, 1, 1)
        np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": shape})
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("ids.npy", header.getvalue() + body)
        with pytest.raises(TraceError, match="plain array"):
            Trace.load(path)
        assert not (tmp_path / "executed").exists()

    def test_other_files_none_and_more_than_the_bound_are_refused(self, path, monkeypatch):
        with pytest.raises(FileNotFoundError):
            Trace.load(path)
        path.write_bytes(b"not a zip file at all")
        with pytest.raises(TraceError, match="npz"):
            Trace.load(path)
        monkeypatch.setattr(trace_module, "MAX_BYTES", 5)
        with pytest.raises(TraceError, match="more than 5"):
            Trace.load(write(path, **GOOD))


class TestSteps:
    @pytest.mark.parametrize(
        ("seq_len", "batch", "steps"),
        [
            ((2, 3, 1), 1, [[0], [1], [2], [3], [4], [5]]),
            ((2, 3, 1), 2, [[0, 2], [1, 3], [5, 4]]),
            ((2, 1), 4, [[0, 2, -1, -1], [1, -1, -1, -1]]),
        ],
    )
    def test_a_slot_takes_the_next_request_when_its_request_ends(self, seq_len, batch, steps):
        assert some(seq_len).steps(range(len(seq_len)), batch).tolist() == steps

    def test_every_token_runs_once(self):
        trace = some((5, 0, 7, 1, 3, 9))
        for batch in (1, 2, 3, 8):
            steps = trace.steps(range(6), batch)
            assert sorted(steps[steps >= 0].tolist()) == list(range(25))
        assert trace.activated(trace.steps(range(0), 3)).shape == (0, 2, 8)

    def test_split_takes_the_share_that_was_written(self):
        """A float slightly below a whole number of requests counts as that number."""
        assert some().split(0.5) == (range(0, 1), range(1, 3))
        hundred = some((1,) * 100)
        assert [len(hundred.split(percent / 100)[0]) for percent in range(101)] == list(range(101))
        assert [len(some().split(third)[0]) for third in (1 / 3, 0.33, 2 / 3, 0.99)] == [1, 0, 2, 2]

    def test_a_step_activates_what_any_of_its_tokens_uses(self):
        trace = Trace(np.array([[[0, 1]], [[2, -1]], [[1, 3]]]), np.array([2, 1]), 5)
        activated = trace.activated(trace.steps(range(2), 2))
        assert [np.flatnonzero(step[0]).tolist() for step in activated] == [[0, 1, 3], [2]]
