"""The page on faults: it is made of the committed results, and those hold no defect."""

from __future__ import annotations

import json

from faults import soak

from benchmarks import reliability

COMMITTED = json.loads(reliability.RESULTS.read_text())
SOAK = json.loads(reliability.SOAK.read_text())
FUZZ = json.loads(reliability.FUZZ.read_text())


def row(end: str, **more: object) -> dict[str, object]:
    return {"where": "ranks", "kind": "files", "phase": "save", "what": end, "end": end, "answers": 2, "seconds": 1.0, **more}


def test_the_page_is_made_of_the_committed_results():
    assert reliability.PAGE.read_text() == reliability.committed()


def test_no_fault_that_was_tried_shows_a_defect():
    assert {each["end"] for each in COMMITTED} <= {*reliability.GOOD, "not reached"}
    assert {each["where"] for each in COMMITTED} == {"ranks", "ranks with slots", "engines", "servers"}


def test_no_soak_and_no_input_shows_a_defect():
    assert soak.good(SOAK)
    assert sum(counts["tracebacks"] for counts in FUZZ["targets"].values()) == 0


def test_the_page_says_what_was_fuzzed():
    counts = {"inputs": 1200, "refused": 700, "accepted": 498, "tracebacks": 2}
    page = reliability.fuzzed({"seed": 0, "targets": {"flags": counts, "url": {**counts, "tracebacks": 0}}})
    assert "2,400 inputs, 2 that failed." in page
    assert "| flags | 1,200 | 700 | 498 | 2 |" in page


def test_defects_are_counted_and_what_was_not_reached_is_not():
    ends = ["served on", "hang", "leak", "not reached", "wrong answer"]
    page = reliability.markdown([row(end) for end in ends])
    assert "4 faults struck, and 8 answers were compared. 1 times it served on," in page
    assert "Wrong answers: 1. Hangs: 1. Leaks: 1." in page
    assert "| ranks | files | 4 | 1 | 0 | 0 | 3 |" in page
    assert "1 more were armed" in page


def test_the_json_is_sorted_whatever_order_faults_ended_in(tmp_path):
    out = tmp_path / "faults.json"
    reliability.write([row("served on", kind="threads"), row("hang")], out)
    assert [each["kind"] for each in json.loads(out.read_text())] == ["files", "threads"]
