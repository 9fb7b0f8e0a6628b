"""Models that are named by their id on the Hugging Face Hub, with the network replaced: nothing here leaves the machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from builders.true_shape import config_folder

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.sizing import architectures, hub
from sglang_uvm_offload.sizing.checkpoint import from_config, load
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, read_folder

MODELS = Path(__file__).parents[1] / "fixtures" / "models"


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """A Hub that does not answer, until a test lets it."""

    def unreachable(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError(
            "An error happened while trying to reach the Hub. Please check\nit"
        )

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", unreachable)
    return monkeypatch


def serve_config(network, tmp_path, config):
    """Let the Hub have ``config``, and return what it was asked for."""
    file, asked = tmp_path / "config.json", []
    file.write_text(json.dumps(config))

    def download(repo_id, filename):
        asked.append((repo_id, filename))
        if filename != "config.json":
            response = httpx.Response(404, request=httpx.Request("HEAD", "https://huggingface.co"))
            raise huggingface_hub.errors.RemoteEntryNotFoundError("404", response=response)
        return str(file)

    network.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def headers_of(folder):
    """What the Hub says of the weights in ``folder``."""
    tensors = {tensor.name: SimpleNamespace(dtype=tensor.dtype, shape=list(tensor.shape)) for tensor in read_folder(folder)}
    return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})


def test_of_a_known_family_the_config_alone_is_fetched(network, tmp_path):
    config = json.loads((MODELS / "glm-4.5-air.json").read_text())["config"]
    asked = serve_config(network, tmp_path, config)
    assert hub.load("zai-org/GLM-4.5-Air") == from_config("zai-org/GLM-4.5-Air", config)
    assert asked == [("zai-org/GLM-4.5-Air", "config.json"), ("zai-org/GLM-4.5-Air", "hf_quant_config.json")]


def test_a_quantisation_that_modelopt_states_beside_the_config_is_fetched(network):
    model = "nvidia/Qwen3-235B-A22B-NVFP4"
    network.setattr(huggingface_hub, "hf_hub_download", lambda repo_id, filename: str(config_folder(repo_id) / filename))
    shape = hub.load(model)
    assert (shape.quantization, shape.quantization_from) == ("modelopt_fp4", "hf_quant_config.json")
    assert shape.total_bytes == load(config_folder(model) / "config.json").total_bytes


def test_without_an_answer_whether_it_is_quantised_nothing_is_planned(network, tmp_path):
    def config_only(repo_id, filename):
        if filename == "config.json":
            return str(config_folder(repo_id) / filename)
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    network.setattr(huggingface_hub, "hf_hub_download", config_only)
    with pytest.raises(CheckpointError, match=r"whether it has a hf_quant_config\.json, which would, cannot be read"):
        hub.load("nvidia/Qwen3-235B-A22B-NVFP4")


def test_of_an_unknown_family_the_headers_are_fetched_too(network, tmp_path, checkpoints):
    folder = checkpoints("qwen3_moe")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "new_moe"}
    serve_config(network, tmp_path, config)
    network.setattr(huggingface_hub, "get_safetensors_metadata", lambda repo_id: headers_of(folder))
    assert hub.load("new/Model") == dataclasses.replace(load(folder), name="new/Model", family="new_moe")


def test_tensors_of_unknown_types_are_refused(network, tmp_path, checkpoints):
    folder = checkpoints("qwen3_moe")
    serve_config(network, tmp_path, json.loads((folder / "config.json").read_text()) | {"model_type": "new_moe"})
    headers = headers_of(folder)
    next(iter(headers.files_metadata["model.safetensors"].tensors.values())).dtype = "F3"
    network.setattr(huggingface_hub, "get_safetensors_metadata", lambda repo_id: headers)
    with pytest.raises(CheckpointError, match="tensors of type F3, whose size is unknown"):
        hub.load("new/Model")


def test_without_network_one_line_says_what_to_fetch_elsewhere(capsys):
    assert main(["plan", "zai-org/GLM-4.5-Air", "--machine", "4x4090"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "LocalEntryNotFoundError: An error happened while trying to reach the Hub)" in line
    assert "hf download zai-org/GLM-4.5-Air config.json --local-dir DIR" in line
    assert "DIR/config.json" in line


def test_without_the_headers_one_line_says_what_to_fetch_elsewhere(network, tmp_path, capsys, checkpoints):
    config = json.loads((checkpoints("qwen3_moe") / "config.json").read_text()) | {"model_type": "new_moe"}
    serve_config(network, tmp_path, config)
    assert main(["plan", "new/Model", "--machine", "4x4090"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "hf download new/Model --local-dir DIR" in line


def test_a_model_is_planned_for_by_its_id_and_served_by_it(network, tmp_path, capsys):
    serve_config(network, tmp_path, json.loads((MODELS / "glm-4.5-air.json").read_text())["config"])
    assert main(["plan", "zai-org/GLM-4.5-Air", "--machine", "4x4090", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flags"][0] == "--model-path zai-org/GLM-4.5-Air"


def test_a_path_that_exists_wins(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zai-org").mkdir()
    (tmp_path / "zai-org" / "GLM-4.5-Air").write_text((MODELS / "glm-4.5-air.json").read_text())
    assert main(["plan", "zai-org/GLM-4.5-Air", "--machine", "4x4090"]) == 0


@pytest.mark.parametrize("name", ["config.json", "/a/b", "../a", "./a", "a/b/c", "a/", "-a/b", "a b/c", "https://hf.co/a"])
def test_what_can_be_no_id_is_a_path(name, capsys):
    assert not hub.is_id(name)


# The architecture


def test_an_architecture_that_this_sglang_does_not_have_is_noted(tmp_path, capsys):
    config = json.loads((MODELS / "glm-4.5-air.json").read_text())["config"]
    for named, noted in (("Glm4MoeForCausalLM", False), ("NoSuchMoeForCausalLM", True)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
        assert main(["plan", str(tmp_path / "config.json"), "--machine", "4x4090"]) == 0
        assert ("has no NoSuchMoeForCausalLM" in capsys.readouterr().out) == noted


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_the_architectures_of_known_models_are_found(path):
    named = load(path).architectures
    assert set(named) <= architectures.sglang_architectures()
    assert architectures.unserved_note(named) == ""


def test_without_sglang_no_architecture_is_missed(monkeypatch):
    monkeypatch.setattr(architectures.importlib.util, "find_spec", lambda name: None)
    assert architectures.unserved_note(["NoSuchMoeForCausalLM"]) == ""
