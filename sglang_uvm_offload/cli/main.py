"""The ``sglang-uvm-offload`` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from sglang_uvm_offload import __version__

SUBCOMMANDS = {
    "doctor": "check this machine, SGLang and a model, and list what is missing",
    "plan": "predict whether a model fits a machine, with how many residents, and how fast",
    "replay": "replay a routing trace through the shipped policy and baselines",
    "report": "write an HTML report with charts from a server's statistics or a replay",
    "profile": "show saved routing profiles, and merge them",
}
"""Each is a module of this package with ``add_arguments`` and ``run``."""


class Subcommand(argparse.ArgumentParser):
    """Imports its module only when it is selected."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        command = importlib.import_module(f"sglang_uvm_offload.cli.{self.prog.split()[-1]}")
        command.add_arguments(self)
        self.set_defaults(run=command.run)
        return super().parse_known_args(args, namespace)


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns its exit code: 0 for success, 1 for a negative result, 2 for errors."""
    parser = argparse.ArgumentParser(prog="sglang-uvm-offload", description="Tools for serving with offloaded experts.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Subcommand)
    for name, help in SUBCOMMANDS.items():
        commands.add_parser(name, help=help)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
