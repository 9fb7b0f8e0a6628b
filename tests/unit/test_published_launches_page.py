"""The page of published launch lines is made of what the tests recorded."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import published_launches as launches

CASE = """<testsuites><testsuite>
<testcase name="a"><properties>{properties}</properties>{failure}</testcase>
</testsuite></testsuites>"""


def test_the_page_is_the_programs() -> None:
    assert launches.OUT.read_text() == launches.page(json.loads(launches.RECORD.read_text()))


def test_a_case_that_failed_is_no_row(tmp_path: Path) -> None:
    file, properties = tmp_path / "junit.xml", '<property name="model" value="m"/><property name="verdict" value="served"/>'
    file.write_text(CASE.format(properties=properties, failure=""))
    assert launches.read(file) == [{"model": "m", "verdict": "served"}]
    file.write_text(CASE.format(properties=properties, failure="<failure/>"))
    assert launches.read(file) == []


def test_lines_that_a_run_left_out_keep_their_verdicts() -> None:
    kept = json.loads(launches.RECORD.read_text())
    anew = {**kept[1], "verdict": "refused: anew"}
    assert launches.merged(kept, []) == kept
    assert launches.merged(kept[:1] + kept[2:], [anew]) == [kept[0], anew, *kept[2:]]
    gone = {"model": "m", "words": "no longer published", "residents": "auto", "verdict": "served"}
    assert launches.merged([*kept, gone], []) == kept
