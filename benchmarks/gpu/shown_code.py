"""Digests of the code whose behaviour logs show. A claim whose code changed since its log must say so (GPU_STATUS.md).

Comments and spaces do not count. In a CUDA source only the named functions count, with everything of the file that they use.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "kernels/uvm_ops.cu"
PACKAGE = "sglang_uvm_offload"
CODE: dict[str, dict[str, tuple[str, ...]]] = {
    "moves": {KERNELS: ("uvm_allocate", "uvm_place")},
    "populating": {KERNELS: ("uvm_prefer_host", "uvm_populate")},
    "copies": {KERNELS: ("uvm_copy_layer", "uvm_copy_kernel")},
    "copy blocks": {f"{PACKAGE}/memory/staging.py": ()},
    "threshold": {f"{PACKAGE}/plan/streaming.py": ()},
    "counters": {KERNELS: ("uvm_count_routing_kernel",)},
    "slots": {KERNELS: ("uvm_resolve_slots_kernel", "uvm_begin_step_kernel")},
    "brought": {KERNELS: ("uvm_bring_slots_kernel", "uvm_fill_slots_kernel")},
    "read times": {KERNELS: ("uvm_time_reads_kernel",), f"{PACKAGE}/cuda/read_times.py": ()},
    "link": {KERNELS: ("uvm_read_kernel",), f"{PACKAGE}/cuda/link.py": ()},
}
"""Code by the name that claims use: functions of CUDA sources, and whole Python files."""
RECORDED = ROOT / "benchmarks" / "results" / "code.json"
"""Digests by commit, for logs from before logs held digests."""

Read = Callable[[str], str]
"""Returns the text of a file by its path in the repository."""


def digests(read: Read = lambda path: (ROOT / path).read_text()) -> dict[str, str]:
    """Returns the digest of each entry of ``CODE``."""
    return {name: digest(files, read) for name, files in CODE.items()}


def digest(files: dict[str, tuple[str, ...]], read: Read) -> str:
    text = "".join(of_cuda(read(path), names) if names else of_python(read(path)) for path, names in files.items())
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def of_python(text: str) -> str:
    """Returns the text without comments, docstrings and spaces."""
    lines = [list(line) for line in text.splitlines(keepends=True)]

    def blank(begin: tuple[int, int], end: tuple[int, int]) -> None:
        for row in range(begin[0] - 1, end[0]):
            first = begin[1] if row == begin[0] - 1 else 0
            last = end[1] if row == end[0] - 1 else len(lines[row])
            lines[row][first:last] = " " * (last - first)

    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            blank(token.start, token.end)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            row = text.splitlines()[node.end_lineno - 1]  # ``ast`` counts bytes
            blank((node.lineno, node.col_offset), (node.end_lineno, len(row.encode()[: node.end_col_offset].decode())))
    return "".join("".join(map("".join, lines)).split())


def of_cuda(text: str, names: tuple[str, ...]) -> str:
    """Returns the named definitions and everything of the file that they use, in file order."""
    pieces = definitions(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S))
    owners: dict[str, set[int]] = {}
    for number, piece in enumerate(pieces):
        for name in defined_in(piece):
            owners.setdefault(name, set()).add(number)
    wanted, found = [f"{name}(" for name in names], set[int]()
    while wanted:
        for number in owners.get(wanted.pop(), set()) - found:
            found.add(number)
            wanted += used_by(pieces[number])
    return "".join("".join(pieces[number].split()) for number in sorted(found))


def definitions(text: str) -> list[str]:
    """Splits the text at lines that start at the left edge; indented lines belong to the one above."""
    pieces: list[str] = []
    for line in text.splitlines():
        if re.match(r"(namespace|extern \"C\") ?\{|\}\s*$|#|$", line):
            continue
        if re.match(r"\w", line) and not line.startswith(("public", "private")):
            pieces.append("")
        if pieces:
            pieces[-1] += line + "\n"
    return pieces


def defined_in(piece: str) -> set[str]:
    """Returns the names that a piece defines: a type, an enum's members, constants, a variable, or a function as "f("."""
    head = piece.partition("{")[0]
    if found := re.match(r"(?:struct|class|enum class)\s+(\w+)", piece):
        return {found[1]}
    if piece.startswith("enum"):
        return {*re.findall(r"\w+", piece.partition("{")[2])}
    if "=" in head.partition("(")[0]:
        return {*re.findall(r"(\w+)\s*=[^=]", head)}
    if found := re.search(r"\b(?!__)(\w+)\s*\(", re.sub(r"__\w+__\s*\([^)]*\)", "", head)):
        return {f"{found[1]}("}
    return {*re.findall(r"(\w+)(?:\[\w+\])?;", head)}


def used_by(piece: str) -> list[str]:
    """Lists every name in the piece; a called one also as "f("."""
    return [used for name, call in re.findall(r"\b([A-Za-z_]\w*)(\s*\()?", piece) for used in {name, name + call.strip()}]


def has_changed(names: Sequence[str], log: Path, now: dict[str, str]) -> bool:
    """Whether the code of one of ``names`` is different ``now`` than in ``log`` (its JSON), or unknown there."""
    known: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())
    environment = json.loads(log.read_text())["environment"]
    then = environment.get("code") or known.get(environment["commit"], {})
    return any(then.get(name) != now[name] for name in names)
