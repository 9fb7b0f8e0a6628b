"""What commands print: text of servers, checkpoints and files among it, without their control characters."""

from __future__ import annotations

import sys

from sglang_uvm_offload.files.reading import printable_lines


def say(text: object) -> None:
    """On standard output."""
    print(printable_lines(str(text)))


def complain(text: object) -> None:
    """On standard error."""
    print(printable_lines(str(text)), file=sys.stderr)
