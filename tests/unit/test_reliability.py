"""The page on faults: it is made of the committed results, and those hold no defect."""

from __future__ import annotations

import json

import reliability

COMMITTED = json.loads(reliability.RESULTS.read_text())
SOAK = json.loads(reliability.SOAK.read_text()) if reliability.SOAK.exists() else None


def row(end: str, **more: object) -> dict[str, object]:
    return {"where": "ranks", "kind": "files", "phase": "save", "what": end, "end": end, "answers": 2, "seconds": 1.0, **more}


def test_the_page_is_made_of_the_committed_results():
    assert reliability.PAGE.read_text() == reliability.markdown(COMMITTED, SOAK)


def test_no_fault_that_was_tried_shows_a_defect():
    assert {each["end"] for each in COMMITTED} <= {*reliability.GOOD, "not reached"}
    assert {each["where"] for each in COMMITTED} == {"ranks", "ranks with slots", "engines", "servers"}


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
