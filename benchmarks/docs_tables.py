"""Every generated table of the pages: ``python -m benchmarks.docs_tables CONFIGS [PAGE...]``.

CONFIGS is a folder of config files by model. Prints every block that pages show between markers, as ``<!-- plan:8xH20 -->`` and
``<!-- /plan:8xH20 -->``; with pages, writes those that each has into it.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from benchmarks import expectations, measured_table, published, serve_report
from sglang_uvm_offload import flags

RESULTS = Path(__file__).with_name("results")
MEASURED = RESULTS / "2026-11-27-nvidia-h200-2" / "peers.json"
"""The log of README's measured times."""
QUARTER = RESULTS / "2026-11-27-nvidia-h200" / "serving_slots.json"
"""The log of those with a quarter of the experts in VRAM."""
PAGE_COLUMNS = 140


def blocks(configs: Path) -> dict[str, str]:
    """Every block by the name in its markers."""
    _, _, compared = published.read(configs)
    return expectations.blocks(configs) | {
        **flags.tables(),
        "measured": measured_table.table(serve_report.load(MEASURED)),
        "quarter": measured_table.table(serve_report.load(QUARTER)),
        "published": textwrap.fill(published.summary(compared), PAGE_COLUMNS),
    }


def shown_in(page: str) -> dict[str, str]:
    """The blocks that a page has."""
    names = r"flags|options|replaced|expectations|fits|choices|measured|quarter|published|plan:\w+"
    return dict(re.findall(rf"<!-- ({names}) -->\n(.*?)\n<!-- /\1 -->", page, re.S))


def refreshed(page: str, made: dict[str, str]) -> str:
    """The page with its blocks as they are ``made``."""
    for name, old in shown_in(page).items():
        page = page.replace(_between(name, old), _between(name, made[name]))
    return page


def _between(name: str, text: str) -> str:
    return f"<!-- {name} -->\n{text}\n<!-- /{name} -->"


def main(arguments: list[str]) -> None:
    configs, *pages = map(Path, arguments)
    made = blocks(configs)
    for page in pages:
        page.write_text(refreshed(page.read_text(), made))
    if not pages:
        print("\n\n".join(_between(name, text) for name, text in made.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
