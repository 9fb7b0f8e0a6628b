"""What ``doctor`` says of launch lines that publishers print: ``python -m benchmarks.published_launches JUNIT.xml`` makes
docs/launches.md of what ``pytest --nightly tests/engine/test_published_launches.py --junitxml JUNIT.xml`` recorded, and of the
record for lines that it did not run."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as xml
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "launches.md"
RECORD = ROOT / "benchmarks" / "results" / "launches" / "launches.json"
PUBLISHED = ROOT / "benchmarks" / "published_launches.json"

HEAD = """# Published launch lines, and what becomes of them

Made by `benchmarks/published_launches.py` of the results of `tests/engine/test_published_launches.py`:
`sglang-uvm-offload doctor` judges each line with two values of `--expert-offload-num-resident`, over a stand-in for
eight H200, or eight B200 where the line is for Blackwell, and 3 TiB of host RAM. Nothing here is a statement about a
GPU. Checkpoints are of true shape: the tensors' names, types and sizes, without their bytes, beside the published
configuration. `--trust-remote-code` is left out, because the publishers' code is not there. Where nothing tells the names
of its tensors, a model is launched with `--load-format dummy`, and its bytes are those of SGLang's class. A line is not
judged where SGLang has no class for the model, or where its draft model is only on the Hub.

What is *estimated not to fit* or *doubtful* is warned of, and decided by the ranks once they have built the model.

How `plan` counts the weights of these models is in
[a table of its own](../benchmarks/results/architectures/architectures.md).

| model | its line | residents | verdict |
| --- | --- | --- | --- |
"""

Row = dict[str, str]


def read(junit: Path) -> list[Row]:
    """The verdicts that the tests recorded, of those that did not fail."""
    cases = [case for case in xml.parse(junit).iter("testcase") if case.find("failure") is None and case.find("error") is None]
    found = [{each.get("name", ""): each.get("value", "") for each in case.iter("property")} for case in cases]
    return [row for row in found if "verdict" in row]


def merged(kept: list[Row], made: list[Row]) -> list[Row]:
    """In the order of the published lines."""
    found = {(row["model"], row["words"], row["residents"]): row for row in (*kept, *made)}
    order = [(each["model"], each["words"]) for each in json.loads(PUBLISHED.read_text())]
    return [row for line in dict.fromkeys(order) for key, row in found.items() if key[:2] == line]


def page(rows: list[Row]) -> str:
    sources = {(each["model"], each["words"]): each for each in json.loads(PUBLISHED.read_text())}
    lines = ""
    for row in rows:
        line = sources[row["model"], row["words"]]
        words = f"{line.get('environment', '')} {line['words']}".strip()
        gpu = f", on {line['gpu']}" if "gpu" in line else ""
        verdict = row["verdict"].replace("|", "\\|")
        lines += f"| {row['model']}{gpu} | [`{words}`]({line['source']}) | {row['residents']} | {verdict} |\n"
    launches = len({(row["model"], row["words"]) for row in rows})
    served = sum(row["verdict"].startswith("served") for row in rows)
    return f"{HEAD}{lines}\n{launches} of {len(sources)} lines are judged; {served} of {len(rows)} launches are served.\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("junit", type=Path)
    rows = merged(json.loads(RECORD.read_text()) if RECORD.exists() else [], read(parser.parse_args(arguments).junit))
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(rows, indent=1) + "\n")
    OUT.write_text(page(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
