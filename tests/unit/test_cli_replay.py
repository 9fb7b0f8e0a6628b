"""The ``replay`` command: a value that makes no sense is refused before anything is replayed, in the words of the flag, and
what it prints says what was scored and assumed."""

import json

import numpy as np
import pytest

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.replay import simulator
from sglang_uvm_offload.replay.policies import POLICIES
from sglang_uvm_offload.routing.guesses import Guesses
from sglang_uvm_offload.routing.trace import Trace


@pytest.fixture
def saved(tmp_path):
    rng = np.random.default_rng(0)
    Trace(rng.integers(0, 4, (20, 2, 1)), np.array([10, 10]), 4).save(tmp_path / "trace.npz")
    return tmp_path / "trace.npz"


def replay(trace, *flags):
    return main(["replay", str(trace), "--residency", "0.5", *flags])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--residency", "nan"), "--residency must be 0..1, not nan"),
        (("--residency", "1.5"), "--residency must be 0..1, not 1.5"),
        (("--warmup-fraction", "-0.5"), "--warmup-fraction must be 0..1, not -0.5"),
        (("--batch", "0"), "--batch must be at least 1 and at most 4096, not 0"),
        (("--batch", "1000000000000"), "at least 1 and at most 4096, not 1000000000000"),
        (("--expert-mib", "inf"), "--expert-mib must be above 0 MiB (1e-06 to 1e+06), not inf"),
        (("--expert-mib", "-4"), "(1e-06 to 1e+06), not -4"),
        (("--link-gbps", "nan"), "--link-gbps must be above 0 GB/s (1e-06 to 1e+06), not nan"),
        (("--link-gbps", "1e-320"), "(1e-06 to 1e+06), not 1e-320"),
        (("--slots", "--policy", "lru"), "--slots replays its own splits of the VRAM; remove --policy"),
        (("--draft-acceptance", "0.5,1.1"), "--draft-acceptance must be up to 64 shares from 0 to 1"),
        (("--draft-acceptance", "0.5,nan"), "not 0.5,nan"),
        (("--draft-acceptance", ""), "--draft-acceptance must be"),
        (("--draft-acceptance", "0.5", "--batch", "2"), "one request at a time; remove --batch 2"),
        (("--draft-acceptance", "0.5", "--slots"), "remove --slots and --policy"),
        (("--step-ms", "3"), "--step-ms 3: needs --draft-acceptance"),
        (("--draft-acceptance", "0.5", "--step-ms", "0"), "--step-ms must be above 0 ms"),
        (("--warmup-fraction", "1"), "leaves no request to score"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_before_replaying(saved, monkeypatch, capsys, flags, said):
    monkeypatch.setattr(simulator, "serve", lambda *_: pytest.fail("replayed"))
    assert replay(saved, *flags) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith(f"cannot replay {saved}: ")
    assert said in line
    assert not out


def test_all_that_is_wrong_is_named_at_once(saved, capsys):
    assert replay(saved, "--batch", "0", "--link-gbps", "0") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_bounds_themselves_are_fine(saved, capsys):
    bounds = ("--batch", "4096", "--link-gbps", "1e-6", "--expert-mib", "1e6")
    assert replay(saved, "--policy", "lru", *bounds, "--json") == 0
    assert "Infinity" not in capsys.readouterr().out


def test_what_cannot_be_replayed_is_one_line(saved, tmp_path, monkeypatch, capsys):
    def out_of_memory(*_):
        raise MemoryError("Unable to allocate 1.00 TiB")

    monkeypatch.setattr(simulator, "replay", out_of_memory)
    assert replay(saved) == 2
    assert capsys.readouterr().err == f"cannot replay {saved}: Unable to allocate 1.00 TiB\n"
    (tmp_path / "other.npz").write_bytes(b"PK\x03\x04 not a zip")
    assert replay(tmp_path / "other.npz") == 2
    assert capsys.readouterr().err.startswith(f"cannot replay {tmp_path / 'other.npz'}: not a readable npz file")


def test_the_table_says_what_was_scored_and_what_was_assumed(saved, capsys):
    assert replay(saved) == 0
    scope, table, legend = capsys.readouterr().out.split("\n\n")
    assert scope.splitlines() == [
        "scored: 1 requests in 10 decode steps, up to 1 at once; warm-up: 1 requests in 10 steps",
        "in VRAM: 2 of 4 experts (50 %) of each of 2 layers",
        "link: 55 GB/s (10^9 bytes a second), assumed; --link-gbps gives it",
        "an expert: 4.0 MiB, assumed; --expert-mib gives it",
    ]
    assert table.splitlines()[0].split("  ")[-1] == "link time/step"
    assert [line.split()[0] for line in table.splitlines()[1:]] == list(POLICIES)
    lines = dict(line.split(": ") for line in legend.strip().splitlines())
    assert lines["adaptive (this plugin's adaptive policy)"] == "--expert-offload-adapt continuous"
    assert lines["upper bounds, which know the future"] == "static-oracle, belady"
    assert lines["for comparison, offered by no server"] == "lru, lfu, lfru"
    assert replay(saved, "--policy", "lru", "--link-gbps", "25", "--expert-mib", "2") == 0
    out = capsys.readouterr().out
    assert "link: 25 GB/s (10^9 bytes a second), as given\nan expert: 2.0 MiB, as given" in out
    assert "assumed" not in out


@pytest.mark.parametrize("flags", [("--policy", "lru", "--policy", "adaptive"), ("--slots",)])
def test_json_says_so_too(saved, capsys, flags):
    assert replay(saved, "--json", *flags) == 0
    content = json.loads(capsys.readouterr().out)
    scored = content["scored"]
    assert (scored["requests"], scored["steps"], scored["warmup_requests"], scored["warmup_steps"]) == (1, 10, 1, 10)
    assert (scored["num_resident"], scored["num_experts"], scored["layers"], scored["residency"]) == (2, 4, 2, 0.5)
    assert (scored["link_gbps"], scored["link_assumed"], scored["expert_bytes_assumed"]) == (55, True, True)
    assert scored["shipped"] == "adaptive"
    assert [each["policy"] for each in content.get("results", [])] == [*flags[1::2]]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_alone(saved, monkeypatch, capsys, terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    assert replay(saved, "--policy", "lru", "--policy", "adaptive") == 0
    said = capsys.readouterr()
    shown = "\r\033[Kreplaying lru, 1 of 2 policies, 20 steps\r\033[Kreplaying adaptive, 2 of 2 policies, 20 steps\r\033[K"
    assert said.err == (shown if terminal else "")
    assert "replaying" not in said.out


def test_a_trace_with_guesses_is_followed_by_what_they_foresee(saved, capsys):
    without = Trace.load(saved)
    assert replay(saved) == 0
    assert "recall" not in capsys.readouterr().out
    ahead = np.concatenate([np.full((20, 1, 1, 1), -1), without.ids[:, 1:, None]], axis=1)
    folded = np.array([[False], [True]])
    Trace(without.ids, without.seq_len, without.num_experts, Guesses(ahead, folded)).save(saved)
    assert replay(saved) == 0
    *_, table, note = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["slots"] * 3 + ["adaptive"] * 3
    assert "In 1 of 2 layers the earlier router's input was scaled" in note
    assert replay(saved, "--json", "--policy", "adaptive") == 0
    guessed, before, control = json.loads(capsys.readouterr().out)["lookahead"]
    assert (guessed["distance"], guessed["layers"], guessed["recall"], guessed["precision"]) == (1, 1, 1, 1)
    assert (before["distance"], control["recall"], control["precision"]) == (None, 1, 1)
    assert replay(saved, "--policy", "lru") == 0
    assert "recall" not in capsys.readouterr().out, "that moves experts only as it is told"


def test_drafts_are_shown_by_what_they_read_for_each_kept_token(saved, capsys):
    flags = ("--residency", "0", "--draft-acceptance", "0.5,1", "--expert-mib", "1", "--link-gbps", "1")
    assert replay(saved, *flags, "--json") == 0
    none, one, two = json.loads(capsys.readouterr().out)["drafts"]
    assert (none["kept_per_step"], none["read_bytes_per_step"]) == (1, 2 * 2**20), "two layers, one expert a token"
    assert one["kept_per_step"] == pytest.approx(1 + 0.5 * 9 / 10), "the last of ten tokens has none after it"
    assert two["kept_per_step"] == pytest.approx(1 + 0.5 * 9 / 10 + 0.5 * 8 / 10)
    assert none["read_bytes_per_step"] < one["read_bytes_per_step"] < two["read_bytes_per_step"]
    for each in (none, one, two):
        assert each["read_bytes_per_token"] == pytest.approx(each["read_bytes_per_step"] / each["kept_per_step"])
        assert each["token_seconds"] == pytest.approx(each["read_bytes_per_token"] / 1e9)
    assert replay(saved, *flags, "--step-ms", "1000") == 0
    said = capsys.readouterr().out
    assert "Least time for a kept token: 2 draft tokens (with 1000 ms a step beside)." in said
    assert replay(saved, "--residency", "1", "--draft-acceptance", "0.5") == 0
    assert "--step-ms adds the rest" in capsys.readouterr().out
