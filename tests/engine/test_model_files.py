"""A model is estimated alike wherever its files are: in a folder, in the Hugging Face cache, or on the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.hub import Hub, cached, serving
from builders.judged import Launch, judged, verdict
from builders.true_shape import checkpoint
from nursery import Nurseries

N = "--expert-offload-num-resident"
MODEL = "Qwen/Qwen3-30B-A3B"
"""54 GiB of experts, 3 GiB of other weights."""
ON_CUDA = ["--device", "cuda", "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
ROOM = ["--max-total-tokens", "32768", "--mem-fraction-static", "0.3"]
"""Of 140 GiB."""
ENOUGH, SHORT = 40, 20
"""GiB of host RAM, for half of the experts."""


pytestmark = pytest.mark.nightly
"""``unit/test_plan_hub.py`` reads from the same Hub in every run."""

PLACES = ["folder", "cache", "revision in the cache", "download dir", "Hub", "revision on the Hub", "config in the cache"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(MODEL, tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def hub(model: Path) -> Iterator[Hub]:
    with serving({"on/hub": model, "on/hub@old": model, "half/there": model}) as hub:
        yield hub


@pytest.fixture(scope="module")
def said(model: Path, hub: Hub, sglang_on_standin: Nurseries, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The verdict on each launch."""
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
        "config in the cache": ["half/there"],
    }
    assert [*where] == PLACES
    launches: dict[str, Launch] = {}
    for name, words in where.items():
        begin = ("--model-path", *words, *ON_CUDA, *ROOM, N)
        launches[f"{name}, short"] = Launch((*begin, "64"), host_gib=SHORT)
        launches[f"{name}, room"] = Launch((*begin, "64"), host_gib=ENOUGH)
        launches[f"{name}, auto"] = Launch((*begin, "auto"), host_gib=ENOUGH)
    found = judged(list(launches.values()), sglang_on_standin, **hub.env(home))
    return {name: verdict(found[launch][1]) for name, launch in launches.items()}


@pytest.mark.parametrize("place", PLACES)
def test_host_ram_is_estimated_wherever_the_files_are(said: dict[str, str], place: str) -> None:
    short = "host RAM: with 64 of 128 experts a layer resident 32.77 GiB are needed, and 20.00 GiB are available"
    assert said[f"{place}, short"].startswith(f"estimated not to fit: {short}")
    assert said[f"{place}, room"] == "served: 64 of 128 experts a layer resident"


@pytest.mark.parametrize("place", PLACES)
def test_auto_is_the_same_number_wherever_the_files_are(said: dict[str, str], place: str) -> None:
    assert said[f"{place}, auto"] == said["folder, auto"]
    assert said[f"{place}, auto"].startswith("served: ")


def test_no_weights_are_fetched(said: dict[str, str], hub: Hub) -> None:
    assert hub.bytes_of_weights() == 0
