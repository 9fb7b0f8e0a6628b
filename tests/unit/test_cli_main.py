"""How every command ends: on errors of its output, on Ctrl-C, and where a library is missing, without a traceback."""

from __future__ import annotations

import io
import json
import os
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from builders.profiles import saved, some

from sglang_uvm_offload.cli import doctor, profile
from sglang_uvm_offload.cli import main as cli
from sglang_uvm_offload.cli.main import main

MODELS = Path(__file__).parents[1] / "fixtures" / "models"


@pytest.fixture
def show(tmp_path) -> list[str]:
    """A command that prints."""
    return ["profile", str(saved(tmp_path / "p.npz", some()))]


@pytest.mark.parametrize("helps", [False, True])
def test_output_that_nobody_reads_ends_the_command_quietly(helps, show, monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["plan", "--help"] if helps else show) == 141
        output.write("what is still buffered when Python exits")
        output.flush()
    monkeypatch.setattr(sys, "stdout", None)
    assert main(show) == 0, "it is closed"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("place", [(profile.Profile, "load"), (cli.importlib, "import_module")])
def test_an_interrupt_ends_the_command_quietly(place, show, monkeypatch, capsys):
    def interrupted(what):
        raise KeyboardInterrupt

    monkeypatch.setattr(*place, interrupted)
    assert main(show) == 130
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_one_line(show, monkeypatch, capsys):
    with open("/dev/full", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(show) == 2
    assert capsys.readouterr().err == "sglang-uvm-offload: error: No space left on device\n"


def test_a_folder_that_a_library_cannot_write_to_is_named(show, monkeypatch, capsys):
    def unwritable(path):
        os.mkdir("/dev/null/cache")

    monkeypatch.setattr(profile.Profile, "load", lambda path: some())
    monkeypatch.setattr(profile, "describe", unwritable)
    assert main(show) == 2
    assert capsys.readouterr().err == "sglang-uvm-offload: error: /dev/null/cache: Not a directory\n"


@pytest.mark.parametrize(("command", "library"), [("profile", "numpy"), ("plan", "safetensors"), ("report", "msgspec")])
def test_a_library_that_is_not_installed_is_named(command, library, monkeypatch, capsys):
    without(library, monkeypatch)
    assert main([command, "x"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"the Python package {library} is not installed" in err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "the following arguments are required: command"),
        (["plan"], "the following arguments are required: model"),
        (["replay", "x", "--residency", "half"], "invalid float value: 'half'"),
        (["plan", "m", "--host-ram", "256"], "unrecognized arguments: --host-ram 256; did you mean --host-gb?"),
        (["plan", "m", "--ctx-size=8192"], "unrecognized arguments: --ctx-size=8192; did you mean --context-length?"),
        (["plan", "m", "--context", "8192"], "unrecognized arguments: --context 8192; did you mean --context-length?"),
        (["plan", "m", "--context-length", "32k"], "(such as 32768)"),
        (["plan", "m", "--context-length", "32,768"], "(such as 32768)"),
        (["plan", "m", "--host-gb", "256GB"], "(such as 256)"),
        (["plan", "m", "--mem-fraction-static", "96"], "(0.96 for 96 %)"),
        (["plan", "m", "--mem-fraction-static", "96%"], "(0.96 for 96 %)"),
    ],
)
def test_arguments_that_cannot_be_parsed_are_one_line_and_where_the_help_is(words, error, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said, help = capsys.readouterr().err.splitlines()
    assert error in said
    prog = " ".join(["sglang-uvm-offload", *words[:1]])
    assert said.startswith(f"{prog}: error: ")
    assert help == f"see `{prog} --help`"


def test_text_that_a_terminal_cannot_show_is_escaped(tmp_path, monkeypatch):
    path = saved(tmp_path / "é\udcff.npz", some())
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["profile", str(path)]) == 0
    assert rb"/\xe9\udcff.npz" in output.buffer.getvalue()


@pytest.mark.sglang
def test_a_models_words_reach_the_terminal_without_their_control_characters(tmp_path, capsys):
    model = json.loads((MODELS / "glm-4.5-air.json").read_text())
    config = {**model.get("config", model), "architectures": ["b\x1b[2J"], "model_type": "b"}
    (tmp_path / "m.json").write_text(json.dumps({"name": "a\x1b[2J\ud800", "config": config}))
    assert main(["plan", str(tmp_path / "m.json"), "--machine", "8xH20"]) == 2
    said = capsys.readouterr().err
    assert "has no class for the model" in said
    assert "\x1b" not in said
    (tmp_path / "m.json").write_text(json.dumps({"name": "a\x1b[2J\ud800", "config": model.get("config", model)}))
    main(["plan", str(tmp_path / "m.json"), "--machine", "8xH20"])
    assert "a?[2J?" in capsys.readouterr().out


KEPT = ("sglang_uvm_offload", "sglang_uvm_offload.cli", "sglang_uvm_offload.cli.main")


def without(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ``library`` can be imported, nor has anything of this package been but ``KEPT``; until the test ends."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in (library, "sglang_uvm_offload") and name not in KEPT:
            monkeypatch.delitem(sys.modules, name)
            package, _, own = name.rpartition(".")
            if package in KEPT:
                monkeypatch.setattr(sys.modules[package], own, module)  # so that it is again what it is now
    monkeypatch.setitem(sys.modules, library, None)


def test_launch_arguments_without_the_dashes_are_told_where_to_go(capsys):
    hint = "; give a launch's arguments after --, as in doctor -- --model-path MODEL"
    for command, hinted in (["doctor"], True), (["profile", "p.npz"], False):
        with pytest.raises(SystemExit, match="2"):
            main([*command, "--model-path", "m", "--tp", "8"])
        said = capsys.readouterr().err
        assert "unrecognized arguments: --model-path" in said
        assert (hint in said) == hinted


@pytest.mark.parametrize("words", [("--zzz",), ("--host-gb", "many"), ("--gpus", "0")])
def test_nothing_is_suggested_where_nothing_is_near(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "m", *words])
    said = capsys.readouterr().err
    assert "did you mean" not in said
    assert "such as" not in said


def test_ranks_have_sglangs_short_flags_as_well(capsys):
    command = ["plan", str(MODELS / "gpt-oss-120b.json"), "--machine", "8xH20", "--json"]
    said = []
    for flag in ("--tp", "--tp-size"):
        assert main([*command, flag, "2"]) == 0
        said.append(json.loads(capsys.readouterr().out)["parallel"])
    assert said[0] == said[1]
    assert said[0]["tp"] == 2


def test_the_doctor_lists_that_sglang_cannot_be_imported(monkeypatch, capsys):
    without("sglang", monkeypatch)
    assert main(["doctor", "--", "--model-path", "m"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  the Python package sglang is not installed" in out
    assert "cannot serve this launch" in out


def test_the_doctor_lists_that_this_package_is_not_installed(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", absent)
    found = doctor.Diagnosis()
    doctor._packages(found)
    assert found.problems == ["sglang-uvm-offload is not installed, so SGLang cannot load its plugin: pip install it"]
