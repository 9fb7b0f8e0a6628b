"""What commands print: text of servers, checkpoints and files among it, without their control characters."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from sglang_uvm_offload.files.reading import printable, printable_lines


def say(text: object) -> None:
    """Print to standard output."""
    print(printable_lines(str(text)))


def complain(text: object) -> None:
    """Print to standard error."""
    print(printable_lines(str(text)), file=sys.stderr)


class Frames:
    """Lines on standard output, of which a terminal shows the latest only."""

    def __init__(self) -> None:
        self._height = 0
        """The number of lines in the last frame."""

    def show(self, lines: Sequence[str]) -> None:
        """Draw over the last frame. Lines are cut at the size of the terminal: one that wraps could not be drawn over."""
        columns, rows = shutil.get_terminal_size()
        shown = [printable(line)[: columns - 1] for line in lines[: rows - 1]]
        start = f"\x1b[{self._height}F\x1b[J" if self._height else ""
        print(start + "\n".join(shown), flush=True)
        self._height = len(shown)
