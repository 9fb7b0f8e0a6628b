"""Whether the local checkpoint that a flag names can be read."""

from __future__ import annotations

import os
import re
import stat

from sglang_uvm_offload import reading


def unreadable(model: str) -> str | None:
    """Why the local model ``model`` cannot be read; None if it can, or if it is the id of a model on a hub."""
    if os.path.isdir(model):
        return _special_file(model)
    if os.path.lexists(model) or not re.match(r"[./~]|[^/:]*/[^/]*/", model):
        return None
    return "there is no such folder"


def _special_file(folder: str) -> str | None:
    try:
        entries = sorted(os.listdir(folder))
    except OSError as error:
        return error.strerror
    for name in entries:
        try:
            mode = os.stat(os.path.join(folder, name)).st_mode
        except OSError:  # such as a link to a file that was not downloaded; what reads it gives the reason
            continue
        if not stat.S_ISDIR(mode) and (kind := reading.special_kind(mode)):
            return f"holds {name}, which is {kind} and not a regular file"
    return None
