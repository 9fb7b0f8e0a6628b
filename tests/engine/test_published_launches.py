"""Launch lines that publishers print, judged by ``doctor`` over the stand-in with ``auto`` and with a number: each is
served, or refused for what it takes. Checkpoints are of true shape, under the published configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from builders.judged import NO_CHOICE, PUBLISHED, UNKNOWN, Launch, judged, of_line, verdict
from builders.released import written
from nursery import Starts

NUMBERS = ("auto", "16")
CASES = [
    pytest.param(line, number, id=f"{line['model']} {line['words'][:60]} {number}") for line in PUBLISHED for number in NUMBERS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@cache
def checkpoints(folder: Path) -> dict[str, Path | None]:
    return {model: written(model, folder) for model in {line["model"] for line in PUBLISHED}}


@cache
def found(folder: Path, python: Starts) -> dict[Launch, tuple[int | str, str]]:
    held = checkpoints(folder)
    launches = [of_line(line, at, number) for line in PUBLISHED if (at := held[line["model"]]) for number in NUMBERS]
    return judged(launches, python)


@pytest.mark.nightly
@pytest.mark.parametrize(("line", "number"), CASES)
def test_a_published_launch_is_judged_by_what_it_takes(
    record_property: Callable[[str, object], None], folder: Path, sglang_on_standin: Starts, line: dict[str, str], number: str
) -> None:
    at = checkpoints(folder)[line["model"]]
    if at is None:
        pytest.skip("neither our rules nor transformers know the tensors of its checkpoint")
    code, said = found(folder, sglang_on_standin)[of_line(line, at, number)]
    assert isinstance(code, int), code
    if "couldn't connect" in said:
        pytest.skip("its draft model is on the Hub")
    if "no draft layers of its own" in said:
        pytest.skip("transformers' class has no draft layers, so the checkpoint made of it has none")
    assert not UNKNOWN.search(said) or "cannot be combined with" in said, said
    assert code == 0 or "PROBLEM" in said or NO_CHOICE.search(said), said
    for name, value in {"model": line["model"], "words": line["words"], "residents": number, "verdict": verdict(said)}.items():
        record_property(name, value)
