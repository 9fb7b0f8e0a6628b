"""Launch lines that publishers print, judged by ``doctor`` over the stand-in with ``auto`` and with a number: each is
served, or refused for what it takes. Checkpoints are of true shape, under the published configurations; where nothing tells the
names of its tensors, a model is launched with ``--load-format dummy``, and its bytes are those of SGLang's class."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from builders.judged import NO_CHOICE, PUBLISHED, UNKNOWN, Launch, judged, of_line, verdict
from builders.released import written
from builders.true_shape import config_folder
from nursery import Nurseries

from sglang_uvm_offload.plan.architectures import model_files

NUMBERS = ("auto", "16")
CASES = [
    pytest.param(line, number, id=f"{line['model']} {line['words'][:60]} {number}") for line in PUBLISHED for number in NUMBERS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@cache
def checkpoint(folder: Path, model: str) -> Path | None:
    return written(model, folder)


def is_served(model: str) -> bool:
    """Whether this SGLang has a class for it."""
    named = json.loads((config_folder(model) / "config.json").read_text()).get("architectures") or []
    return not model_files().keys().isdisjoint(named)


def launch(folder: Path, line: dict[str, str], number: str) -> Launch:
    at = checkpoint(folder, line["model"])
    if at is not None:
        return of_line(line, at, number)
    return of_line(line, config_folder(line["model"]), number, "--load-format", "dummy")


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, folder: Path, sglang_on_standin: Nurseries) -> dict[Launch, tuple[int | str, str]]:
    """What the doctor said of each launch that this run selected."""
    items: list[Any] = request.session.items
    chosen = [item.callspec.params for item in items if item.module is request.module]
    return judged([launch(folder, each["line"], each["number"]) for each in chosen], sglang_on_standin)


@pytest.mark.nightly
@pytest.mark.parametrize(("line", "number"), CASES)
def test_a_published_launch_is_judged_by_what_it_takes(
    record_property: Callable[[str, object], None],
    folder: Path,
    said: dict[Launch, tuple[int | str, str]],
    line: dict[str, str],
    number: str,
) -> None:
    made = launch(folder, line, number)
    code, text = said[made]
    assert isinstance(code, int), code
    if "couldn't connect" in text:
        pytest.skip("its draft model is on the Hub")
    if not is_served(line["model"]):
        pytest.skip("SGLang has no class for it, and its ranks say so")
    assert not UNKNOWN.search(text) or "cannot be combined with" in text, text
    assert code == 0 or "PROBLEM" in text or NO_CHOICE.search(text), text
    told = verdict(text).replace(made.words[made.words.index("--model-path") + 1], line["model"])
    for name, value in {"model": line["model"], "words": line["words"], "residents": number, "verdict": told}.items():
        record_property(name, value)
