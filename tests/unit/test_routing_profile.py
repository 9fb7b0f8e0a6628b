"""Profiles: what is written is read back, for the model that it is of, and anything else is refused with the reason."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
from builders.profiles import MODEL, rewritten, saved, some
from damage import flipped_bytes

from sglang_uvm_offload.expert_location import ExpertLocation, by_expert
from sglang_uvm_offload.routing import profile as profile_module
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase, RoutingCounts
from sglang_uvm_offload.routing.merged_profile import load_for, merge
from sglang_uvm_offload.routing.profile import Profile, ProfileError, model_name


def test_what_is_written_is_read_back(tmp_path):
    profile = some()
    read = Profile.load(saved(tmp_path / "p.npz", profile))
    assert (read.model, read.run, read.seen.steps) == (MODEL, "r", (3, 40))
    assert (read.seen.counts == profile.seen.counts).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"about": {"version": 2}}, "version 2"),
        ({"about": {"format": "a song"}}, "no sglang-uvm-offload profile"),
        ({"about": {"layout": "physical experts"}}, "'physical experts'"),
        ({"about": {"num_experts": -1}}, "its model"),
        ({"about": {"moe_layers": "1,2"}}, "its model"),
        ({"about": {"name": 7}}, "its model"),
        ({"about": {"name": "m\ud800"}}, r"'m\\ud800', which cannot be printed"),
        ({"about": {"name": "m\x1b[31mRED\nx"}}, r"'m\\x1b\[31mRED\\nx', which cannot be printed"),
        ({"about": {"architecture": "\x07"}}, r"'\\x07', which cannot be printed"),
        ({"counts": np.zeros((3, 2, 2, 9), dtype=np.int64)}, r"\[3, 2, 2, 9\], not int64 \[3, 2, 2, 8\]"),
        ({"counts": np.zeros((3, 2, 2, 8))}, "float64"),
        ({"counts": np.full((3, 2, 2, 8), -1, dtype=np.int64)}, "counts must be 0"),
        ({"counts": np.full((3, 2, 2, 8), 1 << 60, dtype=np.int64)}, "counts must be 0"),
        ({"steps": np.array([1], dtype=np.int64)}, "steps are"),
        ({"steps": np.array([1, -1], dtype=np.int64)}, "steps must be 0"),
    ],
)
def test_a_file_that_says_something_impossible_is_refused(tmp_path, changes, reason):
    with pytest.raises(ProfileError, match=reason):
        Profile.load(rewritten(saved(tmp_path / "p.npz", some()), **changes))


def test_splits_of_the_vram_are_read_back_and_are_no_matter_to_other_readers(tmp_path):
    path = saved(tmp_path / "p.npz", some().with_slot_shares({0.5: 0.75, 0.25: 1.0}))
    assert Profile.load(path).slot_shares == {0.25: 1.0, 0.5: 0.75}
    with np.load(path) as file:
        about = json.loads(file["about"].tobytes())
    assert about["version"] == 1, "a reader that knows none of them reads on"
    assert Profile.load(saved(tmp_path / "without.npz", some())).slot_shares == {}
    kept = Profile.load(path).limited(10).with_counts("all", (1, 1), [2], np.ones((1, 2, 2, 8), np.int64), (1, 1))
    assert kept.slot_shares == {0.25: 1.0, 0.5: 0.75}


@pytest.mark.parametrize(
    ("shares", "reason"),
    [
        ({"0.5": 0.75}, "a list of at most 256"),
        ([[0.5, 0.75]] * 257, "a list of at most 256"),
        ([0.5], "pairs of a residency and a share"),
        ([[0.5]], "pairs of a residency and a share"),
        ([[0.5, 1.01]], "both from 0 to 1"),
        ([[-0.1, 0.5]], "both from 0 to 1"),
        ([[0.5, float("nan")]], "both from 0 to 1"),
        ([[0.5, float("inf")]], "both from 0 to 1"),
        ([[0.5, "0.75"]], "both from 0 to 1"),
        ([[0.5, True]], "both from 0 to 1"),
    ],
)
def test_splits_that_say_something_impossible_are_refused(tmp_path, shares, reason):
    with pytest.raises(ProfileError, match=reason):
        Profile.load(rewritten(saved(tmp_path / "p.npz", some()), about={"slot_shares": shares}))


def test_of_several_splits_for_one_residency_the_last_files_holds(tmp_path):
    first, second = some(1).with_slot_shares({0.25: 1.0, 0.5: 0.25}), some(2).with_slot_shares({0.5: 0.75, 0.78: 0.5})
    assert merge([first, second, some(3)]).slot_shares == {0.25: 1.0, 0.5: 0.75, 0.78: 0.5}
    assert merge([first]).slot_shares == first.slot_shares
    profile, _ = load_for(MODEL.name, MODEL.architecture, [saved(tmp_path / "p.npz", first), saved(tmp_path / "q.npz", second)])
    assert profile.slot_shares == {0.25: 1.0, 0.5: 0.75, 0.78: 0.5}


def test_more_splits_than_can_be_read_again_are_refused():
    many = some().with_slot_shares({share / 1000: 0.5 for share in range(256)})
    assert len(many.with_slot_shares({0.0: 1.0}).slot_shares) == 256
    for together in (lambda: many.with_slot_shares({0.5: 0.5}), lambda: merge([many, some().with_slot_shares({0.5: 0.5})])):
        with pytest.raises(ProfileError, match="257 residencies, more than 256"):
            together()


def test_no_truncated_file_is_read(tmp_path):
    path = saved(tmp_path / "p.npz", some())
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(ProfileError):
            Profile.load(path)


def test_a_damaged_file_is_refused_or_read_but_never_crashes(tmp_path):
    path = saved(tmp_path / "p.npz", some())
    for _ in flipped_bytes(path):
        with contextlib.suppress(ProfileError):
            Profile.load(path)


def test_more_than_the_bound_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = saved(tmp_path / "p.npz", some())
    monkeypatch.setattr(profile_module, "MAX_BYTES", 20)
    with pytest.raises(ProfileError, match="more than 20"):
        Profile.load(path)


def test_profiles_merge_into_the_sum_of_what_was_seen():
    one, two = some(1), some(2, steps=(1, 2))
    both = merge([one, two])
    assert both.seen.steps == (4, 42)
    assert (both.seen.counts == one.seen.counts + two.seen.counts).all()
    with pytest.raises(ProfileError, match="different models"):
        merge([one, some(model=dataclasses.replace(MODEL, name="DeepSeek-V3"))])


@pytest.mark.parametrize(("count", "steps"), [(1 << 53, (1, 1)), (1, (0, 1 << 53))])
def test_a_sum_that_could_not_be_read_again_is_refused(count, steps):
    most = Profile(MODEL, RoutingCounts(np.full((3, 2, 2, 8), count), steps))
    assert merge([most]).seen.steps == steps
    for times in (2, 2048):  # 2048 counts of 2^53 are 0 in 64 bits
        with pytest.raises(ProfileError, match=f"more than {1 << 53}"):
            merge([most] * times)


def test_a_file_that_would_exceed_what_can_be_read_again_is_named_and_left_out(tmp_path):
    most = Profile(MODEL, RoutingCounts(np.full((3, 2, 2, 8), 1 << 53), (1, 1)))
    paths = [saved(tmp_path / f"{n}.npz", most) for n in (1, 2)]
    profile, problems = load_for(MODEL.name, MODEL.architecture, paths)
    assert (profile.seen.counts == 1 << 53).all()
    assert [problem.split(": ")[0] for problem in problems] == [str(paths[1])]


def test_a_long_past_keeps_its_rates_and_loses_its_weight():
    profile = some(steps=(10, 4000))
    limited = profile.limited(1000)
    assert limited.seen.steps == (10, 1000)
    assert (limited.seen.counts[:, Phase.PREFILL] == profile.seen.counts[:, Phase.PREFILL]).all()
    assert (limited.seen.counts[:, Phase.DECODE] == profile.seen.counts[:, Phase.DECODE] // 4).all()


def test_the_files_of_this_model_are_used_and_each_other_one_is_named(tmp_path):
    good = [saved(tmp_path / f"{n}.npz", some(n)) for n in (1, 2)]
    foreign = saved(tmp_path / "foreign.npz", some(model=dataclasses.replace(MODEL, name="Other", num_experts=4)))
    empty = saved(tmp_path / "empty.npz", Profile.empty(MODEL))
    text = tmp_path / "text.npz"
    text.write_text("hello")
    profile, problems = load_for(
        MODEL.name, MODEL.architecture, [good[0], foreign, empty, text, tmp_path / "gone.npz", good[1]]
    )
    assert (profile.seen.counts == some(1).seen.counts + some(2).seen.counts).all()
    assert [problem.split(":")[0] for problem in problems] == [str(p) for p in (foreign, empty, text, tmp_path / "gone.npz")]
    assert problems[0].endswith("is of another model: name Other, not GLM-4.5")
    assert problems[1].endswith("holds no routing yet")
    assert "not a readable npz" in problems[2]
    assert problems[3].endswith("No such file or directory")


def test_files_of_one_name_whose_layers_differ_are_of_two_models(tmp_path):
    paths = [saved(tmp_path / f"{n}.npz", some(model=dataclasses.replace(MODEL, num_experts=n))) for n in (8, 4)]
    profile, problems = load_for(MODEL.name, MODEL.architecture, paths)
    assert profile.model.num_experts == 8
    assert [problem.split(": ")[0] for problem in problems] == [str(paths[1])]
    assert "num_experts 4, not 8" in problems[0]


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


@pytest.mark.parametrize("ranks", [{"a": []}, {"a": [1]}, {"a": [1, -1]}, {"a": [1, 1.5]}, {"a": 3}, {"a": [True, 1]}])
def test_ranks_that_no_server_saves_are_refused(tmp_path, ranks):
    path = saved(tmp_path / "p.npz", dataclasses.replace(some(), ranks=ranks))
    with pytest.raises(ProfileError, match="ranks must be at most"):
        Profile.load(path)


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


def test_a_profile_that_is_named_twice_does_not_count_twice(tmp_path):
    path = saved(tmp_path / "p.npz", some())
    (tmp_path / "link").symlink_to(path)
    _, (problem,) = load_for(MODEL.name, MODEL.architecture, [path, tmp_path / "link"])
    assert problem == f"{tmp_path / 'link'}: is the same file as {path}: its routing would count twice"


def test_more_json_than_any_model_needs_is_refused(tmp_path):
    path = rewritten(saved(tmp_path / "p.npz", some()), about={"note": "x" * (1 << 20)})
    with pytest.raises(ProfileError, match=r"about .* more than 1048576"):
        Profile.load(path)
