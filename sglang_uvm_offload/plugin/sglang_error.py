"""Formats an exception of SGLang's as one line. For one without a text (a bare ``assert``), shows the source line and the flags
that it depends on."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sglang

from sglang_uvm_offload.plugin.compat import resolving_view

_ROOT = Path(sglang.__file__).parents[1]


def described(error: Exception, server_args: Any) -> str:
    """Type and text. Without a text, the statement that raised, and the flags that it and its enclosing conditions read."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    return f"{kind}: {text}" if text else f"{kind} at {_raised(error, server_args)}"


def _raised(error: Exception, server_args: Any) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_ROOT / "sglang")] or list(frames)
    if not own or not own[-1].lineno:
        return "no line of source"
    file, line = Path(own[-1].filename), own[-1].lineno
    shown = file.relative_to(_ROOT) if file.is_relative_to(_ROOT) else file
    try:
        read = list(_around(ast.parse(file.read_text()), line))
    except (OSError, SyntaxError, ValueError):
        return f"{shown}:{line}: {own[-1].line}"
    code = " ".join(ast.unparse(_head(read[-1])).split()) if read else own[-1].line
    around = {name for node in read[:-1] for name in _names(_head(node))}
    flags = [
        *_flags({name for node in read[-1:] for name in _names(_head(node))}, server_args),
        *(flag for flag in _flags(around, server_args) if not flag.startswith("no ")),
    ]
    return f"{shown}:{line}: {code}" + (f" (here: {', '.join(dict.fromkeys(flags))})" if flags else "")


def _around(tree: ast.AST, line: int) -> Iterator[ast.stmt]:
    """The conditions around the statement at ``line``, outermost first, then the statement."""
    spanning = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    spanning.sort(key=lambda node: ((node.end_lineno or node.lineno) - node.lineno, -node.col_offset), reverse=True)
    yield from (node for node in spanning[:-1] if isinstance(node, (ast.If, ast.While)))
    yield from spanning[-1:]


def _head(node: ast.stmt) -> ast.AST:
    """The condition of a statement with a body, else the statement."""
    return node.test if isinstance(node, (ast.If, ast.While)) else node


def _names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Name):
            yield part.id


def _flags(names: set[str], server_args: Any) -> list[str]:
    """Those of ``names`` that are SGLang's arguments, as flags with their values."""
    cfg, fields = resolving_view(server_args), sorted(names & _fields(server_args))
    return [_flag(name, getattr(cfg, name, None)) for name in fields]


def _fields(server_args: Any) -> set[str]:
    return {name for base in type(server_args).__mro__ for name in vars(base).get("__annotations__", ())}


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}" if value not in (None, False) else f"no {flag}"
