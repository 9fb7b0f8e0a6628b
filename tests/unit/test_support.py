"""The table of what is served is made of the recorded results of the tests, and these are of the tests that there are."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from support_marks import ROOT, record, rows, skip_newer, unrecorded

from benchmarks import support as table_of
from scripts.harness.patience import patience

RECORD = {"rows": [{"sglang": "1", "torch": "2", "python": "3"}]}


def result(what: str = "TP 2", kind: str = "works", outcome: str = "passed", test: str = "engine/t.py::a", **more: str) -> dict:
    return {
        **{"group": "Parallel", "what": what, "kind": kind, "outcome": outcome, "test": test, "reason": ""},
        **more,
    }


def status(*results: dict[str, Any]) -> list[tuple[str, str]]:
    return [(row.status, row.reason) for row in table_of.table(results)]


def test_a_row_works_only_if_each_of_its_tests_has_passed():
    assert status(result(), result(test="engine/t.py::b")) == [("works", "")]
    assert status(result(), result(test="engine/t.py::b", outcome="failed")) == [("broken", "")]
    assert status(result(), result(test="engine/t.py::b", outcome="skipped")) == [("works", "")]


def test_what_no_test_could_try_says_why():
    assert status(result(outcome="skipped", reason="no kernel on a CPU")) == [("not tried", "no kernel on a CPU")]


def test_a_refusal_shows_the_message():
    assert status(result(kind="refused", reason="--x: its actors load no plugins")) == [
        ("refused", "--x: its actors load no plugins")
    ]
    assert status(result(kind="refused", outcome="failed", reason="--x")) == [("broken", "")]


def test_where_sglang_fails_without_the_plugin_the_row_says_so_and_is_counted_apart():
    fails = result(what="TP 3", kind="sglang_fails", reason="TypeError: x")
    assert status(fails) == [("SGLang fails", "TypeError: x")]
    assert status(result(kind="sglang_fails", outcome="failed")) == [("broken", "")]
    rows = table_of.table([result(), fails])
    assert table_of.summary_line(rows).startswith("1 of 1 rows work (100%)")
    assert table_of.summary_line(rows).endswith(" SGLang itself fails at 1 more.")
    assert "| Parallel | TP 3 | SGLang fails: TypeError: x |" in table_of.page(RECORD, rows)
    assert "| TP 3 | SGLang fails: TypeError: x |" in table_of.full(RECORD, rows)


def test_nothing_is_both_served_and_refused():
    with pytest.raises(ValueError, match="Parallel: TP 2: tests have different markers: refused, works"):
        table_of.table([result(), result(kind="refused")])


def test_groups_and_logs_are_of_known_rows():
    with pytest.raises(ValueError, match="of no group"):
        table_of.table([result(group="Parallels")])
    with pytest.raises(ValueError, match="in no test"):
        table_of.table([result()], [{"group": "Parallel", "what": "TP 3", "log": "x.log"}])


def test_a_row_names_its_tests_once_and_its_log():
    proofs = [{"group": "Parallel", "what": "TP 2", "log": "x.log"}]
    recorded = {"rows": RECORD["rows"] * 2}
    served = "tests/engine/test_serving_t.py"
    both = table_of.table([result(test=f"{served}::a[x|y]"), result(test=f"{served}::a[z]")], proofs)
    assert "With SGLang 1, torch 2, Python 3. 1 of 1 rows work (100%); none is refused." in table_of.page(recorded, both)
    assert f"| TP 2 | works | [a](../../../{served}) | served on a CPU |\n" in table_of.full(recorded, both)
    assert "On a GPU: TP 2 ([log](../x.log)). No other row has a log" in table_of.page(recorded, both)
    assert "No row has a log of a GPU yet." in table_of.page(recorded, table_of.table([result()]))
    refused = table_of.table([result(kind="refused", reason="a | b\nc")])
    assert "| refused: a \\| b c |" in table_of.page(recorded, refused)
    assert "| refused: a \\| b c |" in table_of.full(recorded, refused)


def test_the_page_counts_and_lists_what_works_by_the_strongest_evidence():
    served, standin = "tests/engine/test_serving_t.py::a", "tests/engine/test_cuda_t.py::a"
    found = [result(test=served), result(test="tests/unit/t.py::a"), result(what="--x (a)", test=standin)]
    found += [result(what=f"FP8 ({runner})", group="Format", test="tests/unit/t.py::b") for runner in ("a", "b")]
    made = table_of.page(RECORD, table_of.table([*found, result(what="PP 2", kind="refused", reason="no")]))
    counts = made.split("| --- | --- | --- | --- | --- |\n")[1].split("\n\n")[0]
    assert counts == "| Format | 0 | 0 | 2 | 0 |\n| Parallel | 1 | 1 | 0 | 1 |"
    assert (
        "### Format\n\n*No server:* FP8 (a, b).\n\n### Parallel\n\n*Server on a CPU:* TP 2.\n\n*Stand-in driver:* `--x` (a).\n"
        in made
    )


def test_rows_that_are_refused_for_one_reason_share_a_line():
    found = [result(what=what, kind="refused", reason=f"{what}: it cannot") for what in ("DWDP", "EP 3")]
    assert "| Parallel | DWDP, EP 3 | refused: it cannot |" in table_of.page(RECORD, table_of.table(found))


def item(test: str, *marks: tuple[str, str, str]) -> Any:
    made = [SimpleNamespace(name=kind, args=(group, what)) for kind, group, what in marks]
    return SimpleNamespace(nodeid=test, iter_markers=lambda: iter([*made, SimpleNamespace(name="parametrize", args=())]))


@pytest.mark.parametrize(
    ("file", "with_what", "short"),
    [
        ("engine/test_serving_t.py", "served on a CPU", "Server on a CPU"),
        ("engine/test_cuda_serving.py", "stand-in driver", "Stand-in driver"),
        ("engine/test_cuda_modes.py", "stand-in driver", "Stand-in driver"),
        ("unit/test_t.py", "SGLang's code, no server", "No server"),
    ],
)
def test_what_no_server_has_shown_says_so(file, with_what, short):
    rows = table_of.table([result(test=f"tests/{file}::a")])
    assert f"| TP 2 | works | [a](../../../tests/{file}) | {with_what} |" in table_of.full(RECORD, rows)
    assert f"*{short}:* TP 2." in table_of.page(RECORD, rows)


def test_the_page_has_the_versions_that_were_tried():
    tried = {"sglang": "9.9", "torch": "8", "python": "7", "passed": 6, "failed": 5, "skipped": 4, "ran": ["tests/unit/a.py"]}
    tried["skipped_as"] = {"with SGLang before 9.10: cannot": 4}
    rows = table_of.table([result()])
    assert "| 9.9 | 8 | 7 | 6 | 5 | 4 | unit/a.py |" in table_of.page(RECORD, rows, [tried])
    assert table_of.full(RECORD, rows, [tried]).endswith("\n\nSkipped with 9.9:\n\n- with SGLang before 9.10: cannot (4)\n")


def test_marks_and_record_must_agree_on_the_files_that_were_collected():
    marked = item("t.py::a", ("works", "Parallel", "TP 2"))
    assert rows(marked) == [{"kind": "works", "group": "Parallel", "what": "TP 2", "test": "t.py::a"}]
    assert unrecorded([marked], [result(test="t.py::a"), result(test="other.py::b")]) == []
    assert unrecorded([marked], []) == ["not recorded: works | Parallel | TP 2 | t.py::a"]
    gone = unrecorded([item("t.py::b")], [result(test="t.py::a")])
    assert gone == ["recorded, and no test: works | Parallel | TP 2 | t.py::a"]


def test_a_test_of_a_newer_sglang_is_skipped_with_its_reason():
    def skipped(installed: str) -> list[str]:
        added: list[Any] = []
        newer = SimpleNamespace(iter_markers=lambda name: [pytest.mark.since("0.5.22", "cannot").mark], add_marker=added.append)
        skip_newer([newer], installed)  # type: ignore[list-item]
        return [mark.kwargs["reason"] for mark in added]

    assert skipped("0.5.9.post1") == ["with SGLang before 0.5.22: cannot"]
    assert skipped("0.5.22") == skipped("0.6.0") == []


@pytest.mark.sglang
def test_a_part_that_is_run_again_replaces_its_own_results():
    def by_test(found: dict[str, Any]) -> dict[str, str]:
        return {row["test"]: row["outcome"] for row in found["rows"]}

    tests = ("t.py::a", "t.py::gone", "t.py::other", "t.py::unmarked", "u.py::b")
    before = [result(test=test, outcome="failed") for test in tests]
    there = [item(test, ("works", "Parallel", "TP 2")) for test in ("t.py::a", "t.py::other")] + [item("t.py::unmarked")]
    assert by_test(record(before, [result(test="t.py::a")], there)) == {
        "t.py::a": "passed",
        "t.py::other": "failed",
        "u.py::b": "failed",
    }


def test_the_pages_are_made_of_the_committed_results():
    page, full, _ = table_of.committed()
    assert table_of.PAGE.read_text() == page
    assert table_of.FULL.read_text() == full


def test_no_row_is_broken_and_every_refusal_has_a_reason():
    _, _, committed = table_of.committed()
    assert [row.what for row in committed if row.status == "broken"] == []
    assert [row.what for row in committed if row.status != "works" and not row.reason] == []


def test_logs_of_a_gpu_exist():
    for proof in json.loads(table_of.GPU.read_text()):
        assert (table_of.ROOT / proof["log"]).is_file()


def test_the_record_is_of_these_tests(request: pytest.FixtureRequest):
    marks: Any = request.config.pluginmanager.get_plugin("support")
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single tests were chosen")
    assert unrecorded(marks.collected, json.loads(table_of.TESTS.read_text())["rows"]) == []


@pytest.mark.slow
def test_what_needs_sglang_is_left_out_without_it():
    """A file that imports SGLang and does not say so ends the collection."""
    program = "import sys, pytest; sys.modules['sglang'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "--collect-only", "-q", "-p", "no:cacheprovider", "tests/unit"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(300))
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert "test_policy_slot_policy.py::" in ended.stdout
    assert "test_plugin_runtime.py::" not in ended.stdout
