"""The ``doctor`` command: checks this machine, its driver, this SGLang and a model without starting a server."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution, entry_points, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from sglang_uvm_offload.config import AUTO, parse
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, read_folder
from sglang_uvm_offload.units import size

PACKAGE = "sglang-uvm-offload"
PLUGIN = "uvm_offload"


@dataclass
class Diagnosis:
    """Lines of output in order, each good or bad; ``problems`` are the bad ones."""

    lines: list[tuple[bool, str]] = field(default_factory=list)

    def good(self, text: str) -> None:
        self.lines.append((True, text))

    def bad(self, *texts: str) -> None:
        self.lines += [(False, text) for text in texts]

    @property
    def problems(self) -> list[str]:
        return [text for fine, text in self.lines if not fine]

    def __str__(self) -> str:
        return "\n".join(f"  {'ok     ' if fine else 'PROBLEM'}  {text}" for fine, text in self.lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``doctor``."""
    parser.add_argument("--model-path", help="a model to check too")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if PyTorch sees a GPU")
    parser.add_argument("--num-resident", default="1", help="the --expert-offload-num-resident to check (default 1)")
    parser.add_argument("--trust-remote-code", action="store_true", help="as for SGLang")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis. Returns 0 if everything is ready to serve, else 1."""
    device = args.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            print("PyTorch sees no GPU here; checking --device cpu. `doctor --device cuda` shows why.")
    diagnosis = examine(args.model_path, device, args.num_resident, args.trust_remote_code)
    print(diagnosis)
    if diagnosis.problems:
        print(f"cannot serve with --device {device}: {len(diagnosis.problems)} problem(s)")
        return 1
    print(f"ready to serve with --device {device}")
    return 0


def examine(model_path: str | None, device: str, num_resident: str, trust_remote_code: bool) -> Diagnosis:
    """Check everything for ``device`` ("cuda" or "cpu") and, if given, the model."""
    found = Diagnosis()
    _packages(found)
    _plugin(found)
    if device == "cuda":
        _gpu(found)
    else:
        found.good("device cpu: unified memory is emulated in host memory; for trial, not for speed")
    found.good(f"host RAM available to this process: {size(host_available())}")
    from sglang_uvm_offload.plugin import doctor as sglang_doctor

    if problems := sglang_doctor.hook_problems():
        found.bad(*problems)
    else:
        found.good("SGLang has every hook point")
    damage = [] if model_path is None else _damage(Path(model_path))
    found.bad(*damage)
    try:
        config = parse({"num_resident": num_resident})
        if model_path is not None:
            config = sglang_doctor.launched(model_path, device, num_resident, trust_remote_code)
    except FlagError as error:
        found.bad(*error.problems)
        return found
    if config is not None and model_path is not None and not damage:
        which = f"{num_resident}, which is {config.num_resident} here" if num_resident == AUTO else num_resident
        found.good(f"{model_path} can be served with {flag_name('num_resident')} {which}")
    return found


def _damage(model: Path) -> list[str]:
    """Problems of a local checkpoint's weights, which a launch would find only while loading them. Files other than safetensors
    are not checked."""
    try:
        if model.is_file():
            return [f"{model} is a file: give the checkpoint's folder"]
        kinds = {path.suffix for path in model.iterdir()} if model.is_dir() else set()
        if model.is_dir() and (".safetensors" in kinds or not kinds & {".bin", ".pt"}):
            read_folder(model)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    return []


def _packages(found: Diagnosis) -> None:
    for line in requires(PACKAGE) or ():
        requirement = Requirement(line)
        if requirement.marker is not None:  # an extra
            continue
        try:
            have = version(requirement.name)
        except PackageNotFoundError:
            found.bad(f"{requirement.name} is not installed; {PACKAGE} needs {requirement}")
            continue
        if requirement.specifier.contains(have, prereleases=True):
            found.good(f"{requirement.name} {have}")
        else:
            found.bad(f"{requirement.name} {have}: {PACKAGE} is tested with {requirement.specifier}")


def _plugin(found: Diagnosis) -> None:
    names = [entry.name for entry in entry_points(group="sglang.srt.plugins")]
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if PLUGIN not in names:
        found.bad(
            f"SGLang does not see the plugin: {PACKAGE} {distribution(PACKAGE).version} is not installed with its entry point"
        )
    elif allowed and PLUGIN not in allowed:
        found.bad(f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} keeps SGLang from loading {PLUGIN}; add it there")
    else:
        found.good(f"SGLang sees the plugin {PLUGIN}")


def _gpu(found: Diagnosis) -> None:
    from sglang_uvm_offload.cuda.build import BuildFailure, build, find_nvcc
    from sglang_uvm_offload.cuda.canary import canary_problems
    from sglang_uvm_offload.cuda.device import device_arch, device_problems

    if problems := device_problems(0) or canary_problems((0,)):
        found.bad(*problems)
        return
    arch = device_arch(0)
    found.good(f"GPU 0 ({arch}) can keep experts in unified memory")
    try:
        found.good(f"CUDA compiler {find_nvcc()}")
        found.good(f"CUDA library {build(arch)}")
    except BuildFailure as failure:
        found.bad(str(failure))
