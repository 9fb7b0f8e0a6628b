"""What ``pip install`` puts on a machine: the package, its CUDA source, the command, and the plugin's entry point."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source = tmp_path_factory.mktemp("source")
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_module_and_the_cuda_source(wheel):
    expected = {name for name in tracked() if name.startswith("sglang_uvm_offload/")}
    assert expected <= set(wheel.namelist())
    assert wheel.read("sglang_uvm_offload/kernels/uvm_ops.cu") == (ROOT / "kernels" / "uvm_ops.cu").read_bytes()


def test_the_wheel_registers_one_plugin_and_one_command_and_no_platform(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert wheel.read(name).decode().split() == [
        "[console_scripts]",
        "sglang-uvm-offload",
        "=",
        "sglang_uvm_offload.cli.main:main",
        "[sglang.srt.plugins]",
        "uvm_offload",
        "=",
        "sglang_uvm_offload.plugin:register",
    ]


def test_the_wheel_leaves_tests_and_scripts_at_home(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sglang_uvm_offload"}
