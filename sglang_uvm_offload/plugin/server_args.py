"""SGLang's arguments plus our flags: command line, YAML, ``sglang.Engine`` keywords, pickling, ``/server_info``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from sglang.srt.arg_groups.arg_utils import NS, A, Arg
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs as PlainServerArgs

from sglang_uvm_offload.flags import PREFIX, FlagError, OffloadFlags
from sglang_uvm_offload.plugin import compat, enforce, hooks, roles
from sglang_uvm_offload.plugin.server_config import attach, attach_requested, parsed_flags, requested_of

_NAMESPACE = "exec.expert_offload"


_PLAIN = "sglang.srt.server_args.ServerArgs"


def install(add: Callable[[str, Any, HookType], None]) -> None:
    add(_PLAIN, OffloadServerArgs, HookType.REPLACE)
    if "sglang.srt.entrypoints.engine" in sys.modules:
        add("sglang.srt.entrypoints.engine.Engine.server_args_class", OffloadServerArgs, HookType.REPLACE)
    compat.add_launch_check(_check_launch, add)


def installed() -> bool:
    """Whether this process has our flags."""
    return hooks.added(_PLAIN)


class _Methods:
    """The overrides of ``OffloadServerArgs``. ``super(OffloadServerArgs, ...)`` names the class to resolve it late: SGLang
    rebinds every name of the replaced class, also here."""

    def resolve_once(self) -> None:
        """Each process calls this before it uses its arguments; only the first call resolves them. Some processes load no
        plugins."""
        if not getattr(self, "_resolution_finished", False):
            with _reported(self):
                requested = parsed_flags(self)
                if requested is not None:
                    from sglang_uvm_offload.plugin import hook_points  # imported only if offloading is on

                    hook_points.check()
                attach_requested(self, requested)
        super(OffloadServerArgs, self).resolve_once()  # type: ignore[misc]
        if requested_of(self) is not None and not roles.watching() and compat.loads_plugins():
            enforce.end("sglang-uvm-offload: this process must offload, but the plugin is not loaded or not hooked in it")

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        _plain_add_cli_args(parser)
        for action in parser._actions:
            if action.dest.startswith(PREFIX) and "off" in (action.choices or ()):
                action.type = _switch

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        with compat.unresolved():
            made = super(OffloadServerArgs, cls).from_cli_args(args)  # type: ignore[misc]
        made._from_command_line = True
        compat.resolve_if_made_so(made)
        return made


_plain_add_cli_args = PlainServerArgs.add_cli_args


def _switch(text: str) -> str:
    """YAML reads a plain ``off`` as false, which SGLang passes on as the word."""
    return {"true": "on", "false": "off"}.get(text, text)


def _fields(namespace: dict[str, Any]) -> None:
    namespace["__module__"] = __name__
    namespace["__doc__"] = "SGLang's ServerArgs with the flags of ``flags.OffloadFlags``."
    namespace["__annotations__"] = {}
    for f in dataclasses.fields(OffloadFlags):
        choices = f.metadata["choices"]
        kind = Literal[choices] if choices else f.metadata["kind"]
        kind = kind if f.default is not None else kind | None
        help = f.metadata["help"].replace("%", "%%")
        namespace["__annotations__"][PREFIX + f.name] = A[kind, Arg(help=help), NS(_NAMESPACE)]
        namespace[PREFIX + f.name] = f.default
    for name, value in vars(_Methods).items():
        if name in ("resolve_once", "add_cli_args", "from_cli_args"):
            namespace[name] = value


OffloadServerArgs = compat.derived("OffloadServerArgs", _fields)


def _check_launch(server_args: Any, previous: Callable[[Any], None]) -> None:
    """The last checks before SGLang spawns or loads anything, against this SGLang and this model."""
    previous(server_args)
    requested = requested_of(server_args)
    enforce.mark_children(requested is not None)
    if requested is None:
        return
    roles.watch()
    HookRegistry.apply_hooks()
    from sglang_uvm_offload.plugin import whose_error
    from sglang_uvm_offload.plugin.checks import launch_checks  # imported only if offloading is on

    with _reported(server_args):
        if reason := hooks.missing():
            raise FlagError([f"sglang-uvm-offload {reason}"])
        with whose_error.own_errors_reported(server_args.model_path):
            checked = launch_checks.check(requested, server_args)
    attach(server_args, checked.config)
    compat.declare_resolution(server_args, "sglang-uvm-offload", **checked.settings)


@contextmanager
def _reported(server_args: Any) -> Iterator[None]:
    """A ``FlagError`` ends a command like an argparse error. Callers of ``sglang.Engine`` get the exception."""
    try:
        yield
    except FlagError as error:
        if not getattr(server_args, "_from_command_line", False):
            raise
        print(f"{sys.argv[0]}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
