"""The profile command: shows what files hold, merges them, renames the model, and names what it cannot use."""

import dataclasses

import pytest
from builders.profiles import MODEL, rewritten, saved, some
from paths import SAFETENSORS, direct, hard_link, symbolic_link

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.routing.merged_profile import merge
from sglang_uvm_offload.routing.profile import Profile


@pytest.fixture
def good(tmp_path):
    return saved(tmp_path / "p.npz", some())


def refused(capsys, out, *arguments):
    """What the command says on stderr, having failed and written nothing."""
    before = out.read_bytes() if out.is_file() else None
    assert main(["profile", *map(str, arguments), "--out", str(out)]) == 2
    assert (out.read_bytes() if out.is_file() else None) == before
    return capsys.readouterr().err


def test_a_profile_is_shown(good, capsys):
    assert main(["profile", str(good)]) == 0
    out = capsys.readouterr().out
    assert "GLM-4.5 (Glm4MoeForCausalLM): 3 MoE layers of 8 experts" in out
    assert "3 prefill and 40 decode steps" in out
    assert "slots" not in out


def test_several_are_merged_under_a_new_name_with_their_splits(tmp_path, capsys):
    paths = [saved(tmp_path / f"{n}.npz", some(n).with_slot_shares({n / 4: 0.75})) for n in (2, 1)]
    assert main(["profile", *map(str, paths), "--out", str(tmp_path / "all.npz"), "--model", "GLM-renamed"]) == 0
    read, expected = Profile.load(tmp_path / "all.npz"), merge([some(1), some(2)])
    assert read.model == dataclasses.replace(MODEL, name="GLM-renamed")
    assert (read.seen.counts == expected.seen.counts).all()
    shown = [f"75% with {percent}% of the experts in VRAM" for percent in (25, 50)]
    *_, last = capsys.readouterr().out.splitlines()
    assert last == f"  best share of the VRAM in slots, by replay: {', '.join(shown)}"


def test_all_problems_are_named_and_nothing_is_written(good, tmp_path, capsys):
    (tmp_path / "text.npz").write_text("hello")
    err = refused(capsys, tmp_path / "all", good, tmp_path / "text.npz", tmp_path / "gone.npz", "--model", "m\udcff")
    assert "text.npz: this is a text file\n" in err
    assert "gone.npz: No such file" in err
    assert r"--model 'm\udcff': has characters that cannot be printed" in err
    assert main(["profile", str(good), "--model", "x"]) == 2
    assert "--model: needs --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (some(model=dataclasses.replace(MODEL, name="Other")), "different models"),
        (some(steps=(1 << 53, 0)), f"more than {1 << 53}"),
    ],
)
def test_profiles_that_cannot_be_one_are_not_merged(good, tmp_path, capsys, second, problem):
    assert problem in refused(capsys, tmp_path / "all", good, saved(tmp_path / "b.npz", second))


def test_a_folder_that_is_missing_is_named_and_no_file_but_the_one_asked_for(good, tmp_path, capsys):
    out = tmp_path / "gone" / "all.npz"
    assert refused(capsys, out, good) == f"--out {out}: there is no folder {out.parent}\n"


def test_a_file_that_is_no_profile_is_not_replaced_and_all_else_is_named_too(tmp_path, capsys):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(SAFETENSORS)
    err = refused(capsys, weights, tmp_path / "gone.npz").splitlines()
    starts = (f"--out {weights}: exists", f"{tmp_path}/gone.npz")
    assert all(line.startswith(start) for line, start in zip(err, starts, strict=True))


@pytest.mark.parametrize("way", [direct, symbolic_link, hard_link])
def test_a_profile_is_not_merged_into_itself(good, tmp_path, capsys, way):
    (tmp_path / "work").mkdir()
    assert "p.npz, an input" in refused(capsys, way(good, tmp_path / "work"), good)


def test_a_profile_is_replaced_of_any_version_and_model_unless_it_is_damaged(good, tmp_path, capsys):
    old = saved(tmp_path / "all.npz", some(model=dataclasses.replace(MODEL, name="Other")))
    rewritten(old, about={"version": 99})
    assert main(["profile", str(good), "--out", str(old)]) == 0
    assert Profile.load(old).model == MODEL
    old.write_bytes(old.read_bytes()[:-100])  # whether it can be saved is for a person to say
    assert "exists" in refused(capsys, old, good)


@pytest.mark.parametrize("way", [direct, hard_link])
def test_a_file_that_is_given_twice_is_not_counted_twice(good, tmp_path, capsys, way):
    (tmp_path / "work").mkdir()
    again = way(good, tmp_path / "work")
    counted = f"{again}: is the same file as {good}: its routing would count twice\n"
    assert refused(capsys, tmp_path / "all", good, again) == counted
    assert main(["profile", str(good), str(again)]) == 0, "which shows it twice"
