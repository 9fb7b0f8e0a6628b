"""The profile command: shows what files hold, merges them, renames the model, and names what it cannot use."""

import dataclasses

from test_profile import MODEL, saved, some

from sglang_uvm_offload.cli import main
from sglang_uvm_offload.profile import Profile, merge


def test_a_profile_is_shown(tmp_path, capsys):
    assert main(["profile", str(saved(tmp_path / "p.npz", some()))]) == 0
    out = capsys.readouterr().out
    assert "GLM-4.5 (Glm4MoeForCausalLM): 3 MoE layers of 8 experts" in out
    assert "3 prefill and 40 decode steps" in out


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
    assert "two models" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_a_name_without_a_file_to_write_is_refused(tmp_path, capsys):
    assert main(["profile", str(saved(tmp_path / "p.npz", some())), "--model", "x"]) == 2
    assert "--model: needs --out" in capsys.readouterr().err
