"""Load formats whose files, packages or models are not there, which SGLang finds out once it has built a model."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from builders.launch import MODEL, arguments
from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader, ShardedStateLoader

from sglang_uvm_offload.plugin.checks.combinations import LOAD_FORMATS
from sglang_uvm_offload.plugin.checks.load_formats import FILES, PACKAGES, problems
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import local_checkpoint

pytestmark = pytest.mark.sglang

ALL = ("model.safetensors", "consolidated.safetensors", "a.bin", "a.pt", "model-rank-0-part-0.safetensors")


def found(load_format: str, model: Path | str = MODEL, **others: Any) -> list[str]:
    return problems(resolving_view(arguments(load_format=load_format, model_path=str(model), **others)))


def of_sglang(load_format: str, folder: Path) -> bool:
    """Whether SGLang's own loader finds files in the folder."""
    if load_format == "sharded_state":
        return bool([*folder.glob(ShardedStateLoader.DEFAULT_PATTERN.format(rank=0, part="*"))])
    try:
        return bool(DefaultModelLoader(LoadConfig(load_format=load_format))._prepare_weights(str(folder), None, True)[1])
    except RuntimeError:
        return False


@pytest.mark.parametrize("load_format", sorted(FILES))
@pytest.mark.parametrize("name", ALL)
def test_a_folder_is_refused_where_sglang_finds_no_file_of_the_format_in_it(tmp_path, monkeypatch, load_format, name):
    monkeypatch.setattr("sglang_uvm_offload.plugin.checks.load_formats.PACKAGES", {})
    monkeypatch.setattr("sglang.srt.model_loader.loader.get_server_args", lambda: None)
    (tmp_path / name).touch()
    refused = found(load_format, tmp_path)
    assert bool(refused) is not of_sglang(load_format, tmp_path)
    if refused:
        assert refused == [f"--load-format {load_format}: {tmp_path} holds no {' or '.join(FILES[load_format])} file"]


def test_files_of_other_names_and_models_of_the_hub_are_left_to_sglang(tmp_path):
    assert found("pt", "owner/model") == []
    assert found("sharded_state", tmp_path, model_loader_extra_config='{"pattern": "x-{rank}-{part}"}') == []


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_safetensors_alone_are_read_as_such(tmp_path, suffix):
    (tmp_path / f"a{suffix}").touch()
    view = {name: resolving_view(arguments(load_format=name, model_path=str(tmp_path))) for name in ("auto", "safetensors")}
    assert local_checkpoint.damage(view["auto"]) == []
    assert bool(local_checkpoint.damage(view["safetensors"])) == (suffix == ".bin")


@pytest.mark.parametrize(("load_format", "package"), sorted(PACKAGES.items()))
def test_a_format_whose_package_is_not_installed_is_refused(load_format, package, monkeypatch):
    monkeypatch.setattr("sglang_uvm_offload.plugin.checks.load_formats.FILES", {})
    monkeypatch.setitem(PACKAGES, load_format, f"no_such_package.{package}")
    assert found(load_format) == [
        f"--load-format {load_format}: SGLang needs the Python package no_such_package.{package} for it, which is not installed"
    ]
    monkeypatch.setitem(PACKAGES, load_format, "json")
    assert found(load_format) == []


def test_a_remote_model_needs_an_address():
    (line,) = found("remote")
    assert line == f"--load-format remote: it loads from an address such as redis:// or s3://, and the model is {MODEL}"
    (line,) = problems(
        resolving_view(arguments(speculative_draft_load_format="remote", speculative_draft_model_path="o/draft"))
    )
    assert line.startswith("--speculative-draft-load-format remote: ")
    assert line.endswith(" o/draft")


def test_the_formats_are_sglangs():
    assert {*PACKAGES, *FILES} - set(LOAD_FORMAT_CHOICES) == set()
    assert set(LOAD_FORMATS) <= {each.value for each in LoadFormat}


@pytest.mark.parametrize(
    ("says", "models"),
    [("def load_weights_to_module", {"torch_native_llama"}), ("@supports_quantized_rl_reload", {"qwen2", "qwen3"})],
)
def test_no_model_with_experts_is_loaded_by_layers_or_as_flash_rl(says, models):
    folder = Path(inspect.getfile(DefaultModelLoader)).parents[1] / "models"
    sources = {path.stem: path.read_text() for path in folder.rglob("*.py")}
    found = {name for name, text in sources.items() if re.search(rf"^\s*{says}", text, re.MULTILINE)}
    assert found
    assert found <= models
    assert not any("FusedMoE" in sources[name] for name in found)
