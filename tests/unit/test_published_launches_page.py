"""The page of published launch lines is made of what the tests recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import published_launches as launches

CASE = """<testsuites><testsuite>
<testcase name="a"><properties>{properties}</properties>{failure}</testcase>
</testsuite></testsuites>"""


def recorded() -> list[launches.Row]:
    return json.loads(launches.RECORD.read_text())


def test_the_pages_are_the_programs() -> None:
    assert launches.PAGE.read_text() == launches.page(recorded())
    assert launches.ALL.read_text() == launches.all_lines(recorded())


def with_verdicts(*verdicts: str) -> list[launches.Row]:
    """The first lines of the record, each with another verdict."""
    return [{**row, "verdict": verdict} for row, verdict in zip(recorded(), verdicts, strict=False)]


def section(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_page_sums_up_what_is_served_warned_of_and_refused() -> None:
    whole, part, short = (
        f"served: {rest}"
        for rest in (
            "9 of 9 experts a layer resident",
            "3 of 9 experts a layer resident, 4 slots",
            "3 of 9 experts a layer resident; too long",
        )
    )
    rows = with_verdicts(whole, part, short, "doubtful: x", "estimated not to fit: y", "refused: z | z")
    rows[1]["residents"] = "auto"
    page = launches.page(rows)
    assert "Of 6 launches 2 are served, 3 start with a warning and 1 are refused." in page
    assert section(page, "Served").split(": ")[1].strip() == f"{rows[0]['model']}."
    assert section(page, "Offloaded by `auto`").splitlines()[-1].endswith("| 3 of 9 | 4 |")
    assert section(page, "Warned").count("\n| ") == 2 + 3
    assert section(page, "Refused").splitlines()[-1].startswith("| refused: z \\| z |")


def test_models_that_are_refused_for_one_reason_are_named_together_and_once() -> None:
    rows = [{**row, "verdict": "refused: z"} for row in recorded() if row["model"] == "Qwen/Qwen3.5-397B-A17B"]
    named = section(launches.page(rows), "Refused").splitlines()[-1]
    assert named == "| refused: z | Qwen/Qwen3.5-397B-A17B |"
    only = [row for row in rows if row["residents"] == "16"]
    assert section(launches.page(only), "Refused").splitlines()[-1] == "| refused: z | Qwen/Qwen3.5-397B-A17B (16) |"


def test_what_is_no_verdict_is_noticed() -> None:
    with pytest.raises(ValueError, match="no verdict: served, somehow"):
        launches.page(with_verdicts("served, somehow"))


def test_a_case_that_failed_is_no_row(tmp_path: Path) -> None:
    file, properties = tmp_path / "junit.xml", '<property name="model" value="m"/><property name="verdict" value="served"/>'
    file.write_text(CASE.format(properties=properties, failure=""))
    assert launches.read(file) == [{"model": "m", "verdict": "served"}]
    file.write_text(CASE.format(properties=properties, failure="<failure/>"))
    assert launches.read(file) == []


def test_lines_that_a_run_left_out_keep_their_verdicts() -> None:
    kept = recorded()
    anew = {**kept[1], "verdict": "refused: anew"}
    assert launches.merged(kept, []) == kept
    assert launches.merged(kept[:1] + kept[2:], [anew]) == [kept[0], anew, *kept[2:]]
    gone = {"model": "m", "words": "no longer published", "residents": "auto", "verdict": "served"}
    assert launches.merged([*kept, gone], []) == kept
