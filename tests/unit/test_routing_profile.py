"""Profiles: what is written is read back, for the model that it is of, and anything else is refused with the reason."""

import dataclasses
import json

import numpy as np
import pytest
from builders.profiles import MODEL, rewritten, saved, some

from sglang_uvm_offload.expert_location import ExpertLocation, by_expert
from sglang_uvm_offload.routing import profile as profile_module
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase, RoutingCounts
from sglang_uvm_offload.routing.merged_profile import merge
from sglang_uvm_offload.routing.profile import Profile, ProfileError, model_name

SPLITS = {0.25: 1.0, 0.5: 0.75}


def test_what_is_written_is_read_back(tmp_path):
    full = dataclasses.replace(some().with_slot_shares(SPLITS), ranks={"a": (1, 2)}, began_at=9.5)
    for profile in (full, some(model=dataclasses.replace(MODEL, top_k=None))):
        read = Profile.load(saved(tmp_path / "p.npz", profile))
        assert (read.seen.counts == profile.seen.counts).all()
        assert read.seen.steps == profile.seen.steps
        for name in ("model", "run", "ranks", "slot_shares", "began_at", "history"):
            assert getattr(read, name) == getattr(profile, name)


def test_an_older_file_is_read_and_a_newer_one_with_more_fields_of_this_version(tmp_path):
    path = saved(tmp_path / "p.npz", some())
    with np.load(path) as file:
        about = json.loads(file["about"].tobytes())
    assert not {"ranks", "slot_shares", "began_at"} & set(about), "as older versions wrote it"
    assert Profile.load(rewritten(path, about={"note": [1]})).seen.steps == (3, 40)


NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"about": {"version": 2}}, "has format 2; this version of sglang-uvm-offload reads format 1"),
        ({"about": {"format": "a song"}}, "not a sglang-uvm-offload profile"),
        ({"about": {"layout": "physical experts"}}, "'physical experts'"),
        ({"about": {"num_experts": -1}}, "num_experts"),
        ({"about": {"moe_layers": "1,2"}}, "moe_layers"),
        ({"about": {"moe_layers": [1, True, 2]}}, "moe_layers"),
        ({"about": {"name": 7}}, "name"),
        ({"about": {"name": "m\ud800"}}, "about array is not the JSON of a profile"),
        ({"about": {"name": "m\x1b[31mRED\nx"}}, r"'m\\x1b\[31mRED\\nx', which has unprintable"),
        ({"about": {"architecture": "\x07"}}, r"'\\x07', which has unprintable"),
        ({"about": {"note": "x" * (1 << 20)}}, r"about .* more than 1048576"),
        ({"about": {"ranks": {"a": [1]}}}, "ranks"),
        ({"about": {"ranks": {"a": [1, -1]}}}, "ranks"),
        ({"about": {"ranks": {"a": [1, 1.5]}}}, "ranks"),
        ({"about": {"slot_shares": {"0.5": 0.75}}}, "slot_shares"),
        ({"about": {"slot_shares": [[0.5, 0.75]] * 257}}, "length <= 256"),
        ({"about": {"slot_shares": [[0.5]]}}, "slot_shares"),
        ({"about": {"slot_shares": [[0.5, 1.01]]}}, "<= 1.0"),
        ({"about": {"slot_shares": [[0.5, NAN]]}}, "about array is not the JSON of a profile"),
        ({"about": {"began_at": -1}}, "began_at"),
        ({"about": {"began_at": NAN}}, "about array is not the JSON of a profile"),
        ({"counts": np.zeros((3, 2, 2, 9), dtype=np.int64)}, r"\[3, 2, 2, 9\], not int64 \[3, 2, 2, 8\]"),
        ({"counts": np.zeros((3, 2, 2, 8))}, "float64"),
        ({"counts": np.full((3, 2, 2, 8), -1, dtype=np.int64)}, "counts must be 0"),
        ({"counts": np.full((3, 2, 2, 8), 1 << 60, dtype=np.int64)}, "counts must be 0"),
        ({"steps": np.array([1], dtype=np.int64)}, "steps are"),
        ({"steps": np.array([1, -1], dtype=np.int64)}, "steps must be 0"),
        ({"history": np.zeros((1, 2, 2, 3), dtype=np.int64)}, "counts are int64"),
    ],
)
def test_a_file_that_says_something_impossible_is_refused(tmp_path, changes, reason):
    with pytest.raises(ProfileError, match=reason):
        Profile.load(rewritten(saved(tmp_path / "p.npz", some()), **changes))


def test_more_than_the_bound_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = saved(tmp_path / "p.npz", some())
    monkeypatch.setattr(profile_module, "MAX_BYTES", 20)
    with pytest.raises(ProfileError, match="more than 20"):
        Profile.load(path)


def test_profiles_merge_into_the_sum_of_what_was_seen_and_the_last_splits():
    one, two = some(1).with_slot_shares({0.25: 1.0, 0.5: 0.25}), some(2, steps=(1, 2)).with_slot_shares({0.5: 0.75, 0.78: 0.5})
    both = merge([one, two])
    assert both.seen.steps == (4, 42)
    assert (both.seen.counts == one.seen.counts + two.seen.counts).all()
    assert both.slot_shares == merge([one, two, some(3)]).slot_shares == {0.25: 1.0, 0.5: 0.75, 0.78: 0.5}
    with pytest.raises(ProfileError, match="different models"):
        merge([one, some(model=dataclasses.replace(MODEL, name="DeepSeek-V3"))])


def test_more_splits_than_can_be_read_again_are_refused():
    many = some().with_slot_shares({share / 1000: 0.5 for share in range(256)})
    assert len(many.with_slot_shares({0.0: 1.0}).slot_shares) == 256
    for together in (lambda: many.with_slot_shares({0.5: 0.5}), lambda: merge([many, some().with_slot_shares({0.5: 0.5})])):
        with pytest.raises(ProfileError, match="257 residencies, more than 256"):
            together()


@pytest.mark.parametrize(("count", "steps"), [(1 << 53, (1, 1)), (1, (0, 1 << 53))])
def test_a_sum_that_could_not_be_read_again_is_refused(count, steps):
    most = Profile(MODEL, RoutingCounts(np.full((3, 2, 2, 8), count), steps))
    assert merge([most]).seen.steps == steps
    for times in (2, 2048):  # 2048 counts of 2^53 are 0 in 64 bits
        with pytest.raises(ProfileError, match=f"more than {1 << 53}"):
            merge([most] * times)


def test_a_long_past_keeps_its_rates_and_its_splits_and_loses_its_weight():
    profile = some(steps=(10, 4000)).with_slot_shares(SPLITS)
    limited = profile.limited(1000)
    assert limited.seen.steps == (10, 1000)
    assert (limited.seen.counts[:, Phase.PREFILL] == profile.seen.counts[:, Phase.PREFILL]).all()
    assert (limited.seen.counts[:, Phase.DECODE] == profile.seen.counts[:, Phase.DECODE] // 4).all()
    assert limited.slot_shares == SPLITS


class TestParts:
    """A rank holds some layers, and of each some experts, and counts them by its own numbers."""

    def test_ranks_that_put_their_parts_together_have_the_whole(self):
        whole, got = some(), Profile.empty(MODEL)
        for layers in ([1], [2, 5]):
            for places in (range(0, 4), range(4, 8)):
                at = [ExpertLocation(np.array([7, 2, 0, 5, 4, 1, 3, 6]), places)] * len(layers)
                part = whole.part(MODEL.rows(layers), at, width=5)  # one slot more, for a fused shared expert
                assert part.counts.shape == (len(layers), 2, 2, 5)
                assert not part.counts[..., 4].any()
                got = got.with_counts(str(places), (1, 1), layers, by_expert(part.counts, at, 8), part.steps)
        assert (got.seen.counts == whole.seen.counts).all()
        assert got.seen.steps == whole.seen.steps
        assert got.ranks == {"range(0, 4)": (1, 1), "range(4, 8)": (1, 1)}

    def test_each_of_two_routers_in_a_decoder_layer_has_its_own_counts(self):
        model = dataclasses.replace(MODEL, moe_layers=(1, 1, 2, 2))
        whole, got, at = some(model=model), Profile.empty(model), [ExpertLocation.trivial(8, range(8))] * 2
        for rank, layers in enumerate(([1, 1], [2, 2])):
            part = whole.part(model.rows(layers), at, width=8)
            got = got.with_counts(str(rank), (1, 1), layers, part.counts, part.steps)
        assert (got.seen.counts == whole.seen.counts).all()

    @pytest.mark.parametrize("layers", [[3], [1, 1]])
    def test_layers_that_a_model_does_not_have_are_an_error(self, layers):
        with pytest.raises(ValueError, match=r"are not among the MoE layers \[1, 2, 5\]"):
            MODEL.rows(layers)

    def test_counts_are_added_to_their_layers_alone(self):
        once = Profile.empty(MODEL).with_counts("a", (1, 1), [2], np.ones((1, 2, 2, 8), dtype=np.int64), (1, 1))
        assert once.seen.counts[1, Phase.DECODE, ACTIVATIONS].tolist() == [1] * 8
        assert not once.seen.counts[0, :, ROUTED].any()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("zai-org/GLM-4.5", "GLM-4.5"),
        ("/models/GLM-4.5/", "GLM-4.5"),
        ("/c/hub/models--zai-org--GLM-4.5/snapshots/0a1b", "GLM-4.5"),
        ("/models/\x1b[31mGLM\udcff", "?[31mGLM?"),
    ],
)
def test_a_model_is_named_by_its_checkpoint_in_a_way_that_can_be_read_back(path, name):
    assert model_name(path) == name
