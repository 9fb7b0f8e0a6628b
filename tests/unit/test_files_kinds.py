"""A file of the wrong kind is called what it is, and what other tools write of routing comes with the line that converts it."""

from __future__ import annotations

import base64
import json
import pickle
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.plans import MODELS
from builders.profiles import saved, some

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.files import kinds
from sglang_uvm_offload.files.kinds import mistaken
from sglang_uvm_offload.routing.profile import Profile
from sglang_uvm_offload.routing.trace import Trace

IDS = np.random.default_rng(0).integers(0, 64, (50, 4, 6)).astype(np.int32)
COUNTS = torch.from_numpy(np.random.default_rng(1).integers(0, 99, (3, 4, 64)))
COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": ("plan", "FILE", "--machine", "1x5090"),
    "replay": ("replay", "FILE", "--residency", "0.5"),
    "profile": ("profile", "FILE"),
    "report": ("report", "FILE", "--out", "report.html"),
}


def routed(ids: np.ndarray = IDS) -> dict[str, Any]:
    """The answer of SGLang to a request with ``return_routed_experts``."""
    return {"text": "", "meta_info": {"routed_experts": base64.b64encode(ids.tobytes()).decode()}}


def made(folder: Path) -> dict[str, Path]:
    """A file of each kind, by the command that reads it and what it is called."""
    with (folder / "trace").open("wb") as file:
        Trace(IDS, np.array([50]), 64).save(file)
    saved(folder / "profile", some())
    (folder / "info").write_text(json.dumps({"internal_states": [], "version": "0.5.23"}))
    (folder / "replayed").write_text(json.dumps({"trace": "t.npz", "scored": {}, "results": []}))
    (folder / "checkpoint").mkdir()
    config = json.loads((MODELS / "glm-4.5-air.json").read_text())["config"]
    (folder / "checkpoint" / "config.json").write_text(json.dumps(config))
    return {
        "replay a routing trace": folder / "trace",
        "profile a routing profile": folder / "profile",
        "report a saved /server_info": folder / "info",
        "report the output of replay --json": folder / "replayed",
        "plan a checkpoint folder": folder / "checkpoint",
        "plan the configuration of a model": folder / "checkpoint" / "config.json",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_the_kind_of_a_file_and_the_command_that_reads_it(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for kind, path in made(tmp_path).items():
        reader, _, what = kind.partition(" ")
        assert (mistaken(path, command) == "") == (reader == command)
        if reader != command:
            assert main([str(path) if word == "FILE" else word for word in COMMANDS[command]]) == 2
            assert f"{path}: this is {what}; `{reader}` reads it\n" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def converted(error: str, **filled: int) -> None:
    """Run the line of Python that an error ends with, with these numbers in place of its letters."""
    words = shlex.split(error.splitlines()[-1])
    assert words[:2] == ["python", "-c"]
    code = words[2]
    for letter, number in filled.items():
        code, count = re.subn(rf"(?<=[=, (]){letter}\b", str(number), code)
        assert count == 1
    exec(code, {})


def _as_object(path: Path) -> None:
    path.write_text(json.dumps(routed()))


def _as_list(path: Path) -> None:
    path.write_text(json.dumps([routed(IDS[:30]), routed(IDS[30:])], indent=1))


def _as_lines(path: Path) -> None:
    path.write_text("".join(json.dumps(routed(part)) + "\n" for part in (IDS[:30], IDS[30:])))


def _as_openai(path: Path) -> None:
    path.write_text(json.dumps({"choices": [{"index": 0}], "sglext": routed()["meta_info"]}))


def _as_nested_lists(path: Path) -> None:
    path.write_text(json.dumps({"request": 7, "experts": IDS.tolist()}))


def _as_npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, IDS)


def _as_unnamed(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, IDS)


def _without_a_number(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, ids=IDS, seq_len=np.array([30, 20]))


def _as_records(path: Path) -> None:
    records = [{"topk_ids_of_layer": torch.from_numpy(part).permute(1, 0, 2).clone()} for part in (IDS[:30], IDS[30:])]
    torch.save({"records": records, "last_physical_to_logical_map": None}, path)


@pytest.mark.parametrize(
    ("write", "filled", "lengths"),
    [
        *((write, {"E": 64, "L": 4, "K": 6}, lengths) for write, lengths in ((_as_object, [50]), (_as_list, [30, 20]))),
        *((write, {"E": 64, "L": 4, "K": 6}, lengths) for write, lengths in ((_as_lines, [30, 20]), (_as_openai, [50]))),
        *((write, {"E": 64}, [50]) for write in (_as_nested_lists, _as_npy, _as_unnamed, _as_records)),
        (_without_a_number, {"E": 64}, [30, 20]),
    ],
)
def test_routing_of_other_tools_is_told_the_line_that_converts_it(
    write: Callable[[Path], None], filled: dict[str, int], lengths: list[int], tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'a "quoted" name'
    write(path)
    assert main(["replay", str(path), "--residency", "0.5"]) == 2
    converted(capsys.readouterr().err, **filled)
    found = Trace.load("trace.npz")
    assert (found.ids == IDS).all()
    assert (found.seq_len.tolist(), found.num_experts) == (lengths, 64)


@pytest.mark.sglang
def test_the_numbers_of_an_answer_are_those_that_sglang_reads():
    from sglang.srt.state_capturer.routed_experts import extract_routed_experts_from_meta_info

    assert (extract_routed_experts_from_meta_info(routed()) == IDS.reshape(-1)).all()


@pytest.mark.parametrize("form", ["pt", "json"])
def test_counts_of_sglangs_recorder_become_a_profile(form, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    counts = COUNTS.clone()
    counts[:, 0] = 0  # a layer without experts
    if form == "pt":
        torch.save({"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}, "counts")
    else:
        Path("counts").write_text(json.dumps({"logical_count": counts.tolist()}))
    for command in (("replay", "counts", "--residency", "0.5"), ("profile", "counts")):
        assert main(list(command)) == 2
        error = capsys.readouterr().err
        assert "it counts experts, so `replay` cannot use it" in error
    converted(error, K=6)
    found = Profile.load("profile.npz")
    assert (found.model.moe_layers, found.model.num_experts, found.model.top_k) == ((1, 2, 3), 64, 6)
    assert (found.seen.routed() == counts.sum(0)[1:].numpy()).all()
    assert main(["profile", "profile.npz"]) == 0


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle was loaded",)


def test_no_pickle_is_loaded(tmp_path, capsys):
    torch.save({"logical_count": _Runs()}, tmp_path / "counts.pt")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(_Runs()))
    torch.save(_Runs(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with (tmp_path / "objects.npy").open("wb") as file:
        np.save(file, np.array([_Runs()]), allow_pickle=True)
    for path in sorted(tmp_path.iterdir()):
        for command in COMMANDS.values():
            assert main([str(path) if word == "FILE" else word for word in command]) == 2
            assert "this is " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"token,layer,expert\n1,2,3\n", "a text file; `replay` reads an npz file with ids[token, layer, k]"),
        (b'{"a": 1}\n{"a": 2}\n', "JSON lines with a; `replay` reads an npz file"),
        (b"[1, 2]", "JSON with lists; `replay` reads"),
        (b"PAR1" + bytes(20), "a Parquet file; `replay` reads"),
        (b"\x1f\x8b" + bytes(20), "a gzip archive; unpack it first"),
        (b"GGUF" + bytes(20), "a GGUF file; this plugin cannot serve GGUF; give `plan`"),
        ((60).to_bytes(8, "little") + b'{"a": {}}', "a safetensors file; give `plan` the checkpoint's folder"),
        (b'{"weight_map": {}}', "the index of a checkpoint's weights; give `plan` its folder"),
        (b"<!doctype html>", "an HTML or XML page"),
    ],
)
def test_other_files_are_named(content, what, tmp_path):
    (tmp_path / "file").write_bytes(content)
    assert mistaken(tmp_path / "file", "replay").startswith(f"this is {what}")


def test_a_folder_of_gguf_files_without_a_config_is_refused_as_one_is(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    said = mistaken(tmp_path, "plan")
    assert said.startswith(
        "this is a folder with GGUF files; this plugin cannot serve GGUF; give `plan` the config.json of an AWQ"
    )
    (tmp_path / "config.json").write_text("{}")
    assert not mistaken(tmp_path, "plan")


def test_a_damaged_file_gives_a_kind_or_none(tmp_path):
    """Each byte of the ends of a .pt and an npz file, and of what follows the first header, is changed in turn."""
    torch.save({"logical_count": COUNTS}, tmp_path / "pt")
    np.savez(tmp_path / "npz", IDS[:2])
    for path in (tmp_path / "pt", tmp_path / "npz.npz"):
        whole = path.read_bytes()
        for at in (*range(4, 200), *range(len(whole) - 400, len(whole))):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
            found = mistaken(path, "replay")
            assert not found or found.startswith("this is ")


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01\x02", b"PK\x03\x04", b"\x93NUMPY", b"[" * 100_000, b"\x93NUMPY\x01\x00\xff\xff"]
)
def test_what_is_not_known_is_left_to_the_command(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    assert mistaken(tmp_path / "file", "replay") == ""
    assert mistaken(tmp_path / "gone", "replay") == mistaken("\0", "replay") == ""


def test_a_list_too_long_to_read_is_judged_by_its_first_element(tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "MAX_JSON_BYTES", 10_000)
    (tmp_path / "file").write_text(json.dumps([routed()] * 3))
    assert "JSON with the routing of requests" in mistaken(tmp_path / "file", "replay")
