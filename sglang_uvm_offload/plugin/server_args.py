"""SGLang's arguments plus our flags: command line, YAML, ``sglang.Engine`` keywords, pickling, ``/server_info``.

Without one of our flags, arguments are SGLang's own object. With one, they are an ``OffloadServerArgs``, whose class a process
can unpickle without plugins and which loads plugins in a launcher. ``server_args_name`` decides which class is created.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from sglang.srt.arg_groups.arg_utils import NS, A, Arg
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs

from sglang_uvm_offload.flags import ARGUMENTS, PREFIX, FlagError, no_such_flag
from sglang_uvm_offload.plugin import compat, enforce, hooks, roles, server_args_name
from sglang_uvm_offload.plugin.server_config import attach, attach_requested, parsed_flags, requested_of

_NAMESPACE = "exec.expert_offload"
_TARGET = "sglang.srt.server_args.ServerArgs"


def install(add: Callable[[str, Any, HookType], None]) -> None:
    add(_TARGET, _NAME, HookType.REPLACE)
    if "sglang.srt.entrypoints.engine" in sys.modules:
        add("sglang.srt.entrypoints.engine.Engine.server_args_class", _NAME, HookType.REPLACE)
    register_resolution_hook("handle_other_validations")(_check_launch)
    server_args_name.pickle_by_name(_Sglangs.plain)
    _Sglangs.plain.from_cli_args = classmethod(_from_cli_args)
    _Sglangs.plain.add_cli_args = staticmethod(_add_cli_args)


def installed() -> bool:
    """Whether our flags are registered in this process."""
    return hooks.added(_TARGET)


def _resolve_once(self: Any) -> None:
    """Each process calls this before it uses its arguments; only the first call resolves them. In a process that was started to
    launch a server, SGLang loads plugins only afterwards, and in some processes never."""
    hooked = roles.watching()
    if not getattr(self, "_resolution_finished", False):
        load_plugins()
        with _reported(self):
            _attach_flags(self)
    super(OffloadServerArgs, self).resolve_once()
    if requested_of(self) is None:
        return
    if not roles.watching() and compat.loads_plugins():
        enforce.end("sglang-uvm-offload: this process must offload, but the plugin is not loaded or hooked here")
    if not hooked and (role := roles.publishing()) and compat.loads_plugins(role):
        enforce.end("sglang-uvm-offload: this process published arguments before loading plugins; call load_plugins() first")


def _post_init(self: Any) -> None:
    """Watch for ``publish``: a process that creates arguments with a flag may publish them unresolved."""
    if installed():
        roles.watch()
        HookRegistry.apply_hooks()
    super(OffloadServerArgs, self).__post_init__()


def _attach_flags(server_args: Any) -> None:
    requested = parsed_flags(server_args)
    if requested is not None:
        from sglang_uvm_offload.plugin import hook_points  # imported only if offloading is enabled

        hook_points.check()
    attach_requested(server_args, requested)


def _switch(text: str) -> str:
    """Undo YAML, which reads a bare ``off`` as false; SGLang passes it on as the word."""
    return {"true": "on", "false": "off"}.get(text, text)


def _fields(namespace: dict[str, Any]) -> None:
    namespace["__annotations__"] = {}
    for name, argument in ARGUMENTS.items():
        choices = argument.kind.choices
        kind: Any = Literal[choices] if choices else argument.kind.parser
        kind = kind if argument.default is not None else kind | None
        parser = {"type_parser": _switch} if "off" in (choices or ()) else {}
        help = argument.help.replace("%", "%%")
        namespace["__annotations__"][PREFIX + name] = A[kind, Arg(help=help, **parser), NS(_NAMESPACE)]
        namespace[PREFIX + name] = argument.default


def _add_cli_args(parser: Any) -> None:
    """Require our flags to be spelled out: a misspelt one ends the command with one line. SGLang's parser reports other unknown
    flags as usual, after its whole usage text."""
    _Sglangs.add_cli_args(parser)
    if not isinstance(parser, argparse.ArgumentParser):  # an argument group
        return
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None, **more: Any) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        if wrong := [line for word in words if (line := no_such_flag(str(word), parser._option_string_actions))]:
            parser.exit(2, "".join(f"{parser.prog}: error: {line}\n" for line in wrong))
        return parse(words, namespace, **more)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _ours(namespace: dict[str, Any]) -> None:
    _fields(namespace)
    namespace.update(
        __module__=__name__,
        __doc__="SGLang's ServerArgs with ``flags.ARGUMENTS``.",
        __post_init__=_post_init,
        resolve_once=_resolve_once,
    )


OffloadServerArgs: Any = types.new_class("OffloadServerArgs", (ServerArgs,), {"dict": True}, _ours)


class _Sglangs:
    """SGLang's own class and methods. SGLang rebinds its names in every module, including this one, but not in a class."""

    plain = ServerArgs
    from_cli_args = ServerArgs.from_cli_args.__func__
    add_cli_args = staticmethod(ServerArgs.add_cli_args)


_DEFAULTS = {PREFIX + name: argument.default for name, argument in ARGUMENTS.items()}
_NAME = server_args_name.standing_for(ServerArgs, OffloadServerArgs, _fields, _DEFAULTS)


def _from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
    made = _Sglangs.from_cli_args(_NAME if cls is _Sglangs.plain else cls, args)
    if isinstance(made, OffloadServerArgs):
        made._from_command_line = True
    return made


def _check_launch(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check the launch against this SGLang and this model, before SGLang spawns or loads anything."""
    previous(server_args)
    if not isinstance(server_args, OffloadServerArgs) and any(name.startswith(PREFIX) for name in vars(server_args)):
        _attach_flags(server_args)  # set as attributes, on arguments possibly created before our flags existed
    requested = requested_of(server_args)
    enforce.mark_children(requested is not None)
    if requested is None:
        return
    roles.watch()
    HookRegistry.apply_hooks()
    from sglang_uvm_offload.plugin.checks import launch_checks  # imported only if offloading is enabled

    with _reported(server_args):
        if reason := hooks.missing():
            raise FlagError([f"sglang-uvm-offload {reason}"])
        checked = launch_checks.check(requested, server_args)
    attach(server_args, checked.config)
    declare_resolution(server_args, "sglang-uvm-offload", **checked.settings)


@contextmanager
def _reported(server_args: Any) -> Iterator[None]:
    """End a command on a ``FlagError`` as argparse would. Callers of ``sglang.Engine`` get the exception."""
    try:
        yield
    except FlagError as error:
        if not getattr(server_args, "_from_command_line", False):
            raise
        print(f"{sys.argv[0]}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
