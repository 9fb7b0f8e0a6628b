"""A model is judged alike wherever its files are: in a folder, in the Hugging Face cache, or on the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders.hub import Hub, cached, serving
from builders.true_shape import checkpoint
from launches import launched
from nursery import Nurseries

from sglang_uvm_offload.sizing.machine import GIB

N = "--expert-offload-num-resident"
MODEL = "Qwen/Qwen3-30B-A3B"
"""54 GiB of experts, 3 GiB of other weights."""
ON_CUDA = ["--device", "cuda", "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
STANDALONE = [
    *["--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1"],
    *["--speculative-num-draft-tokens", "3", "--speculative-draft-model-path"],
]
ROOM, SHORT = 40 * GIB, 20 * GIB
"""Of host RAM, for half of the experts."""


pytestmark = pytest.mark.nightly
"""Each case is three starts of SGLang; ``unit/test_sizing_hub.py`` reads from the same Hub in every run."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(MODEL, tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def hub(model: Path) -> Iterator[Hub]:
    with serving({"on/hub": model, "on/another": model, "on/hub@old": model, "on/draft": model, "half/there": model}) as hub:
        yield hub


@pytest.fixture(scope="module")
def launch(model: Path, hub: Hub, sglang_on_standin: Nurseries, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("home")
    other = home / "other"
    cached(home / "hub", "in/cache", model)
    cached(home / "hub", "of/revision", model, revision="old")
    cached(other, "in/other", model)
    for name in ("in/other", "half/there", "of/revision"):
        cached(home / "hub", name, model, files="*.json")
    where = {
        "folder": [str(model)],
        "cache": ["in/cache"],
        "revision in the cache": ["of/revision", "--revision", "old"],
        "download dir": ["in/other", "--download-dir", str(other)],
        "Hub": ["on/hub"],
        "revision on the Hub": ["on/hub", "--revision", "old"],
        "half in the cache": ["half/there"],
    }
    cases: dict[str, dict[str, Any]] = {}
    for name, words in where.items():
        begin = ["--model-path", *words, *ON_CUDA, "--max-total-tokens", "32768", N]
        cases[f"{name}, short"] = {"argv": [*begin, "64"], "host_bytes": SHORT}
        cases[f"{name}, room"] = {"argv": [*begin, "64"], "host_bytes": ROOM}
        cases[f"{name}, auto"] = {"argv": [*begin, "auto"], "host_bytes": ROOM}
    fits = ["--model-path", "on/hub", *ON_CUDA, "--max-total-tokens", "32768", N, "auto"]
    cases["draft on the Hub"] = {"argv": [*fits, *STANDALONE, "on/draft"], "host_bytes": ROOM}
    jobs = {name: {**case, "resolve": True} for name, case in cases.items()}
    return launched(jobs, sglang_on_standin, STANDIN_VRAM=str(48 * GIB), **hub.env(home))


PLACES = ["folder", "cache", "revision in the cache", "download dir", "Hub", "revision on the Hub", "half in the cache"]


@pytest.mark.parametrize("place", PLACES)
def test_host_ram_is_checked_wherever_the_files_are(launch, place):
    assert launch[f"{place}, short"]["exit"] == 2, launch[f"{place}, short"]["error"]
    assert f"{N} 64: the offloaded experts need 27.00 GiB of host RAM" in launch[f"{place}, short"]["error"]
    assert launch[f"{place}, room"]["exit"] is None, launch[f"{place}, room"]["error"]
    assert "is not checked" not in launch[f"{place}, room"]["error"]


@pytest.mark.parametrize("place", PLACES)
def test_auto_finds_the_same_number_wherever_the_files_are(launch, place):
    assert launch[f"{place}, auto"]["exit"] is None, launch[f"{place}, auto"]["error"]
    of_the_folder = launch["folder, auto"]["flags"]["expert_offload_num_resident"]
    assert launch[f"{place}, auto"]["flags"]["expert_offload_num_resident"] == of_the_folder


def test_a_draft_model_on_the_hub_is_counted(launch):
    """Its 57 GiB would be in VRAM whole, and the GPU has 48."""
    assert launch["draft on the Hub"]["exit"] == 2
    assert f"{N} auto: VRAM: with no expert resident a rank needs 6" in launch["draft on the Hub"]["error"]


def test_no_weights_are_fetched(launch, hub):
    assert 0 < hub.bytes_of_weights() < 64 << 20
    assert not [name for name, count in hub.fetched if name.endswith(".safetensors") and count > 1 << 20]
