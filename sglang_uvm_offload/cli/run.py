"""The ``run`` command: runs one of SGLang's own tools that take the arguments of a launch, with the flags of this plugin."""

from __future__ import annotations

import argparse
import importlib.util
import traceback

from sglang_uvm_offload.cli.terminal import complain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run one of SGLang's tools, such as sglang.compile_deep_gemm, with the flags of this plugin."
    parser.add_argument("module", help="as for python -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the tool")


def run(args: argparse.Namespace) -> int:
    """The tool's own exit code; 1 where it fails with an exception, as of any Python program."""
    if not _exists(args.module):
        return _refused(f"there is no Python module {args.module}")
    from sglang_uvm_offload.plugin import tool

    try:
        tool.load()
    except ValueError as error:
        return _refused(str(error))
    try:
        tool.run(args.module, args.arguments)
    except Exception:  # noqa: BLE001 -- of any type, from the tool
        traceback.print_exc()
        return 1
    return 0


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package above it is missing, or the name is invalid
        return False


def _refused(reason: str) -> int:
    complain(f"sglang-uvm-offload run: error: {reason}")
    return 2
