"""Launch lines that publishers print, judged by ``doctor`` over the stand-in with ``auto`` and with a number: each is
served, or refused for what it takes. Checkpoints are of true shape, under the published configurations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from builders.released import released_checkpoint
from builders.true_shape import checkpoint
from conftest import H200_BYTES
from nursery import Starts

from sglang_uvm_offload.sizing.safetensors_header import CheckpointError

LAUNCHES = json.loads((Path(__file__).parents[2] / "benchmarks" / "published_launches.json").read_text())
EXAMINE = """
import contextlib, io, json
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.plugin import expert_bytes, planned_launch
expert_bytes.host_available = planned_launch.host_available = lambda: 3 << 40
said = []
for words in {launches}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = main(["doctor", "--", *words])
        except SystemExit as exit:
            code = exit.code
    said.append((code, out.getvalue()))
print("RESULT", json.dumps(said))
"""

UNKNOWN = re.compile(
    r"SGLang cannot serve|not checked against VRAM|shown by loading only|Traceback|does not count|give a number"
)
"""What no launch of a local folder of safetensors may be told."""

NO_CHOICE = re.compile(r"error: (argument --\S+: invalid choice: '\w+')")
"""A value that this SGLang does not have."""


def written(model: str, folder: Path) -> Path | None:
    """The checkpoint of ``model`` in ``folder``; None if neither our rules nor transformers know its tensors."""
    try:
        return checkpoint(model, folder / model.replace("/", "--"))
    except CheckpointError:
        pass
    try:
        return released_checkpoint(model, folder / f"{model.replace('/', '--')}-released")
    except (AttributeError, KeyError, ValueError, OSError):
        return None


@cache
def judged(folder: Path, python: Starts) -> dict[tuple[str, str, str], tuple[int, str]]:
    """By model, line and number of residents: the exit code and the output, of eight H200."""
    folders = {model: written(model, folder) for model in {each["model"] for each in LAUNCHES}}
    asked = {
        (each["model"], each["words"], number): [
            *("--model-path", str(folders[each["model"]]), "--skip-tokenizer-init", "--expert-offload-num-resident", number),
            # Code of the publisher's own, which is not here; SGLang has classes for these models.
            *(word for word in each["words"].split() if word != "--trust-remote-code"),
        ]
        for each in LAUNCHES
        if folders[each["model"]]
        for number in ("auto", "16")
    }
    ran = python.run(EXAMINE.format(launches=list(asked.values())), STANDIN_GPUS="8", STANDIN_VRAM=str(H200_BYTES))
    assert ran.code == 0, ran.err[-4000:]
    return dict(zip(asked, json.loads(ran.out.rpartition("RESULT ")[2]), strict=True))


CASES = [
    pytest.param(
        *(each["model"], each["words"], number),
        id=f"{each['model']} {each['words'][:60]} {number}",
    )
    for each in LAUNCHES
    for number in ("auto", "16")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "words", "number"), CASES)
def test_a_published_launch_is_judged_by_what_it_takes(
    record_property: Callable[[str, object], None],
    folder: Path,
    sglang_on_standin: Starts,
    model: str,
    words: str,
    number: str,
) -> None:
    found = judged(folder, sglang_on_standin)
    if (model, words, number) not in found:
        pytest.skip("neither our rules nor transformers know the tensors of its checkpoint")
    code, said = found[model, words, number]
    if "no draft layers of its own" in said:
        pytest.skip("transformers' class has no draft layers, so the checkpoint made of it has none")
    assert not UNKNOWN.search(said), said
    assert code == 0 or "host RAM" in said or "VRAM" in said or NO_CHOICE.search(said), said
    for name, value in {"model": model, "words": words, "residents": number, "verdict": verdict(said)}.items():
        record_property(name, value)


def verdict(said: str) -> str:
    """One line of what ``doctor`` said: its problems, or the residents that it is ready for."""
    if problems := NO_CHOICE.findall(said) or re.findall(r"PROBLEM +(.+)", said):
        return f"refused: {'; '.join(problems)}"
    residents = re.findall(r"--expert-offload-num-resident .*?(\d+ of \d+) experts a layer", said)
    return f"served: {residents[0]} experts a layer resident"
