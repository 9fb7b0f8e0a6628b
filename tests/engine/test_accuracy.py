"""Accuracy as EleutherAI's lm_eval states it: benchmarks/accuracy.py as it is run, and the commands of the pages.

The same scores and answers with and without offloading count only because those of a model with one other expert are not the
same.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import pages
from builders.pages import ROOT
from safetensors.torch import load_file, save_file
from serving import FORKING, Engines, assert_offloaded

from benchmarks import accuracy, lm_eval_results
from benchmarks.lm_eval_results import TaskResult
from scripts.harness.patience import patience

LM_EVAL = pytest.mark.skipif(not accuracy.installed(), reason=accuracy.MISSING)
TASKS = {task for _, tasks in accuracy.APIS.values() for task in tasks}
RESIDENT = 6
WRONG = "model.layers.1.mlp.experts.3.down_proj.weight"
SECONDS = patience(600)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accuracy")


@pytest.fixture(scope="module")
def ended(out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.accuracy", "--device", "cpu", "--out", str(out)]
    command += ["--num-resident", str(RESIDENT), "--task-seconds", str(SECONDS), "--", "--log-level", "info"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | FORKING, capture_output=True, text=True, timeout=4 * SECONDS)


@pytest.fixture(scope="module")
def off(ended: subprocess.CompletedProcess[str], out: Path) -> dict[str, TaskResult]:
    return lm_eval_results.read(out / "off")


@LM_EVAL
@pytest.mark.nightly
def test_scores_and_answers_are_those_without_offloading(ended, off, out):
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *_, said = ended.stdout.splitlines()
    assert said == "All scores and answers are the same."
    assert "MiB of experts were offloaded" in ended.stdout
    assert "\n0.0 MiB" not in ended.stdout
    on = lm_eval_results.read(out / "on")
    assert off.keys() == on.keys() == TASKS
    for task, result in off.items():
        assert result.scores == on[task].scores
        assert {key: row["resps"] for key, row in result.samples.items()} == {
            key: row["resps"] for key, row in on[task].samples.items()
        }


@LM_EVAL
@pytest.mark.nightly
def test_the_model_knows_more_than_one_that_guesses(off):
    """So its scores can fall: of four choices a guess is right in a quarter, and its text has some of 256 bytes."""
    assert off["held_out_choice"].scores["acc,none"] > 0.3
    assert off["held_out_perplexity"].scores["bits_per_byte,none"] < 4
    for task in ("held_out_continuation", "held_out_chat"):
        answers = [row["resps"] for row in off[task].samples.values()]
        assert len({str(answer) for answer in answers}) > len(answers) / 2


@LM_EVAL
@pytest.mark.nightly
def test_one_wrong_expert_is_found_by_every_task(off, out, engines: Engines, tmp_path: Path, capsys):
    model = shutil.copytree(accuracy.TINY, tmp_path / "tiny")
    weights = load_file(model / "model.safetensors")
    weights[WRONG] = -weights[WRONG]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with engines.server(model, expert_offload_num_resident=RESIDENT, expert_offload_warmup_tokens=64) as server:
        accuracy.evaluate(server.url, model, tmp_path / "wrong", SECONDS)
        assert_offloaded(server.get("/server_info"))
    wrong = lm_eval_results.read(tmp_path / "wrong")
    found = {task: lm_eval_results.differences(off[task], wrong[task]) for task in TASKS}
    assert all(found.values()), found
    assert any(line.startswith("bits_per_byte,none: ") for line in found["held_out_perplexity"])
    assert lm_eval_results.main([str(out / "off"), str(tmp_path / "wrong")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "The results differ."


def one_answer(rows: list[dict]) -> list[dict]:
    return [{**rows[0], "resps": [["another"]]}, *rows[1:]]


def one_question(rows: list[dict]) -> list[dict]:
    return [{**rows[0], "arguments": {}}, *rows[1:]]


def one_less(rows: list[dict]) -> list[dict]:
    return rows[1:]


@LM_EVAL
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("change", "found"), [(one_answer, "'another'"), (one_question, "asked something else"), (one_less, "only in the first")]
)
def test_one_other_sample_is_found(change: Callable, found: str, off, out: Path, tmp_path: Path, capsys):
    copied = shutil.copytree(out / "off", tmp_path / "copied")
    [log] = copied.rglob("samples_held_out_chat_*.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(row) + "\n" for row in change(rows)))
    assert lm_eval_results.main([str(out / "off"), str(copied)]) == 1
    assert found in capsys.readouterr().out


@LM_EVAL
@pytest.mark.nightly
def test_one_other_score_and_one_task_less_are_found(off, out: Path, tmp_path: Path, capsys):
    copied = shutil.copytree(out / "off", tmp_path / "copied")
    completions, chat = sorted(copied.rglob("results_*.json"))
    results = json.loads(chat.read_text())
    results["results"]["held_out_chat"]["chrf,none"] += 1e-12
    chat.write_text(json.dumps(results))
    assert lm_eval_results.main([str(out / "off"), str(copied)]) == 1
    assert "chrf,none: " in capsys.readouterr().out
    completions.unlink()
    assert lm_eval_results.main([str(out / "off"), str(copied)]) == 1
    assert "Tasks differ: " in capsys.readouterr().out


@LM_EVAL
@pytest.mark.nightly
def test_results_without_samples_are_refused(off, out: Path, tmp_path: Path, capsys):
    copied = shutil.copytree(out / "off", tmp_path / "copied")
    for log in copied.rglob("samples_*.jsonl"):
        log.unlink()
    with pytest.raises(SystemExit, match="2"):
        lm_eval_results.main([str(out / "off"), str(copied)])
    assert "run lm_eval with --log_samples" in capsys.readouterr().err


# ---- without a server ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "none"], "none"),
        (["--num-resident", "16"], "--num-resident 16: must be from 0 to 15, or nothing is offloaded"),
        (["--num-resident", "-1"], "--num-resident -1: must be from 0 to 15"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "installed", lambda: True)
    with pytest.raises(SystemExit, match="2"):
        accuracy.main(arguments)
    assert said in capsys.readouterr().err


def test_without_lm_eval_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        accuracy.main([])
    assert capsys.readouterr().err.endswith("lm_eval is not installed: pip install '.[accuracy]'\n")


@pytest.mark.parametrize("words", pages.of_kind("python -m benchmarks.lm_eval_results"), ids=" ".join)
def test_a_folder_without_results_is_refused(words, tmp_path: Path, monkeypatch, capsys):
    """The command of the pages, before the runs that they give with it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        lm_eval_results.main(words[3:])
    assert "it must be the --output_path of a run of lm_eval" in capsys.readouterr().err


@pytest.mark.parametrize("words", pages.of_kind("python -m benchmarks.accuracy"), ids=" ".join)
def test_the_command_of_the_pages_is_taken(words, monkeypatch):
    monkeypatch.setattr(accuracy, "installed", lambda: True)
    assert accuracy.parse(words[3:]).model.is_dir()


RUNS = pages.of_kind("lm_eval run")


@LM_EVAL
@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_a_run_of_the_pages_is_one_that_lm_eval_takes(words, monkeypatch):
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
