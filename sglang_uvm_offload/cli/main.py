"""The ``sglang-uvm-offload`` command."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

from sglang_uvm_offload import __version__
from sglang_uvm_offload.cli.terminal import complain
from sglang_uvm_offload.files.reading import printable_lines

SUBCOMMANDS = {
    "doctor": "check this machine, SGLang and a model, and list what is missing",
    "plan": "predict whether a model fits a machine, with how many residents, and how fast",
    "replay": "replay a routing trace through the shipped policy and baselines",
    "report": "write an HTML report with charts from a server's statistics or a replay",
    "status": "show where a running server's experts are and how they are used, once or every two seconds",
    "profile": "show saved routing profiles, and merge them",
    "run": "run one of SGLang's tools that take the arguments of a launch, such as sglang.compile_deep_gemm",
}
"""Each subcommand is a module of this package with ``add_arguments`` and ``run``."""

OTHERS_NAMES = {
    **dict.fromkeys(("-c", "--ctx-size", "--max-model-len"), "--context-length"),
    **dict.fromkeys(("-np", "--parallel", "--max-running-requests"), "--requests"),
    **dict.fromkeys(("-ctk", "--cache-type-k"), "--kv-cache-dtype"),
    "--expert-offload-num-resident": "--num-resident",
}
"""Names of flags elsewhere, where spelling does not lead to the one of ``plan``."""

INTERRUPTED, PIPE_CLOSED = 130, 141
"""The exit codes that a shell reports for SIGINT and SIGPIPE."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error without the usage, which is longer than a screen, and exit with 2."""
        self.exit(2, f"{self.prog}: error: {printable_lines(message)}\nsee `{self.prog} --help`\n")


class Subcommand(Parser):
    """The parser of one subcommand. It imports the subcommand's module only when the user selects it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        command = importlib.import_module(f"sglang_uvm_offload.cli.{self.prog.split()[-1]}")
        command.add_arguments(self)
        self.set_defaults(run=command.run)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = (
                "; give a launch's arguments after --, as in doctor -- --model-path MODEL"
                if self.prog.endswith(" doctor")
                else ""
            )
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint or self._nearest(unknown)}")
        return found, unknown

    def _nearest(self, unknown: list[str]) -> str:
        """The flag that the first unknown one may stand for, as a question; "" if none is like it."""
        first = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        meant = [OTHERS_NAMES[first]] if OTHERS_NAMES.get(first) in flags else get_close_matches(first, flags, 1)
        return f"; did you mean {meant[0]}?" if meant else ""


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns its exit code: 0 for success, 1 for a negative result, 2 for an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have characters that the terminal cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return _command(argv)
        finally:
            if sys.stdout is not None:  # it is None if the shell closed it
                sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        _drop_output()
        return PIPE_CLOSED
    except ImportError as error:
        return _failed(_missing(error))
    except OSError as error:  # of the output, or of a file that no argument names, such as a library's cache
        _drop_output()
        where = "" if error.filename is None else f"{error.filename}: "
        return _failed(f"{where}{error.strerror or error}")


def _command(argv: list[str] | None) -> int:
    parser = Parser(prog="sglang-uvm-offload", description="Tools for serving with offloaded experts.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Subcommand)
    for name, help in SUBCOMMANDS.items():
        commands.add_parser(name, help=help, allow_abbrev=False)
    args = parser.parse_args(argv)
    return args.run(args)


def _failed(reason: str) -> int:
    complain(f"sglang-uvm-offload: error: {reason}")
    return 2


def _missing(error: ImportError) -> str:
    library = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or library == "sglang_uvm_offload":
        return f"cannot import {error.name or 'a library'}: {error}"
    return (
        f"the Python package {library} is not installed; install sglang-uvm-offload with its dependencies (without --no-deps)"
    )


def _drop_output() -> None:
    """Discard buffered output, so that Python does not fail to flush it at exit."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # ``python -m`` adds the current folder, which may be a downloaded model
        del sys.path[0]
    sys.exit(main())
