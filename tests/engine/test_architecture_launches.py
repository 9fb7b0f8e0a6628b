"""A launch of each architecture that SGLang builds with its ``FusedMoE`` layer, judged by ``doctor`` over the stand-in with
``auto`` and with a number: of a model whose configuration is published, with a line that is published for it, else small."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from architectures.names import DRAFT, EXCEPTIONS, FOLDER, FOUND, UNBUILDABLE, served
from builders.judged import NO_CHOICE, PUBLISHED, UNKNOWN, Launch, judged, of_line
from nursery import Nurseries, Nursery

from sglang_uvm_offload.plugin.checks.launch_checks import DIRECT_KERNEL_MODELS

pytestmark = pytest.mark.since("0.5.22", "before, a process cannot look at a launch as its ranks will")
NUMBERS = ("auto", "2")


def names() -> list[str]:
    left_out = DIRECT_KERNEL_MODELS | UNBUILDABLE
    return [name for name in FOUND["FusedMoE"] if name not in left_out and not DRAFT.search(name)]


LINES = {line["model"]: line for line in reversed(PUBLISHED)}
"""The first line of each model."""


def written(folder: Path, python: Nursery, chosen: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By architecture, what ``architectures.checkpoints`` has written."""
    ended = python.run(
        f"""
        import sys
        sys.path.insert(0, {str(FOLDER.parent)!r})
        from architectures.checkpoints import main
        main({str(folder)!r}, *{list(chosen)!r})
        """
    )
    assert ended.code == 0, ended.err[-4000:]
    return json.loads(ended.out.rpartition("RESULT ")[2])


def launches(made: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Launch]:
    return {
        (name, number): of_line(LINES.get(each["model"], {}), Path(each["folder"]), number, *each["words"])
        for name, each in made.items()
        for number in NUMBERS
    }


def found(
    folder: Path, models: Nursery, python: Nurseries, chosen: Sequence[str]
) -> dict[tuple[str, str], tuple[Launch, int | str, str]]:
    asked = launches(written(folder, models, chosen))
    said = judged(list(asked.values()), python)
    return {key: (launch, *said[launch]) for key, launch in asked.items()}


PLAIN = """
import json
from sglang.srt import server_args
made = server_args.prepare_server_args(json.loads({words!r}))
made.resolve_once()
"""


def assert_judged(name: str, launch: Launch, code: int | str, said: str, python: Nurseries) -> None:
    if "SGLang refuses" in said:
        mine = launch.words.index("--expert-offload-num-resident")
        words = json.dumps([*launch.words[:mine], *launch.words[mine + 2 :]])
        plain = python.run(PLAIN.format(words=words), STANDIN_GPUS="8", SGLANG_PLUGINS="none")
        assert plain.code, f"without the plugin SGLang serves it: {said}"
        pytest.skip(f"SGLang itself refuses this small configuration: {plain.err.strip().splitlines()[-1][:200]}")
    if "no_experts" in EXCEPTIONS.get(name, {}):
        assert code == 1, said
        assert "has no routed experts" in said
        return
    assert not UNKNOWN.search(said), said
    assert code == 0 or NO_CHOICE.search(said), said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launches")


@pytest.fixture(scope="module")
def on_standin(sglang_on_standin: Nurseries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nurseries]:
    """With all of SGLang's models."""
    env = {name: value for name, value in sglang_on_standin.env.items() if name != "SGLANG_DISABLED_MODEL_ARCHS"}
    ready = Nurseries(tmp_path_factory.mktemp("on_standin"), sglang_on_standin.imports, env)
    yield ready
    ready.close()


@pytest.fixture(scope="module")
def said(
    request: pytest.FixtureRequest, folder: Path, every_model: Nursery, on_standin: Nurseries
) -> dict[tuple[str, str], tuple[Launch, int | str, str]]:
    """What the doctor said of each launch that this run selected."""
    items: list[Any] = request.session.items
    chosen = {item.callspec.params["name"] for item in items if item.module is request.module}
    return found(folder, every_model, on_standin, sorted(chosen))


CASES = [
    pytest.param(name, number, marks=() if "no_experts" in EXCEPTIONS.get(name, {}) else served(name))
    for name in names()
    for number in NUMBERS
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_launch_is_judged(
    said: dict[tuple[str, str], tuple[Launch, int | str, str]], on_standin: Nurseries, name: str, number: str
) -> None:
    assert_judged(name, *said[name, number], on_standin)
