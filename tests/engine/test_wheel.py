"""The wheel, installed outside the checkout, in real SGLang: its flags, and a server that answers a prompt and the requests
that the documents show."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import pages
from builders.plugins import saboteur
from builders.wheels import ROOT, Installed
from serving import TESTS

from scripts.harness.patience import patience
from scripts.harness.process import kill_group
from scripts.harness.server import SHIMS, Server, environment
from sglang_uvm_offload.flags import ARGUMENTS, spelled

DOCUMENTED = "http://127.0.0.1:30000"
"""The address of the server in the documents."""

TINY = ROOT / "scripts/tiny"
RESIDENT = 6
NOTE = """\
import os, pathlib, sglang_uvm_offload
pathlib.Path({!r}, str(os.getpid())).write_text(sglang_uvm_offload.__file__)
"""


class InstalledServer(Server):
    """A server that runs the installed wheel. It imports SGLang once and is killed at the end. Each of its processes that loads
    plugins writes the location of this package to a file in ``found``."""

    def __init__(self, installed: Installed, found: Path, **options: object):
        plugin = found.with_name("plugin")
        plugin.mkdir()
        found.mkdir()
        saboteur(plugin, NOTE.format(str(found)))
        paths = {"PYTHONPATH": os.pathsep.join(map(str, [plugin, TESTS / "forking", SHIMS]))}
        command = [str(installed.python), "-m", "sglang.launch_server"]
        super().__init__(TINY, command=command, env=installed.environment | paths, **options)

    def stop(self) -> None:
        assert self.process is not None
        kill_group(self.process.pid)
        self.process.wait(patience(30))


@pytest.fixture(scope="module")
def help_text(installed: Installed) -> Iterator[subprocess.Popen[str]]:
    """``sglang.launch_server --help``, which imports SGLang while the server starts."""
    command = [str(installed.python), "-m", "sglang.launch_server", "--help"]
    env = environment(installed.environment)
    with subprocess.Popen(command, env=env, cwd=installed.outside, stdout=subprocess.PIPE, text=True) as running:
        yield running


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "found"


@pytest.fixture(scope="module")
def server(installed: Installed, found: Path, help_text: subprocess.Popen[str]) -> Iterator[Server]:
    with InstalledServer(installed, found, expert_offload_num_resident=RESIDENT) as server:
        answer(server)  # residents are chosen from some tokens only
        yield server


def test_the_doctor_is_ready_for_what_is_served(installed: Installed):
    launch = ["--device", "cpu", "--model-path", str(TINY), "--expert-offload-num-resident", str(RESIDENT)]
    command = [str(installed.folder / "bin/sglang-uvm-offload"), "doctor", "--", *launch]
    env = environment(installed.environment | {"PYTHONPATH": str(SHIMS)})
    done = subprocess.run(command, env=env, cwd=installed.outside, capture_output=True, text=True, timeout=patience(300))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"--expert-offload-num-resident {RESIDENT} of 16 experts a layer, on one rank" in done.stdout


def answer(server: Server) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return server.post("/generate", {"text": "If the argument is", "sampling_params": sampling})["output_ids"]


def test_a_server_offloads_and_answers(server: Server):
    assert len(answer(server)) == 8
    (rank,) = server.get("/expert_offload")["ranks"]
    assert (rank["resident_experts"], rank["offloaded_experts"]) == (12, 20)


def test_each_of_its_processes_runs_what_was_installed(server: Server, installed: Installed, found: Path):
    places = [path.read_text() for path in found.iterdir()]
    assert len(places) > 1
    assert set(places) == {str(installed.site / "sglang_uvm_offload/__init__.py")}


def test_every_flag_is_in_the_help(server: Server, help_text: subprocess.Popen[str]):
    shown, _ = help_text.communicate(timeout=patience(300))
    assert help_text.returncode == 0
    assert [name for name in ARGUMENTS if f"  {spelled(name)} " not in shown] == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("words", pages.of_kind("curl"), ids=" ".join)
def test_a_request_of_the_documents_is_answered(server: Server, words: list[str]):
    command = [word.replace(DOCUMENTED, server.url) for word in words]
    assert command != words, "the documents' server is there"
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(300))
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["ranks"]
    assert rank["fault"] is None


@pytest.mark.parametrize("words", pages.of_kind("sglang-uvm-offload report"), ids=" ".join)
def test_a_report_of_the_documents_is_written(server: Server, installed: Installed, words: list[str]):
    done = installed.run(*[word.replace(DOCUMENTED, server.url) for word in words])
    assert done.returncode == 0, done.stderr
    page = installed.outside / words[words.index("--out") + 1]
    assert server.url in page.read_text()
    page.unlink()


def _heed_ctrl_c() -> None:
    """A test run in the background ignores SIGINT, and a child would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("words", pages.of_kind("sglang-uvm-offload status"), ids=" ".join)
def test_a_status_of_the_documents_is_shown(server: Server, installed: Installed, words: list[str]):
    name, *arguments = [word.replace(DOCUMENTED, server.url) for word in words]
    command = [str(installed.folder / "bin" / name), *arguments]
    running = subprocess.Popen(
        command, env=installed.environment, cwd=installed.outside, stdout=subprocess.PIPE, preexec_fn=_heed_ctrl_c
    )
    with running:
        try:
            if "--watch" in words:
                assert running.stdout is not None
                shown = running.stdout.readline()
                running.send_signal(signal.SIGINT)
            else:
                shown, _ = running.communicate(timeout=patience(60))
            assert running.wait(patience(60)) == 0
        finally:
            running.kill()
    assert b"since the start: " in shown
