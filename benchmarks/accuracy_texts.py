"""The documents of the tasks in ``accuracy_tasks``: texts on which ``scripts/tiny`` was not trained, whole and in windows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HELD_OUT = Path(__file__).resolve().parents[1] / "scripts" / "tiny" / "held_out.json"
CONTEXT, TARGET = 120, 60
"""Characters of a window, and of what follows it."""


def write(folder: Path) -> None:
    topics: dict[str, list[str]] = json.loads(HELD_OUT.read_text())
    write_lines(folder / "texts.jsonl", ({"text": text} for texts in topics.values() for text in texts))
    write_lines(folder / "windows.jsonl", (window for texts in topics.values() for window in windows(texts)))


def windows(texts: list[str]) -> Iterator[dict[str, Any]]:
    """Windows of each text of one topic. The choices are how each text goes on at that place, in the order of the texts."""
    for start in range(0, min(map(len, texts)) - CONTEXT - TARGET + 1, TARGET):
        end = start + CONTEXT
        choices = [text[end : end + TARGET] for text in texts]
        for answer, text in enumerate(texts):
            yield {"context": text[start:end], "choices": choices, "answer": answer, "target": choices[answer]}


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
