"""What ``pip install`` puts on a machine: the package, its CUDA source, the command, and the plugin's entry point. They work
outside the checkout, and ``pip uninstall`` takes them away."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
from builders.managers import Rank, config
from builders.profiles import saved, some
from builders.traces import trace as made_trace
from builders.wheels import ROOT, Installed, tracked

from sglang_uvm_offload import __version__

CONFIG = ROOT / "tests/fixtures/models/glm-4.5-air.json"
FOUND = """
import json
from importlib.metadata import entry_points
import sglang_uvm_offload
from sglang_uvm_offload.cuda import build
plugins = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "uvm_offload"]
print(json.dumps([sglang_uvm_offload.__file__, [e.load().__code__.co_filename for e in plugins], str(build.find_source())]))
"""


@pytest.fixture(scope="module")
def content(wheel: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel)


def test_the_wheel_holds_every_module_and_the_cuda_source(content):
    expected = {name for name in tracked() if name.startswith("sglang_uvm_offload/")}
    assert expected <= set(content.namelist())
    assert content.read("sglang_uvm_offload/kernels/uvm_ops.cu") == (ROOT / "kernels" / "uvm_ops.cu").read_bytes()


def test_the_wheel_leaves_tests_and_scripts_at_home(content):
    tops = {name.split("/")[0] for name in content.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sglang_uvm_offload"}


# ---- installed, outside the checkout ----


@pytest.mark.slow
def test_what_python_finds_is_what_was_installed(installed: Installed):
    done = installed.run("python", "-c", FOUND)
    assert done.returncode == 0, done.stderr
    package, plugins, source = json.loads(done.stdout.splitlines()[-1])
    assert Path(package).parent == installed.site / "sglang_uvm_offload"
    assert [Path(plugin).parents[2] for plugin in plugins] == [installed.site], "one plugin, of the wheel"
    assert Path(source) == installed.site / "sglang_uvm_offload/kernels/uvm_ops.cu"
    assert Path(source).read_bytes() == (ROOT / "kernels/uvm_ops.cu").read_bytes()


@pytest.fixture(scope="module")
def inputs(installed: Installed) -> None:
    """Files that the commands below name."""
    shutil.copy(CONFIG, installed.outside / "config.json")
    saved(installed.outside / "p.npz", some())
    made_trace([0, 2, 2], [2, 2, 1, 2]).save(installed.outside / "t.npz")
    (installed.outside / "info.json").write_text(
        json.dumps({"internal_states": [{"expert_offload": Rank(config()).status()}], "model_path": "m"})
    )


@pytest.mark.slow
@pytest.mark.usefixtures("inputs")
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("--version", __version__),
        ("--help", "doctor"),
        ("plan config.json --machine 4x4090", "It fits: VRAM for "),
        ("profile p.npz --out q.npz", "3 MoE layers of 8 experts"),
        ("replay t.npz --residency 0.5 --policy lru", "lru"),
        ("report info.json --out page.html", "page.html"),
    ],
)
def test_the_command_works(installed: Installed, command: str, shown: str):
    done = installed.run("sglang-uvm-offload", *command.split())
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout + done.stderr


@pytest.mark.slow
def test_what_is_uninstalled_is_gone(wheel: Path, tmp_path: Path):
    mine = Installed(wheel, tmp_path)
    assert (mine.folder / "bin/sglang-uvm-offload").exists()
    mine.base.unlink()  # so that nothing outside this environment can be meant
    mine.pip("uninstall", "--yes", "sglang-uvm-offload")
    assert [path for path in mine.folder.rglob("*") if "uvm" in path.name] == []
