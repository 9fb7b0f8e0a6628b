"""A sample of what scripts/fuzz.sh runs; and that it finds what it looks for."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import fuzz
import fuzz_targets
import pytest

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("target", fuzz_targets.TRIES)
def test_no_input_causes_a_traceback_and_some_are_refused_and_some_accepted(target):
    """Otherwise nothing behind the first check would be reached; the labels of metrics are all accepted."""
    outcome = fuzz.run(fuzz.Batch(target, seed=0, first=0, count=120))
    assert not outcome.failures
    assert outcome.refused or target == "metric_labels"
    assert outcome.accepted


class Planted:
    def __reduce__(self):
        return os.getcwd, ()


def unpickled(chance: random.Random, folder: Path) -> bool:
    return bool(pickle.loads(pickle.dumps(Planted())))


def written_elsewhere(chance: random.Random, folder: Path) -> bool:
    return bool((folder.parent / "elsewhere").write_text("x"))


def started(chance: random.Random, folder: Path) -> bool:
    return subprocess.run(["true"]).returncode == 0


def connected(chance: random.Random, folder: Path) -> bool:
    with urllib.request.urlopen("http://127.0.0.1:9") as answer:
        return bool(answer.read())


def hidden(chance: random.Random, folder: Path) -> bool:
    """A handler of any error does not hide what is forbidden."""
    try:
        return written_elsewhere(chance, folder)
    except Exception:  # noqa: BLE001
        return False


@pytest.mark.parametrize("bad", [unpickled, written_elsewhere, started, connected, hidden])
def test_what_no_input_may_cause_is_found(bad: Callable[[random.Random, Path], bool], monkeypatch, capsys):
    monkeypatch.setitem(fuzz_targets.TRIES, "url", bad)
    outcome = fuzz.run(fuzz.Batch("url", seed=0, first=0, count=2))
    assert len(outcome.failures) == 2
    assert len([*fuzz.shown([outcome, outcome], 4)]) == 2
    told = capsys.readouterr().err
    assert told.count("url, input 0:\nTraceback") == 1
    assert "input 1" not in told
    assert told.rstrip().endswith("4 of 4 inputs")
    (row,) = [line.split() for line in fuzz.table([outcome]).splitlines() if "url" in line]
    assert row == ["url", "2", "0", "0", "2"]


def computing(chance: random.Random, folder: Path) -> bool:
    while True:
        pass


def waiting(chance: random.Random, folder: Path) -> bool:
    os.mkfifo(folder / "pipe")
    return bool((folder / "pipe").read_bytes())


@pytest.mark.parametrize(("endless", "limit"), [(computing, "SECONDS"), (waiting, "WAITING_SECONDS")])
def test_an_input_that_takes_for_ever_is_found(endless, limit, monkeypatch):
    monkeypatch.setitem(fuzz_targets.TRIES, "url", endless)
    monkeypatch.setattr(fuzz, limit, 0.5)
    (failure,) = fuzz.run(fuzz.Batch("url", seed=0, first=0, count=1)).failures
    assert "TooLong" in failure[1]


@pytest.mark.parametrize("html", ["<p><script>x</script></p>", '<p onclick="x">', "<img src=x>", '<p style="javascript:x">'])
def test_markup_in_a_page_is_found(html):
    with pytest.raises(AssertionError):
        fuzz_targets._check_page(html)


def test_one_target_may_be_tried_again(tmp_path):
    out = tmp_path / "fuzz.json"
    for seed, counts in ((0, {"b": {"inputs": 1}, "a": {"inputs": 2}}), (0, {"b": {"inputs": 3}})):
        fuzz.write(out, seed, counts, ["a", "b"])
    assert json.loads(out.read_text()) == {"seed": 0, "targets": {"a": {"inputs": 2}, "b": {"inputs": 3}}}
    fuzz.write(out, 1, {"b": {"inputs": 4}}, ["a", "b"])
    assert json.loads(out.read_text()) == {"seed": 1, "targets": {"b": {"inputs": 4}}}
