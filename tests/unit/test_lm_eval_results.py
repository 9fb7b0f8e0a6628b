"""Results of EleutherAI's lm_eval, compared; and the commands of the pages that make and compare them."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from builders import pages

from benchmarks import lm_eval_results

pytestmark = pytest.mark.sglang

DATE = "2026-01-02T03-04-05"
SAMPLE = {"filter": "none", "arguments": {"gen_args_0": {"arg_0": "one"}}, "resps": [["two"]]}


def write(folder: Path, *tasks: str) -> Path:
    """As runs with ``--output_path folder --log_samples`` leave it."""
    folder.mkdir()
    results = {"configs": dict.fromkeys(tasks), "results": {task: {"alias": task, "acc,none": 0.25} for task in tasks}}
    (folder / f"results_{DATE}.json").write_text(json.dumps(results))
    for task in tasks:
        rows = [SAMPLE | {"doc_id": number} for number in range(3)]
        (folder / f"samples_{task}_{DATE}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def change_results(folder: Path) -> None:
    path = folder / f"results_{DATE}.json"
    results = json.loads(path.read_text())
    results["results"]["gsm8k"]["acc,none"] += 1e-12
    path.write_text(json.dumps(results))


def change_samples(change: Callable[[list[Any]], list[Any]]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        path = folder / f"samples_gsm8k_{DATE}.jsonl"
        rows = change([json.loads(line) for line in path.read_text().splitlines()])
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return changed


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda folder: None, None),
        (change_results, "acc,none: 0.25 and 0.250000000001"),
        (change_samples(lambda rows: [{**rows[0], "resps": [["another"]]}, *rows[1:]]), "[['two']] and [['another']]"),
        (change_samples(lambda rows: [{**rows[0], "arguments": {}}, *rows[1:]]), "sample 0 (none): asked something else"),
        (change_samples(lambda rows: rows[1:]), "sample 0 (none): only in the first result"),
    ],
)
def test_whatever_differs_is_told(tmp_path: Path, capsys, change, found) -> None:
    off, on = (write(tmp_path / name, "gsm8k") for name in ("off", "on"))
    change(on)
    assert lm_eval_results.main([str(off), str(on)]) == (1 if found else 0)
    told = capsys.readouterr().out
    assert told.splitlines()[-1] == ("The results differ." if found else "All scores and answers are the same.")
    assert (found or "") in told


def test_one_task_less_is_told(tmp_path: Path, capsys) -> None:
    off, on = write(tmp_path / "off", "gsm8k", "arc"), write(tmp_path / "on", "gsm8k")
    assert lm_eval_results.main([str(off), str(on)]) == 1
    assert "Tasks differ: gsm8k, arc and gsm8k." in capsys.readouterr().out


def test_results_without_samples_are_refused(tmp_path: Path, capsys) -> None:
    off = write(tmp_path / "off", "gsm8k")
    (off / f"samples_gsm8k_{DATE}.jsonl").unlink()
    with pytest.raises(SystemExit, match="2"):
        lm_eval_results.main([str(off), str(off)])
    assert "run lm_eval with --log_samples" in capsys.readouterr().err


@pytest.mark.parametrize("words", pages.of_kind("python -m benchmarks.lm_eval_results"), ids=" ".join)
def test_a_folder_without_results_is_refused(words, tmp_path: Path, monkeypatch, capsys) -> None:
    """The command of the pages, before the runs that they give with it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        lm_eval_results.main(words[3:])
    assert "it must be the --output_path of a run of lm_eval" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install '.[accuracy]'")
@pytest.mark.parametrize("words", pages.of_kind("lm_eval run"), ids=" ".join)
def test_a_run_of_the_pages_is_one_that_lm_eval_takes(words, monkeypatch) -> None:
    from lm_eval._cli.harness import HarnessCLI
    from lm_eval.api.registry import get_model
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.models.api_models import TemplateAPI
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(sys, "argv", words)
    config = EvaluatorConfig.from_cli(HarnessCLI().parse_args())
    taken = {name for each in (get_model(config.model), TemplateAPI) for name in inspect.signature(each.__init__).parameters}
    assert config.model_args.keys() <= taken, "others are ignored without a word"
    assert set(config.tasks) <= set(TaskManager().all_tasks)
    assert config.gen_kwargs == {"temperature": 0}
    assert config.log_samples
    assert config.model_args["num_concurrent"] == 1
