"""The pages for users: links, flags, commands and figures are right, and tables are what a script makes."""

from __future__ import annotations

import json
import re

import pytest
from builders import pages
from builders.pages import PAGES, ROOT

from benchmarks import docs_tables, expectations
from benchmarks.gpu.sections import SECTIONS

pytestmark = pytest.mark.sglang

SCRIPT = re.compile(r"\b(?:scripts|benchmarks|tests)/[\w./-]+\.(?:py|sh)\b")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


every_page_and_root = pytest.mark.parametrize(
    "page", sorted({*PAGES, *ROOT.glob("*.md")}), ids=lambda page: str(page.relative_to(ROOT))
)


@every_page_and_root
def test_scripts_that_are_named_exist(page):
    assert [name for name in SCRIPT.findall(page.read_text()) if not (ROOT / name).exists()] == []


@every_page_and_root
def test_links_lead_somewhere(page):
    assert [reason for link in pages.links(page.read_text()) if (reason := pages.broken(link, page))] == []


@every_page
def test_flags_that_are_named_exist_and_take_the_value_behind_them(page):
    text = re.sub(r"^<!-- replaced -->\n.*?^<!-- /replaced -->$", "", page.read_text(), flags=re.M | re.S)
    named = [(name, None) for name in re.findall(r"--expert-offload-[\w-]*\w", text)]
    with_values = re.findall(r"`(--expert-offload-[\w-]*\w) ([^`\s]+)[^`]*`", text)
    assert [problem for name, value in named + with_values for problem in pages.flag_problems(name, value)] == []


@every_page
def test_commands_parse_and_bodies_of_requests_are_valid(page):
    for words in pages.commands(page.read_text()):
        try:
            if (arguments := pages.launched(words)) is not None:
                pages.config_of_launch(arguments)
            elif words[0] == "sglang-uvm-offload":
                pages.parse_subcommand(words[1:])
            elif words[0] == "curl" and "-d" in words:
                json.loads(body := words[words.index("-d") + 1])
                if any(word.endswith("/expert_offload") for word in words):
                    pages.parse_action(body)
        except ValueError as error:
            pytest.fail(f"{' '.join(words)}: {error}")


RUN_BY = {
    **dict.fromkeys(("pip install", "pip uninstall"), "unit/test_packaging.py"),
    **dict.fromkeys(("sglang-uvm-offload plan", "sglang-uvm-offload profile"), "unit/test_docs_commands.py"),
    **dict.fromkeys(("sglang-uvm-offload replay", "python -m benchmarks.docs_tables"), "unit/test_docs_commands.py"),
    **dict.fromkeys(("bash scripts/test.sh", "bash scripts/fuzz.sh", "rm"), "unit/test_docs_commands.py"),
    "bash scripts/quickstart.sh": "engine/test_quickstart.py",
    **dict.fromkeys(("sglang serve", "python -m sglang.launch_server"), "engine/test_docs_launches.py"),
    "sglang-uvm-offload doctor": "engine/test_docs_launches.py",
    **dict.fromkeys(("sglang-uvm-offload report", "sglang-uvm-offload status", "curl"), "engine/test_wheel.py"),
    "sglang-uvm-offload run": "engine/test_plugin_doors.py",
    "scripts/gpu_session.sh": "compiled/test_gpu_session.py",
    **dict.fromkeys(("python -m benchmarks.lm_eval_results", "lm_eval run"), "unit/test_lm_eval_results.py"),
}
"""The tests that run each kind of command."""
NOT_RUN = {
    "llama-server": "another project's, shown to compare its flags",
    "docker": "needs Docker and a registry; unit/test_kubernetes.py compares its tag with the manifest's",
    "kubectl": "needs a cluster; unit/test_kubernetes.py compares its names with the manifest's",
}


def test_every_command_is_run_by_a_test():
    shown = {pages.kind(words) for page in PAGES for words in pages.commands(page.read_text())}
    assert shown == {*RUN_BY, *NOT_RUN}
    for kind, path in RUN_BY.items():
        assert kind in (ROOT / "tests" / path).read_text(), f"{path} runs no {kind}"


@pytest.mark.parametrize(
    "words",
    [
        "sglang serve --model-path MODEL --no-such-flag 1",
        "sglang serve --model-path MODEL --expert-offload-num-resident many",
        "sglang serve ... --expert-offload-adapt never",
        "sglang serve --expert-offload-num-resident 8",
        "sglang-uvm-offload plan MODEL --no-such",
        "sglang-uvm-offload doctor -- --no-such",
    ],
)
def test_a_command_that_does_not_parse_is_noticed(words):
    name, *arguments = words.split()
    with pytest.raises(ValueError, match=r"\w"):
        pages.config_of_launch(arguments[1:]) if name == "sglang" else pages.parse_subcommand(arguments)


def test_links_to_nothing_flags_that_are_none_and_values_that_they_do_not_take_are_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# It's `here`, now\n")
    assert pages.broken("page.md#its-here-now", page) is None
    assert "heading" in pages.broken("#elsewhere", page)
    assert "file" in pages.broken("gone.md", page)
    right = [("adapt", "continuous"), ("num-resident", "N"), ("config", "warmup_tokens"), ("resident-selection", "manual")]
    wrong = [("gone", None), ("adapt", "never"), ("num-resident", "most"), ("config", "warmup"), ("warmup-tokens", "8")]
    for named, problems in ((right, 0), (wrong, 1)):
        assert [len(pages.flag_problems(f"--expert-offload-{name}", value)) for name, value in named] == [problems] * len(named)


# ---- what is made by a script ----


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return docs_tables.blocks(ROOT / "tests/fixtures/models")


@every_page
def test_tables_are_what_the_planner_predicts_and_the_log_shows(page, made):
    for name, text in docs_tables.shown_in(page.read_text()).items():
        assert text == made[name], f"python -m benchmarks.docs_tables tests/fixtures/models {page.relative_to(ROOT)}"


def test_every_table_is_on_one_page_and_has_no_empty_column(made):
    shown = [name for page in PAGES for name in docs_tables.shown_in(page.read_text())]
    assert sorted(shown) == sorted(made)
    for name in ("measured", "quarter"):  # servers without figures have none
        rows = [row for row in made[name].splitlines()[2:] if row.startswith("|")]
        columns = zip(*(row.strip("| ").split(" | ") for row in rows), strict=True)
        assert all(set(column) != {"-"} for column in columns)
    verdicts = [row.split("|")[-2].split(":")[0].strip() for row in made["expectations"].splitlines()[2:]]
    assert len(verdicts) == len(expectations.CASES)
    assert set(verdicts) == {"useful", "useful, but for a slow link", "useless", "does not fit"}


def test_the_readmes_rule_of_thumb_is_what_the_planner_says():
    """It holds for every row of the table below it."""
    (low, high) = map(
        float, re.findall(r"^- \*\*([\d.]+) to ([\d.]+): use this\*\*", (ROOT / "README.md").read_text(), re.M)[0]
    )
    for model, machine in expectations.FITS:
        plan = expectations.planned(ROOT / f"tests/fixtures/models/{model}.json", machine)
        share = plan.weights_bytes / (plan.machine.gpus * plan.machine.vram_bytes)
        pays = plan.fits and not plan.useless and plan.plain is None
        assert pays == (low <= share <= high), f"{model} on {machine}: {share:.2f}"


def test_the_readme_links_to_the_log_of_its_times():
    (log,) = re.findall(r"\[logs\]\((\S+)\.log\)", (ROOT / "README.md").read_text())
    assert (ROOT / log).with_suffix(".json") == docs_tables.MEASURED


# ---- figures from elsewhere ----


def test_figures_are_in_the_log_or_the_publication_behind_them():
    page = (ROOT / "docs/coming-from.md").read_text()
    published = (ROOT / "benchmarks/published.json").read_text()
    checked = 0
    for item in re.findall(r"^- .*(?:\n  .*)*", page, re.M):
        figures = re.findall(r"`(\d[\d.]*(?: GiB)?)`", item)
        links = re.findall(r"\]\(([^)]+)\)", item)
        texts = [(ROOT / "docs" / link).read_text() for link in links if not link.startswith("http") and "results" in link]
        texts += [published for link in links if link in published]
        for figure in figures:
            assert any(re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]\d)", text) for text in texts), f"{figure}: {links}"
            checked += 1
    assert checked > 10


def test_the_sections_to_run_are_those_that_there_are():
    page = (ROOT / "docs/gpu-runs.md").read_text()
    named = re.findall(r"scripts/gpu_session\.sh ([a-z]\w*)", page)
    named += re.search(r"for section in ([\w ]+);", page).group(1).split()
    named += re.findall(r"`(\w+)`", re.search(r"real servers \((.*?)\)", page, re.S).group(1))
    assert set(named) == set(SECTIONS)


def test_every_page_is_linked_from_another():
    linked = {(page.parent / link.split("#")[0]).resolve() for page in PAGES for link in pages.links(page.read_text())}
    assert {page for page in PAGES if page.parent == ROOT / "docs"} <= linked
