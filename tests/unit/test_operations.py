"""The dashboard, the alerts, the unit, the container and the page about them name what the plugin has."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest
import sglang.srt.observability.metrics_collector as sglang_metrics
import yaml
from builders import links, pages
from builders.managers import Rank, config
from builders.plans import planned
from prometheus_client import CollectorRegistry

from sglang_uvm_offload.memory.host_ram import HOST_MARGIN_BYTES
from sglang_uvm_offload.memory.link import NEAR
from sglang_uvm_offload.plan.machine import GIB
from sglang_uvm_offload.plugin.operate.actions import Action
from sglang_uvm_offload.plugin.operate.metrics import Metrics
from sglang_uvm_offload.plugin.rank.start_clock import StartPhase

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/operations"
PAGE = (ROOT / "docs/operations.md").read_text()
LABELS = ("model_name", "tp_rank", "pp_rank", "dp_rank")
OF_PROMETHEUS = {"instance"}
COUNTED = re.compile(r"\b(?:rate|increase)\((sglang:\w+)")


@pytest.fixture(scope="module")
def exported() -> dict[str, tuple[tuple[str, ...], str]]:
    """The labels and the meaning of each metric, by its name on ``/metrics``."""
    registry = CollectorRegistry()
    Metrics(Rank(config(resident_selection="first_n")).manager, dict.fromkeys(LABELS, "x"), dict, [], registry)
    return {name_of(c): (vars(c)["_labelnames"], vars(c)["_documentation"]) for c in registry._collector_to_names}


def name_of(collector) -> str:
    return collector._name + ("_total" if collector._type == "counter" else "")


def alerts() -> list[dict]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def dashboard() -> dict:
    return json.loads((FOLDER / "grafana.json").read_text())


def shown() -> list[str]:
    """The queries of the dashboard."""
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def queries() -> list[str]:
    found = [rule["expr"] for rule in alerts()] + shown()
    assert len(found) > 15
    return found


@pytest.mark.parametrize("query", queries())
def test_a_query_is_of_metrics_and_labels_that_are_exported_and_rates_of_what_grows(exported, query):
    named = re.findall(r"(sglang:\w+)(?:\{(.*?)\})?", query)
    assert named
    grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
    for name, selected in named:
        if name.startswith("sglang:expert_offload_"):
            assert grouped | set(re.findall(r"(\w+)=", selected)) <= {*exported[name][0], *OF_PROMETHEUS}
        else:
            assert f'"{name}"' in Path(sglang_metrics.__file__).read_text()
        assert name.endswith("_total") == (name in COUNTED.findall(query))
    for left, right in ("()", "{}", "[]"):
        assert query.count(left) == query.count(right)


def test_every_metric_but_one_is_on_the_dashboard_in_a_place_of_its_own(exported):
    panels = dashboard()["panels"]
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    by_bytes = {"sglang:expert_offload_resident_experts"}  # resident_bytes says the same in what VRAM is measured in
    assert set(exported) - {name for query in shown() for name in re.findall(r"sglang:\w+", query)} == by_bytes


def test_every_metric_has_the_labels_of_its_rank(exported):
    assert {name for name, (labels, _) in exported.items() if labels[: len(LABELS)] != LABELS} == set()


def expression(alert: str) -> str:
    return next(rule["expr"] for rule in alerts() if rule["alert"] == alert)


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"m": 60, "h": 3600}[duration[-1]]


def test_servers_that_load_are_not_missed():
    """A server has no metrics while it loads."""
    deployment, _ = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    longest = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    missing = [rule["for"] for rule in alerts() if rule["alert"] in ("ExpertOffloadNoServer", "ExpertOffloadFewerRanks")]
    assert len(missing) == 2
    assert min(map(seconds, missing)) > longest


def test_an_alert_on_host_ram_fires_before_moves_end():
    (limit,) = re.findall(r"< (\d+)$", expression("ExpertOffloadHostRamLow"))
    assert int(limit) == 2 * HOST_MARGIN_BYTES


def test_an_alert_on_the_link_is_of_the_rate_that_the_log_judges():
    ((rate, share),) = re.findall(r'by="(\w+)".*< ([\d.]+) \*', expression("ExpertOffloadSlowLink"))
    slow = links.status(expected=50.0, **{rate: float(share) * 50.0})
    assert slow.verdict().startswith(f"this machine reads offloaded experts at {NEAR * 50.0:.1f} GB/s")


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do_and_where_more_is_written(rule):
    notes = rule["annotations"]
    assert {"summary", "description"} <= set(notes)
    path, anchor = notes["runbook"].split("#")
    assert anchor in pages.anchors((ROOT / path).read_text())
    for body in re.findall(r"POST /expert_offload (\{.*?\})", notes["description"]):
        pages.parse_action(body)


def launches() -> dict[str, list[str]]:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(FOLDER / "sglang-offload.service")
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["sglang"]
    deployment, _ = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {
        "service": shlex.split(unit["Service"]["ExecStart"]),
        "compose": shlex.split(compose["command"]),
        "kubernetes": container["command"] + container["args"],
    }


@pytest.mark.parametrize("name", ["service", "compose", "kubernetes"])
def test_an_example_launches_sglang_with_flags_that_exist(name):
    of_sglang, of_plugin = pages.config_of_launch(pages.launched(launches()[name]))
    assert of_sglang.enable_metrics
    assert of_plugin.save_profile is not None


def test_the_unit_signals_the_main_process_alone():
    """systemd signals every process of a unit by default, and ranks would end before they save."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(FOLDER / "sglang-offload.service")
    assert unit["Service"]["KillMode"] == "mixed"


def test_the_page_lists_the_metrics_that_are_exported(exported):
    rows = ["| metric | more labels | meaning |", "| --- | --- | --- |"]
    for name, (labels, meaning) in sorted(exported.items()):
        more = ", ".join(f"`{label}`" for label in labels if label not in LABELS)
        rows.append(f"| `{name}` | {more} | {meaning} |")
    table = "\n".join(rows)
    assert re.search("<!-- metrics -->\n(.*)\n<!-- /metrics -->", PAGE, re.S).group(1) == table, f"it should be:\n{table}"


def test_the_page_has_all_actions_and_no_others():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.split("## Actions")[1].split("## Metrics")[0], re.M)
    assert sorted(rows) == sorted(Action)


def test_the_page_has_the_phases_of_a_start_in_their_order():
    section = PAGE.split("## How long a start takes")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([^`]+)` \|", section, re.M) == [phase.value for phase in StartPhase]


def test_the_time_to_read_a_checkpoint_is_its_size_over_the_rate():
    size = planned("glm-5-fp8").weights_bytes / GIB
    (shown,) = re.findall(r"reading ([\d.]+) GiB takes", PAGE)
    assert shown == f"{size:.2f}"
    rows = re.findall(r"^\| ([\d.]+) GiB/s \| ([\d.]+) minutes \|$", PAGE, re.M)
    assert rows == [(rate, f"{size / float(rate) / 60:.1f}") for rate, _ in rows]
    assert len(rows) > 2
