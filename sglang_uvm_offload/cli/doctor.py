"""The ``doctor`` command checks this machine, its driver, SGLang and a launch, without starting a server."""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from sglang_uvm_offload.cli.terminal import complain, say
from sglang_uvm_offload.files.kinds import NO_GGUF, kind_of
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.units import size

PACKAGE = "sglang-uvm-offload"
PLUGIN = "uvm_offload"
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
"""The environment variable that makes SGLang use its kernels for CPUs."""
CPU_GUIDE = "https://docs.sglang.io/docs/hardware-platforms/cpu_server"

OK, WARNING, PROBLEM = "ok", "WARNING", "PROBLEM"


@dataclass
class Diagnosis:
    """The lines to print, in order, as ``(kind, text)``. Only ``problems`` prevent a launch."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def good(self, text: str) -> None:
        self.lines.append((OK, text))

    def warn(self, text: str) -> None:
        self.lines.append((WARNING, text))

    def bad(self, *texts: str) -> None:
        """Add problems. One that two checks find is listed once."""
        self.lines += [(PROBLEM, text) for text in dict.fromkeys(texts) if (PROBLEM, text) not in self.lines]

    @property
    def problems(self) -> list[str]:
        return [text for kind, text in self.lines if kind == PROBLEM]

    def __str__(self) -> str:
        return "\n".join(f"  {kind:7}  {text}" for kind, text in self.lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``doctor``."""
    parser.usage = f"{parser.prog} [-h] [--device {{auto,cuda,cpu}}] | {parser.prog} -- LAUNCH ARGUMENTS"
    parser.add_argument(
        "launch",
        nargs="*",
        metavar="-- LAUNCH ARGUMENTS",
        help="check a launch with these arguments of sglang.launch_server; without them, check only this machine and SGLang",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        help="the device to check without a launch (default auto: cuda if PyTorch sees a GPU)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis. Returns 0 if a server can start, 1 if it cannot, 2 if the arguments cannot be parsed."""
    if args.launch and args.device:
        complain(f"--device {args.device}: give it after --, as an argument of the launch")
        return 2
    if args.launch:
        return _report(examine_launch(args.launch), "this launch")
    device = args.device or "auto"
    if device == "auto":
        device = "cuda" if _sees_gpu() else "cpu"
        if device == "cpu":
            say("PyTorch sees no GPU here; checking --device cpu. `doctor --device cuda` shows why.")
    return _report(examine(device), f"with --device {device}")


def _report(found: Diagnosis, what: str) -> int:
    say(found)
    if found.problems:
        say(f"cannot serve {what}: {len(found.problems)} problem(s)")
        return 1
    say(f"ready to serve {what}")
    return 0


def examine(device: str) -> Diagnosis:
    """Check this machine and this SGLang for ``device`` ("cuda" or "cpu")."""
    found = Diagnosis()
    _installation(found)
    if device == "cuda":
        from sglang_uvm_offload.cuda.device import visible_gpus

        _gpus(found, list(range(len(visible_gpus()))) or [0])
    else:
        found.good("device cpu: unified memory is emulated in host memory; for testing, not for speed")
        _cpu(found)
    found.good(f"host RAM available to this process: {size(host_available())}")
    return found


def examine_launch(arguments: list[str]) -> Diagnosis:
    """Check the launch with these arguments. Exits with 2 if SGLang cannot parse them."""
    found = Diagnosis()
    if not _installation(found):
        return found
    from sglang_uvm_offload.plugin.dry_launch import Launch

    launch = Launch(arguments)
    model = launch.args.model_path
    if model and (kind := kind_of(Path(model))) and kind.remedy == NO_GGUF:
        found.bad(f"--model-path {model}: this is {kind.what}; {NO_GGUF}")
        return found
    if absent := launch.unreadable_models():
        found.bad(*absent)
        return found
    problems = launch.resolve()
    if gpus := launch.gpus():
        _gpus(found, gpus)
    elif not _sees_gpu():
        if launch.cfg.device is None:
            found.bad("PyTorch sees no GPU here, and SGLang serves on a CPU only with --device cpu")
        if launch.cfg.device in (None, "cpu"):
            _cpu(found)
    found.bad(*launch.damage(), *problems)
    if not found.problems:
        for fact in launch.facts():
            found.good(fact)
        for warning in (*launch.short_pages(), *launch.warnings()):
            found.warn(warning)
    return found


def _installation(found: Diagnosis) -> bool:
    """Check the packages, the plugin and its hooks. Returns whether SGLang can be imported with the plugin."""
    _packages(found)
    _plugin(found)
    try:
        from sglang_uvm_offload.plugin import hook_points
        from sglang_uvm_offload.plugin.dry_launch import hook_problems
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        found.bad(f"the Python package {library} is not installed, so SGLang's hook points cannot be checked")
        return False
    except ImportError as error:
        found.bad(*(hook_points.problems() or [f"cannot hook this SGLang: {' '.join(str(error).split())}"]))
        if _uses_cpu_engine():
            found.bad(f"{CPU_ENGINE}=1 needs SGLang's kernels built for CPUs ({CPU_GUIDE}); those installed are not")
        return False

    if problems := hook_problems():
        found.bad(*problems)
    elif warning := hook_points.untried():
        found.warn(warning)
    else:
        found.good("SGLang has every hook point")
    return True


def _packages(found: Diagnosis) -> None:
    try:
        lines = requires(PACKAGE) or ()
    except PackageNotFoundError:
        found.bad(f"{PACKAGE} is not installed, so SGLang cannot load its plugin: pip install it")
        return
    for line in lines:
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
        found.bad(f"SGLang does not see the plugin: {PACKAGE} is not installed with its entry point")
    elif allowed and PLUGIN not in allowed:
        found.bad(f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} keeps SGLang from loading {PLUGIN}; add it there")
    else:
        found.good(f"SGLang sees the plugin {PLUGIN}")


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _uses_cpu_engine() -> bool:
    return os.environ.get(CPU_ENGINE) == "1"


def _cpu(found: Diagnosis) -> None:
    """Check what SGLang itself needs to serve on a machine without a GPU."""
    if _uses_cpu_engine() or _sees_gpu():
        return
    if importlib.util.find_spec("vllm") is None:
        found.bad(
            "SGLang imports its rotary embedding for this CPU from vllm, which is not installed. It needs vllm, or its own "
            f"kernels built for CPUs with {CPU_ENGINE}=1 ({CPU_GUIDE}). The plugin's scripts/quickstart.sh needs neither"
        )
    else:
        found.good("vllm is installed, from which SGLang imports its rotary embedding for this CPU")


def _gpus(found: Diagnosis, gpus: list[int]) -> None:
    from sglang_uvm_offload.cuda import pci
    from sglang_uvm_offload.cuda.build import BuildFailure, build, find_nvcc
    from sglang_uvm_offload.cuda.canary import canary_problems
    from sglang_uvm_offload.cuda.device import DriverError, device_arch, free_vram, problems_of

    if problems := problems_of(gpus) or canary_problems(tuple(gpus)):
        found.bad(*problems)
        return
    for warning in pci.warnings(pci.bus_ids(gpus)):
        found.warn(warning)
    _link(found, gpus)
    arches = {gpu: device_arch(gpu) for gpu in gpus}
    for gpu, arch in arches.items():
        found.good(f"GPU {gpu} ({arch}) can keep experts in unified memory")
    try:
        found.good(f"CUDA compiler {find_nvcc()}")
        for arch in sorted(set(arches.values())):
            found.good(f"CUDA library {build(arch)}")
        found.good(f"free VRAM on the GPU with the least: {size(min(free_vram(gpus)))}")
    except (BuildFailure, DriverError) as failure:
        found.bad(str(failure))


def _link(found: Diagnosis, gpus: list[int]) -> None:
    """Report the link rates that earlier servers measured, if any."""
    from sglang_uvm_offload.cuda.device import visible_gpus
    from sglang_uvm_offload.cuda.kept_link import kept_link
    from sglang_uvm_offload.plan.measured_link import described, expected_rates

    if (link := kept_link(len(gpus), gpus)) is None:
        return
    found.good(f"the link to host memory: {described(link)}")
    for reason in link.link.why_slow(expected_rates(visible_gpus())[gpus[0]]):
        found.warn(f"reads of offloaded experts are slow: {reason}")
