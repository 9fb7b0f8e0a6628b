"""The Kubernetes manifest: the API server takes it, and its figures are those that the planner and SGLang compute."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import json
import math
import re
import shlex
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import yaml
from builders import pages
from builders.pages import ROOT
from builders.plans import MODELS, run
from kubernetes_validate.utils import all_versions
from sglang.srt.entrypoints import http_server
from sglang.srt.environ import envs
from sglang.srt.managers.tokenizer_manager import ServerStatus

from sglang_uvm_offload.plan.machine import GIB

pytestmark = pytest.mark.sglang

MANIFEST = (ROOT / "docs/operations/kubernetes.yaml").read_text()
DEPLOYMENT, SERVICE = yaml.safe_load_all(MANIFEST)
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
LAUNCH = pages.launched(CONTAINER["command"] + CONTAINER["args"])
PAGE = (ROOT / "docs/kubernetes.md").read_text()
KUBECTL = pages.of_kind("kubectl")
ENV = {each["name"]: each["value"] for each in CONTAINER["env"] if "value" in each}
SECRETS = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in CONTAINER["env"] if "valueFrom" in each}
VERSIONS = all_versions()


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
@pytest.mark.parametrize("document", [DEPLOYMENT, SERVICE], ids=lambda document: document["kind"])
def test_an_object_is_of_its_schema(document, version):
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(("field", "value"), [("enableServiceLink", False), ("terminationGracePeriodSeconds", "5m")])
def test_a_field_that_is_none_or_of_another_type_is_noticed(field, value):
    wrong = copy.deepcopy(DEPLOYMENT)
    wrong["spec"]["template"]["spec"][field] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def gib(quantity: str) -> int:
    return int(re.fullmatch(r"(\d+)Gi", quantity).group(1))


def printed(*flags: object) -> dict[str, Any]:
    """The plan that the page's command prints."""
    ((_, _, _, *asked),) = [words for words in pages.commands(PAGE) if pages.kind(words) == "sglang-uvm-offload plan"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert run(MODELS / "glm-5-fp8.json", *asked, "--json", *flags) == 0
    return json.loads(said.getvalue())


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return printed()


def test_the_memory_is_what_the_plan_says_and_dev_shm(plan):
    (shm,) = [volume["emptyDir"] for volume in POD["volumes"] if "emptyDir" in volume]
    assert shm["medium"] == "Memory"
    needed = math.ceil(plan["host_needed"] / GIB)
    resources = CONTAINER["resources"]
    assert gib(resources["limits"]["memory"]) == needed + gib(shm["sizeLimit"])
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    within = printed("--host-gb", needed)
    assert (within["flags"], within["notes"]) == (plan["flags"], plan["notes"])


def test_the_gpus_are_those_of_the_plan_and_of_the_launch(plan):
    of_sglang, _ = pages.config_of_launch(LAUNCH)
    for kind in ("limits", "requests"):
        assert CONTAINER["resources"][kind]["nvidia.com/gpu"] == of_sglang.tp_size == plan["machine"]["gpus"]


def test_the_plan_is_for_the_requests_of_the_launch_and_leaves_no_residents(plan):
    of_sglang, _ = pages.config_of_launch(LAUNCH)
    requests = plan["workload"]["requests"], plan["workload"]["context_length"]
    assert requests == (of_sglang.max_running_requests, of_sglang.context_length)
    assert plan["num_resident"] == 0 < plan["slots"]


def test_the_keys_come_from_the_secret_that_the_page_creates():
    of_sglang, _ = pages.config_of_launch(LAUNCH)
    assert [of_sglang.api_key, of_sglang.admin_api_key] == [f"$({name})" for name in SECRETS]
    (create,) = [words for words in KUBECTL if words[1] == "create"]
    assert create[2:4] == ["secret", "generic"]
    made = {(create[4], re.match(r"--from-literal=([\w-]+)=", word).group(1)) for word in create[5:]}
    assert made == {(each["name"], each["key"]) for each in SECRETS.values()}


def test_the_commands_of_the_page_name_the_deployment_its_pods_and_its_image():
    named = {word for words in KUBECTL for word in words if word.startswith("deployment/")}
    assert named == {f"deployment/{DEPLOYMENT['metadata']['name']}"}
    selectors = {words[words.index("-l") + 1] for words in KUBECTL if "-l" in words}
    assert selectors == {f"app={DEPLOYMENT['spec']['selector']['matchLabels']['app']}"}
    assert re.findall(r"docker (?:build --tag|push) (\S+)", PAGE) == 2 * [CONTAINER["image"]]


def test_the_action_of_the_page_carries_the_key_and_a_body_that_is_valid():
    (inner,) = [words[-1] for words in KUBECTL if words[1] == "exec" and "sh" in words]
    curl = shlex.split(inner)
    assert "Authorization: Bearer $ADMIN_API_KEY" in curl
    pages.parse_action(curl[curl.index("-d") + 1])


def test_sigterm_ends_a_server_that_loads():
    """The kernel drops it for process 1 of a PID namespace, which has no handler yet."""
    assert POD["shareProcessNamespace"]
    assert yaml.safe_load((ROOT / "docs/operations/compose.yaml").read_text())["services"]["sglang"]["init"]


def window(probe: str) -> int:
    """Seconds of failures that the kubelet takes."""
    return CONTAINER[probe]["periodSeconds"] * CONTAINER[probe]["failureThreshold"]


def test_a_start_may_take_as_long_as_reading_the_checkpoint_at_the_stated_rate_and_the_rest(plan):
    ((size, rate, rest),) = re.findall(r"# ([\d.]+) GiB at ([\d.]+) GiB/s, and (\d+) minutes", MANIFEST)
    assert size == f"{plan['weights_bytes'] / GIB:.2f}"
    needed = float(size) / float(rate) + 60 * int(rest)
    assert 0 <= window("startupProbe") - needed < CONTAINER["startupProbe"]["periodSeconds"]
    assert DEPLOYMENT["spec"]["progressDeadlineSeconds"] > window("startupProbe")


def test_the_liveness_probe_leaves_a_step_to_the_watchdog():
    """SGLang's watchdog ends what hangs, and is first."""
    of_sglang, _ = pages.config_of_launch(LAUNCH)
    assert window("livenessProbe") > of_sglang.watchdog_timeout


@pytest.mark.parametrize(
    ("status", "ending", "code"),
    [(ServerStatus.Starting, False, 503), (ServerStatus.Up, False, 200), (ServerStatus.Up, True, 503)],
)
def test_health_needs_no_token_and_fails_while_the_server_starts_and_ends(monkeypatch, status, ending, code):
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    cannot_generate = SimpleNamespace(server_status=status, gracefully_exit=ending)
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=cannot_generate))
    request = SimpleNamespace(url=SimpleNamespace(path=CONTAINER["livenessProbe"]["httpGet"]["path"]))
    assert asyncio.run(http_server.health_generate(request)).status_code == code


def test_variables_of_sglang_exist():
    compose = yaml.safe_load((ROOT / "docs/operations/compose.yaml").read_text())["services"]["sglang"]["environment"]
    named = {name for name in {**ENV, **compose} if name.startswith("SGLANG_")}
    assert named
    assert {name for name in named if not hasattr(type(envs), name)} == set()


def test_probes_the_service_and_prometheus_ask_the_port_that_sglang_has():
    of_sglang, _ = pages.config_of_launch(LAUNCH)
    (port,) = CONTAINER["ports"]
    (served,) = SERVICE["spec"]["ports"]
    annotations = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
    asked = {CONTAINER[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "readiness", "liveness")}
    assert asked == {served["targetPort"]} == {port["name"]}
    assert port["containerPort"] == of_sglang.port == int(annotations["prometheus.io/port"])
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert labels == DEPLOYMENT["spec"]["selector"]["matchLabels"] == SERVICE["spec"]["selector"]


def mounted(path: str | PurePath) -> dict[str, Any]:
    """The volume that holds a path of the container, with its mount."""
    mounts = {mount["mountPath"]: mount for mount in CONTAINER["volumeMounts"]}
    (at,) = [mount for where, mount in mounts.items() if PurePath(path).is_relative_to(where)]
    (volume,) = [volume for volume in POD["volumes"] if volume["name"] == at["name"]]
    return at | volume


def test_what_a_start_takes_up_again_is_kept_on_the_node():
    of_sglang, of_plugin = pages.config_of_launch(LAUNCH)
    for path in (of_plugin.save_profile, ENV["XDG_CACHE_HOME"], ENV["SGLANG_CACHE_DIR"]):
        assert "hostPath" in mounted(path)
        assert not mounted(path).get("readOnly")
    assert mounted(of_sglang.model_path)["readOnly"]
    assert mounted("/dev/shm")["emptyDir"]


def test_one_server_at_a_time_with_time_to_end():
    assert DEPLOYMENT["spec"]["strategy"] == {"type": "Recreate"}
    assert DEPLOYMENT["spec"]["replicas"] == 1
    assert POD["enableServiceLinks"] is False
    unit = (ROOT / "docs/operations/sglang-offload.service").read_text()
    (stopping,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    *_, asleep = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert POD["terminationGracePeriodSeconds"] >= int(asleep) + int(stopping)
