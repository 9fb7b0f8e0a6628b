"""The limits that catch hangs grow by one factor, all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.harness import patience

ROOT = Path(__file__).parents[2]


def test_a_factor_scales_limits(monkeypatch):
    monkeypatch.setattr(patience, "FACTOR", patience.parse_factor("2.5"))
    assert patience.patience(300) == 750


@pytest.mark.parametrize("text", ["", "much", "0.5", "-2", "nan", "inf"])
def test_a_wrong_factor_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"TEST_PATIENCE must be a finite number, 1 or greater, not {text!r}")):
        patience.parse_factor(text)


def bare(node: ast.expr) -> bool:
    """A number of a second or more. Shorter ones are intervals, or make a race."""
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value >= 1


def unscaled(source: str) -> Iterator[int]:
    """The lines with a limit that is a bare number."""
    for node in ast.walk(ast.parse(source)):
        limits: list[ast.expr] = []
        if isinstance(node, ast.Call):
            limits = [keyword.value for keyword in node.keywords if keyword.arg in ("timeout", "seconds")]
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("wait", "join", "result", "alarm"):
                limits += node.args
        elif isinstance(node, ast.BinOp) and ast.unparse(node.left) == "time.monotonic()":
            limits = [node.right]
        yield from (limit.lineno for limit in limits if bare(limit))


@pytest.mark.slow
def test_every_limit_of_the_tests_is_scaled():
    paths = [path for folder in ("tests", "scripts/harness") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in unscaled(path.read_text())]
