"""The profile command: shows what files hold, merges them, renames the model, and names what it cannot use."""

import dataclasses

import pytest
from builders.profiles import MODEL, rewritten, saved, some
from paths import SAFETENSORS, WAYS, direct, hard_link, symbolic_link

from sglang_uvm_offload.cli import profile as profile_cli
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.routing.merged_profile import merge
from sglang_uvm_offload.routing.profile import Profile


def test_a_profile_is_shown(tmp_path, capsys):
    assert main(["profile", str(saved(tmp_path / "p.npz", some()))]) == 0
    out = capsys.readouterr().out
    assert "GLM-4.5 (Glm4MoeForCausalLM): 3 MoE layers of 8 experts" in out
    assert "3 prefill and 40 decode steps" in out


def test_its_splits_of_the_vram_are_shown(tmp_path, capsys):
    paths = [saved(tmp_path / f"{n}.npz", some().with_slot_shares({n / 4: 0.75})) for n in (2, 1)]
    assert main(["profile", *map(str, paths), "--out", str(tmp_path / "all.npz")]) == 0
    *_, merged = capsys.readouterr().out.splitlines()
    shown = [f"75% with {percent}% of the experts in VRAM" for percent in (25, 50)]
    assert merged == f"  best share of the VRAM in slots, by replay: {', '.join(shown)}"
    assert main(["profile", str(saved(tmp_path / "without.npz", some()))]) == 0
    assert "slots" not in capsys.readouterr().out


def test_several_are_merged_under_a_new_name(tmp_path):
    paths = [str(saved(tmp_path / f"{n}.npz", some(n))) for n in (1, 2)]
    assert main(["profile", *paths, "--out", str(tmp_path / "all.npz"), "--model", "GLM-renamed"]) == 0
    read, expected = Profile.load(tmp_path / "all.npz"), merge([some(1), some(2)])
    assert read.model == dataclasses.replace(MODEL, name="GLM-renamed")
    assert (read.seen.counts == expected.seen.counts).all()


def test_all_problems_are_named_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "text.npz").write_text("hello")
    good = str(saved(tmp_path / "good.npz", some()))
    assert main(["profile", good, str(tmp_path / "text.npz"), str(tmp_path / "gone.npz"), "--out", str(tmp_path / "all")]) == 2
    err = capsys.readouterr().err
    assert "text.npz: not a readable npz" in err
    assert "gone.npz: No such file" in err
    assert not (tmp_path / "all").exists()


def test_profiles_of_two_models_are_not_merged(tmp_path, capsys):
    paths = [saved(tmp_path / "a.npz", some()), saved(tmp_path / "b.npz", some(model=dataclasses.replace(MODEL, name="Other")))]
    assert main(["profile", *map(str, paths), "--out", str(tmp_path / "all")]) == 2
    assert "different models" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_a_name_without_a_file_to_write_is_refused(tmp_path, capsys):
    assert main(["profile", str(saved(tmp_path / "p.npz", some())), "--model", "x"]) == 2
    assert "--model: needs --out" in capsys.readouterr().err


def test_a_name_that_could_not_be_read_again_is_refused(tmp_path, capsys):
    good = str(saved(tmp_path / "p.npz", some()))
    assert main(["profile", good, "--out", str(tmp_path / "all"), "--model", "m\udcff"]) == 2
    assert r"--model 'm\udcff': has characters that cannot be printed" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_a_folder_that_is_missing_is_named_and_no_file_but_the_one_asked_for(tmp_path, capsys):
    out = tmp_path / "gone" / "all.npz"
    assert main(["profile", str(saved(tmp_path / "p.npz", some())), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"--out {out}: there is no folder {out.parent}\n"


def test_profiles_that_come_to_too_much_together_are_not_merged(tmp_path, capsys):
    most = some(steps=(1 << 53, 0))
    paths = [str(saved(tmp_path / name, most)) for name in ("p.npz", "q.npz")]
    assert main(["profile", *paths, "--out", str(tmp_path / "all")]) == 2
    assert f"more than {1 << 53}" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


@pytest.fixture
def folders(tmp_path):
    for name in ("model", "work"):
        (tmp_path / name).mkdir()
    return tmp_path / "model", tmp_path / "work"


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_no_profile_is_not_replaced_and_all_else_is_named_too(folders, capsys, way):
    model, work = folders
    weights = model / "model.safetensors"
    weights.write_bytes(SAFETENSORS)
    out = way(weights, work)
    assert main(["profile", str(work / "gone.npz"), "--out", str(out)]) == 2
    err = capsys.readouterr().err.splitlines()
    starts = (f"--out {out}: exists", f"{work}/gone.npz")
    assert all(line.startswith(start) for line, start in zip(err, starts, strict=True))
    assert main(["profile", str(saved(work / "good.npz", some())), "--out", str(out)]) == 2
    assert weights.read_bytes() == SAFETENSORS


@pytest.mark.parametrize("way", [direct, symbolic_link, hard_link])
def test_a_profile_is_not_merged_into_itself(folders, capsys, way):
    profile = saved(folders[0] / "a.npz", some())
    before = profile.read_bytes()
    assert main(["profile", str(profile), "--out", str(way(profile, folders[1]))]) == 2
    assert "a.npz, an input" in capsys.readouterr().err
    assert profile.read_bytes() == before


def test_a_profile_is_replaced_of_any_version_and_model(tmp_path):
    old = saved(tmp_path / "all.npz", some(model=dataclasses.replace(MODEL, name="Other")))
    rewritten(old, about={"version": 99})
    assert main(["profile", str(saved(tmp_path / "p.npz", some())), "--out", str(old)]) == 0
    assert Profile.load(old).model == MODEL


def test_a_damaged_profile_is_kept(tmp_path):
    """Whether it can be saved is for a person to say."""
    old = saved(tmp_path / "all.npz", some())
    old.write_bytes(old.read_bytes()[:-100])
    before = old.read_bytes()
    assert main(["profile", str(saved(tmp_path / "p.npz", some())), "--out", str(old)]) == 2
    assert old.read_bytes() == before


def test_a_file_that_appears_while_profiles_are_merged_stays(tmp_path, capsys, monkeypatch):
    out = tmp_path / "all.npz"
    monkeypatch.setattr(profile_cli, "merge", lambda profiles: (out.write_bytes(SAFETENSORS), merge(profiles))[1])
    assert main(["profile", str(saved(tmp_path / "p.npz", some())), "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"--out {out}: exists")
    assert out.read_bytes() == SAFETENSORS


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_given_twice_is_not_counted_twice(tmp_path, capsys, way):
    path = saved(tmp_path / "p.npz", some())
    (tmp_path / "work").mkdir()
    again = way(path, tmp_path / "work")
    assert main(["profile", str(path), str(again), "--out", str(tmp_path / "all")]) == 2
    assert capsys.readouterr().err == f"{again}: is the same file as {path}: its routing would count twice\n"
    assert not (tmp_path / "all").exists()
    assert main(["profile", str(path), str(again)]) == 0, "which shows it twice"
