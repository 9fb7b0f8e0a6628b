"""Local models that cannot be read are told before SGLang tries, which would take a path for a hub id, or wait for a pipe."""

from __future__ import annotations

import os

import pytest
from builders.launch import arguments

from sglang_uvm_offload.plan.model_files import ModelFiles
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.dry_launch import Launch
from sglang_uvm_offload.plugin.launch.local_checkpoint import damage, unreadable

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("model", ["/nonexistent/model", "./model", "../model", "~/model", "a/b/c", "/nonexistent/a\udcff"])
def test_a_path_that_is_not_there_is_no_hub_id(model):
    assert unreadable(model) == "no such folder"


@pytest.mark.parametrize("model", ["org/model", "model", "s3://bucket/models/m", "redis://host:1/a/b", "https://host/a/b"])
def test_a_hub_id_or_an_address_is_left_to_sglang(model):
    assert unreadable(model) is None


def test_a_folder_with_a_file_that_may_be_read_for_ever_is_not_read(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "gone").symlink_to("nowhere")
    assert unreadable(str(tmp_path)) is None
    os.mkfifo(tmp_path / "tokenizer.json")
    assert unreadable(str(tmp_path)) == "contains tokenizer.json, which is a pipe, not a regular file"
    assert unreadable(str(tmp_path / "config.json")) is None, "a file is judged elsewhere"


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_safetensors_alone_are_read_as_such(tmp_path, suffix):
    (tmp_path / f"a{suffix}").touch()
    auto, alone = (resolving_view(arguments(load_format=name, model_path=str(tmp_path))) for name in ("auto", "safetensors"))
    assert damage(auto) == []
    assert bool(damage(alone)) == (suffix == ".bin")


def test_the_doctor_names_the_flag():
    launch = object.__new__(Launch)
    launch.args = arguments(model_path="/nonexistent/m", tokenizer_path="org/m")
    assert launch.unreadable_models() == ["--model-path /nonexistent/m: no such folder"]


def test_a_path_that_no_file_can_have_is_no_folder():
    assert ModelFiles("a" * 5000).folder is None
