"""The ``sglang-uvm-offload`` command."""

from __future__ import annotations

import argparse
import sys

from sglang_uvm_offload import __version__, profile_cli, replay_cli, report_cli
from sglang_uvm_offload.planning import planner_cli


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 if the answer is good, 1 if it is not (2: argparse's usage errors)."""
    parser = argparse.ArgumentParser(prog="sglang-uvm-offload", description="Tools beside serving with offloaded experts.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_doctor(commands)
    planning = commands.add_parser("plan", help="say whether a model fits a machine, with how many residents, and how fast")
    planner_cli.add_arguments(planning)
    planning.set_defaults(run=planner_cli.run)
    replaying = commands.add_parser("replay", help="replay a routing trace through the shipped policy and references")
    replay_cli.add_arguments(replaying)
    replaying.set_defaults(run=replay_cli.run)
    reporting = commands.add_parser("report", help="write a page with pictures from a server's statistics or a replay")
    report_cli.add_arguments(reporting)
    reporting.set_defaults(run=report_cli.run)
    profiling = commands.add_parser("profile", help="show saved routing profiles, and merge them")
    profile_cli.add_arguments(profiling)
    profiling.set_defaults(run=profile_cli.run)
    args = parser.parse_args(argv)
    return args.run(args)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser("doctor", help="say whether this machine, SGLang and a model can be served, and why not")
    doctor.add_argument("--model-path", help="a model to check as well")
    doctor.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda where PyTorch sees a GPU")
    doctor.add_argument("--num-resident", default="1", help="the --expert-offload-num-resident to check (default 1)")
    doctor.add_argument("--trust-remote-code", action="store_true", help="as for SGLang")
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    import torch

    from sglang_uvm_offload.doctor import examine

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            print("PyTorch sees no GPU here; checking --device cpu. `doctor --device cuda` says why there is none.")
    diagnosis = examine(args.model_path, device, args.num_resident, args.trust_remote_code)
    print(diagnosis)
    if diagnosis.problems:
        print(f"cannot serve with --device {device}: {len(diagnosis.problems)} problem(s)")
        return 1
    print(f"ready to serve with --device {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
