"""What ``scripts/try_sglang.sh`` records of a version."""

from pathlib import Path

import pytest

from scripts import record_sglang

JUNIT = """<testsuites><testsuite>
<testcase classname="engine.test_a" name="test_serves"/>
<testcase classname="engine.test_a" name="test_ends"><failure/></testcase>
<testcase classname="engine.test_b" name="test_starts"><error/></testcase>
<testcase classname="engine.test_b" name="test_elsewhere"><skipped message="no GPU"/></testcase>
<testcase classname="engine.test_b" name="test_newer"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.sglang
def test_tests_are_counted_and_those_that_failed_are_named(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    made = record_sglang.entry(tmp_path / "junit.xml", ["engine"])
    assert (made["passed"], made["failed"], made["skipped"], made["ran"]) == (1, 2, 2, ["engine"])
    assert made["failed_tests"] == ["test_a::test_ends", "test_b::test_starts"]
    assert made["skipped_as"] == {"no GPU": 2}


def test_a_version_that_runs_again_has_one_entry() -> None:
    entries = [{"sglang": "0.5.9", "failed": 1}, {"sglang": "0.5.21", "failed": 0}]
    assert record_sglang.replaced(entries, {"sglang": "0.5.9", "failed": 0}) == [
        {"sglang": "0.5.21", "failed": 0},
        {"sglang": "0.5.9", "failed": 0},
    ]
