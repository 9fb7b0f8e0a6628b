"""Models that are named by their id on the Hugging Face Hub, which a server on this machine stands in for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.hub import COMMIT, Hub, cached, serving
from builders.true_shape import checkpoint, config_folder
from huggingface_hub.errors import GatedRepoError

from scripts.harness.patience import patience
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.plan import hub, hub_program
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.safetensors_header import MAX_JSON_BYTES

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
MODEL, NVFP4 = "Qwen/Qwen3-30B-A3B", "nvidia/Qwen3-235B-A22B-NVFP4"
PLAN = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from builders.shapes import use_recorded
from sglang_uvm_offload.cli.main import main
use_recorded()
sys.exit(main(["plan", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of which only the config is there, one whose weights SGLang need not know the names of, and one that it has no class
    for."""
    folder = tmp_path_factory.mktemp("models")
    out = {name: config_folder(name) for name in (MODEL, NVFP4)}
    for name in ("weights", "unknown"):
        out[f"maker/{name}"] = made = folder / name
        made.mkdir()
        config = json.loads((config_folder(MODEL) / "config.json").read_text())
        changed = {"model_type": "new_moe", "architectures": ["NewMoe"]} if name == "unknown" else {}
        (made / "config.json").write_text(json.dumps(config | changed))
        (made / "model.safetensors").write_bytes(bytes(1 << 20))
    return out


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[Hub]:
    with serving(models) as server:
        yield server


def planned(name: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PLAN, name, "--machine", "1xH200", "--json"]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=patience(120))


@pytest.mark.slow
@pytest.mark.parametrize("name", [MODEL, "maker/weights"])
def test_the_config_alone_is_fetched(name, server, tmp_path):
    before = server.bytes_of_weights()
    ended = planned(name, server.env(tmp_path))
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert plan["model"] == name
    assert plan["flags"][0] == f"--model-path {name}"
    assert plan["weights_bytes"] == shape_of(config_folder(MODEL)).total_bytes
    assert server.bytes_of_weights() == before


@pytest.mark.slow
@pytest.mark.parametrize("weights", [True, False])
def test_what_is_downloaded_is_read_and_not_asked_for(weights, server, tmp_path):
    """Whole, or offline."""
    folder = checkpoint(MODEL, tmp_path / "model") if weights else config_folder(MODEL)
    cached(tmp_path / "hub", "maker/mine", folder)
    before = len(server.fetched)
    ended = planned("maker/mine", server.env(tmp_path) | ({} if weights else {"HF_HUB_OFFLINE": "1"}))
    if weights:
        assert json.loads(ended.stdout)["weights_bytes"] == shape_of(config_folder(MODEL)).total_bytes
    else:
        assert "whether it has a hf_quant_config.json" in ended.stderr
    assert len(server.fetched) == before


@pytest.mark.slow
def test_offline_the_cache_knows_of_a_file_that_the_model_does_not_have(server, tmp_path):
    assert planned(MODEL, server.env(tmp_path)).returncode == 0
    assert planned(MODEL, server.env(tmp_path) | {"HF_HUB_OFFLINE": "1"}).returncode == 0


@pytest.mark.slow
def test_without_an_answer_whether_it_is_quantised_nothing_is_planned(server, tmp_path):
    cached(tmp_path / "hub", MODEL, config_folder(MODEL), files="config.json")
    ended = planned(MODEL, server.env(tmp_path) | {"HF_HUB_OFFLINE": "1"})
    assert ended.returncode == 2
    assert (
        "config.json states no quantisation, and whether it has a hf_quant_config.json, which would, cannot be" in ended.stderr
    )


@pytest.mark.slow
def test_a_quantisation_that_modelopt_states_beside_the_config_is_fetched(server, tmp_path):
    """The config alone would be planned as BF16."""
    ended = planned(NVFP4, server.env(tmp_path))
    assert ended.returncode in (0, 1), ended.stderr
    plan = json.loads(ended.stdout)
    assert plan["quantization"] == "modelopt_fp4"
    assert plan["weights_bytes"] == shape_of(config_folder(NVFP4)).total_bytes


@pytest.mark.slow
def test_a_model_that_sglang_has_no_class_for_is_one_line(server, tmp_path):
    ended = planned("maker/unknown", server.env(tmp_path))
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert re.fullmatch(
        r"sglang-uvm-offload plan: error: SGLang \S+ has no class for the model, whose config names \['NewMoe'\]", line
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maker/none", MODEL])
def test_without_the_config_one_line_says_what_to_fetch_elsewhere(name, server, tmp_path):
    gone = {"HF_ENDPOINT": "http://127.0.0.1:9"} if name == MODEL else {}
    ended = planned(name, server.env(tmp_path) | gone)
    assert ended.returncode == 2
    line = ended.stderr.splitlines()[-1]
    assert line.startswith(
        f"sglang-uvm-offload plan: error: {name}: there is no such path, and its config.json cannot be read from the Hugging "
        "Face Hub ("
    )
    assert "Hub (no connection to the Hub, or no such model)" in line
    assert f"run hf download {name} config.json --local-dir DIR" in line
    assert "give DIR/config.json" in line


def test_a_gated_model_is_not_said_to_be_absent():
    gated = GatedRepoError.__new__(GatedRepoError, "Access to model m is restricted. Log in")
    assert hub_program._reason(gated).startswith("GatedRepoError: ")


def test_a_config_without_end_is_not_downloaded(tmp_path):
    (tmp_path / "endless").mkdir()
    with open(tmp_path / "endless" / "config.json", "wb") as file:
        file.write((config_folder(MODEL) / "config.json").read_bytes())
        file.write(b" " * (MAX_JSON_BYTES + 1 - file.tell()))
    with serving({"maker/endless": tmp_path / "endless"}) as other:
        ended = planned("maker/endless", other.env(tmp_path / "home"))
    assert ended.returncode == 2
    assert "its config.json cannot be read from the Hugging Face Hub (it is larger than 64 MiB)" in ended.stderr
    assert not list((tmp_path / "home").rglob("config.json"))


def test_a_hub_that_drips_is_not_awaited_for_ever(models, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "SECONDS", 4)
    with serving(models) as other:
        other.dripping = "config.json"
        for name, value in other.env(tmp_path).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(hub.Unseen, match="it was not sent within 4 seconds"):
            hub.config_file(MODEL, revision=COMMIT)


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
