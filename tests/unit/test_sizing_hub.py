"""Models that are named by their id on the Hugging Face Hub, which a server on this machine stands in for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.hub import COMMIT, Hub, cached, serving
from builders.true_shape import checkpoint, config_folder

from scripts.harness.patience import patience
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.sizing import architectures, hub
from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.safetensors_header import MAX_JSON_BYTES, TensorInfo, read_folder

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
MODEL = "Qwen/Qwen3-30B-A3B"
PLAN = "import sys; from sglang_uvm_offload.cli.main import main; sys.exit(main(['plan', *sys.argv[1:]]))"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A known family; one that no rule knows; one whose weights are not there; and one with a tensor of a new type."""
    folder = tmp_path_factory.mktemp("models")
    known = checkpoint(MODEL, folder / "known")
    out = {"maker/known": known, **{name: config_folder(name) for name in ("nvidia/Qwen3-235B-A22B-NVFP4",)}}
    for name in ("unknown", "bare", "unknown-bare", "typed"):
        out[f"maker/{name}"] = made = folder / name
        made.mkdir()
        config = json.loads((known / "config.json").read_text())
        changed = {"model_type": "new_moe", "architectures": ["NewMoe"]} if name.startswith("unknown") else {}
        (made / "config.json").write_text(json.dumps(config | changed))
    for file in known.glob("model*"):
        (out["maker/unknown"] / file.name).symlink_to(file)
    text = json.dumps({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (out["maker/typed"] / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"0")
    return out


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[Hub]:
    with serving(models) as server:
        yield server


def planned(name: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PLAN, name, "--machine", "1xH200", "--json"]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=patience(120))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maker/known", "maker/unknown"])
def test_the_headers_of_any_family_are_read_by_range(name, server, models, tmp_path):
    before = server.bytes_of_weights()
    ended = planned(name, server.env(tmp_path))
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert plan["model"] == name
    assert plan["flags"][0] == f"--model-path {name}"
    assert plan["weights_bytes"] == load(models[name]).total_bytes
    assert not [note for note in plan["notes"] if "derived from the config" in note]
    assert 0 < server.bytes_of_weights() - before < 8 << 20


@pytest.mark.slow
def test_a_quantisation_that_no_config_tells_is_in_the_headers(server, models, tmp_path):
    """The config says bfloat16; the experts are of one byte."""
    folder = tmp_path / "bytes"
    shapes = [(t.name, "F8_E4M3" if ".experts." in t.name else t.dtype, t.shape) for t in read_folder(models["maker/known"])]
    checkpoint(MODEL, folder, [TensorInfo(*shape) for shape in shapes])
    with serving({"maker/bytes": folder}) as other:
        ended = planned("maker/bytes", other.env(tmp_path / "home"))
    assert json.loads(ended.stdout)["expert_bytes"] == load(models["maker/known"]).expert_bytes // 2


@pytest.mark.slow
def test_what_is_downloaded_is_read_and_not_asked_for(server, models, tmp_path):
    cached(tmp_path / "hub", "maker/mine", models["maker/known"])
    before = len(server.fetched)
    ended = planned("maker/mine", server.env(tmp_path))
    assert json.loads(ended.stdout)["weights_bytes"] == load(models["maker/known"]).total_bytes
    assert len(server.fetched) == before


@pytest.mark.slow
@pytest.mark.parametrize("offline", [False, True])
def test_without_the_headers_the_config_tells_and_what_was_not_seen_is_noted(server, models, tmp_path, offline):
    """Offline, the cache knows of a file that the model does not have, once it was asked for."""
    name = "maker/bare"
    if offline:
        assert planned(name, server.env(tmp_path)).returncode == 0
    ended = planned(name, server.env(tmp_path) | ({"HF_HUB_OFFLINE": "1"} if offline else {}))
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert plan["weights_bytes"] == load(models["maker/known"]).total_bytes
    reason = "OfflineModeIsEnabled" if offline else "NotASafetensorsRepoError"
    (note,) = [note for note in plan["notes"] if note.startswith(f"{name}: its weights are not on this machine")]
    assert f"their headers cannot be read from the Hugging Face Hub ({reason}" in note


@pytest.mark.slow
def test_without_an_answer_whether_it_is_quantised_nothing_is_planned(server, models, tmp_path):
    cached(tmp_path / "hub", "maker/known", models["maker/known"], files="config.json")
    ended = planned("maker/known", server.env(tmp_path) | {"HF_HUB_OFFLINE": "1"})
    assert ended.returncode == 2
    assert (
        "config.json states no quantisation, and whether it has a hf_quant_config.json, which would, cannot be" in ended.stderr
    )


@pytest.mark.slow
def test_a_quantisation_that_modelopt_states_beside_the_config_is_fetched(server, tmp_path):
    """Its weights are not there, and the config alone would be planned as BF16."""
    name = "nvidia/Qwen3-235B-A22B-NVFP4"
    ended = planned(name, server.env(tmp_path))
    assert ended.returncode in (0, 1), ended.stderr
    plan = json.loads(ended.stdout)
    assert (plan["quantization"], plan["quantization_from"]) == ("modelopt_fp4", "hf_quant_config.json")
    assert plan["weights_bytes"] == load(config_folder(name) / "config.json").total_bytes


@pytest.mark.slow
def test_without_the_headers_of_an_unknown_family_one_line_says_what_to_fetch(server, tmp_path):
    ended = planned("maker/unknown-bare", server.env(tmp_path))
    assert ended.returncode == 2
    assert "error: maker/unknown-bare: its weights are not on this machine" in ended.stderr
    assert "hf download maker/unknown-bare --local-dir DIR" in ended.stderr


@pytest.mark.slow
def test_tensors_of_unknown_types_are_refused(server, tmp_path):
    ended = planned("maker/typed", server.env(tmp_path))
    assert (ended.returncode, "F3" in ended.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maker/none", "maker/known"])
def test_without_the_config_one_line_says_what_to_fetch_elsewhere(name, server, tmp_path):
    gone = {"HF_ENDPOINT": "http://127.0.0.1:9"} if name == "maker/known" else {}
    ended = planned(name, server.env(tmp_path) | gone)
    assert ended.returncode == 2
    line = ended.stderr.splitlines()[-1]
    assert line.startswith(
        f"error: {name}: there is no such path, and its config.json cannot be read from the Hugging Face Hub ("
    )
    assert f"run hf download {name} config.json --local-dir DIR" in line
    assert "give DIR/config.json" in line


def test_a_config_without_end_is_not_downloaded(models, tmp_path):
    (tmp_path / "endless").mkdir()
    with open(tmp_path / "endless" / "config.json", "wb") as file:
        file.write((models["maker/known"] / "config.json").read_bytes())
        file.write(b" " * (MAX_JSON_BYTES + 1 - file.tell()))
    with serving({"maker/endless": tmp_path / "endless"}) as other:
        ended = planned("maker/endless", other.env(tmp_path / "home"))
    assert ended.returncode == 2
    assert "its config.json cannot be read from the Hugging Face Hub (it is larger than 64 MiB)" in ended.stderr
    assert not list((tmp_path / "home").rglob("config.json"))


@pytest.mark.parametrize(
    ("ask", "file"),
    [(hub.config_file, "config.json"), (hub.headers, "model.safetensors.index.json")],
    ids=["config", "headers"],
)
def test_a_hub_that_drips_is_not_awaited_for_ever(ask, file, models, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "SECONDS", 4)
    with serving(models) as other:
        other.dripping = file
        for name, value in other.env(tmp_path).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(hub.Unseen, match="it was not sent within 4 seconds"):
            ask("maker/known", revision=COMMIT)


def test_a_hub_program_that_ends_adds_its_reason(monkeypatch):
    monkeypatch.setattr(hub, "PROGRAM", "no.such.program")
    with pytest.raises(hub.Unseen, match=r"maker/ended: there is no such path, and .*No module named 'no'.*; run hf download"):
        hub.config_file("maker/ended")


@pytest.mark.slow
def test_a_path_that_exists_wins(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zai-org").mkdir()
    (tmp_path / "zai-org" / "GLM-4.5-Air").write_text((MODELS / "glm-4.5-air.json").read_text())
    assert main(["plan", "zai-org/GLM-4.5-Air", "--machine", "4x4090"]) == 0


@pytest.mark.parametrize("name", ["config.json", "/a/b", "../a", "./a", "a/b/c", "a/", "-a/b", "a b/c", "https://hf.co/a"])
def test_what_can_be_no_id_is_a_path(name, capsys):
    assert not hub.is_id(name)


# The architecture


@pytest.mark.sglang
def test_an_architecture_that_this_sglang_does_not_have_is_noted(tmp_path, capsys):
    config = json.loads((MODELS / "glm-4.5-air.json").read_text())["config"]
    for named, noted in (("Glm4MoeForCausalLM", False), ("NoSuchMoeForCausalLM", True)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
        assert main(["plan", str(tmp_path / "config.json"), "--machine", "4x4090"]) == 0
        assert ("has no NoSuchMoeForCausalLM" in capsys.readouterr().out) == noted


@pytest.mark.sglang
@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_the_architectures_of_known_models_are_found(path):
    named = load(path).architectures
    assert set(named) <= architectures.sglang_architectures()
    assert architectures.unserved_note(named) == ""


def test_without_sglang_no_architecture_is_missed(monkeypatch):
    monkeypatch.setattr(architectures.importlib.util, "find_spec", lambda name: None)
    assert architectures.unserved_note(["NoSuchMoeForCausalLM"]) == ""
