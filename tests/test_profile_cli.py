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


def test_a_name_that_could_not_be_read_again_is_refused(tmp_path, capsys):
    good = str(saved(tmp_path / "p.npz", some()))
    assert main(["profile", good, "--out", str(tmp_path / "all"), "--model", "m\udcff"]) == 2
    assert r"--model 'm\udcff': cannot be printed" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_a_folder_that_is_missing_is_named_and_no_file_but_the_one_asked_for(tmp_path, capsys):
    out = tmp_path / "gone" / "all.npz"
    assert main(["profile", str(saved(tmp_path / "p.npz", some())), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"--out {out}: No such file or directory\n"


def test_profiles_that_come_to_too_much_together_are_not_merged(tmp_path, capsys):
    most = some(steps=(1 << 53, 0))
    path = str(saved(tmp_path / "p.npz", most))
    assert main(["profile", path, path, "--out", str(tmp_path / "all")]) == 2
    assert f"more than {1 << 53}" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()
