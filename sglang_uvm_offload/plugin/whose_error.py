"""Tells whose code raised an exception, so that a bug of this plugin does not look like SGLang refusing the model."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from sglang_uvm_offload.flags import FlagError

_PACKAGE = Path(__file__).parents[1]


def raised_here(error: BaseException) -> bool:
    """Whether ``error`` comes from this package: the innermost frame in this package or in SGLang decides, whatever library it
    called."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _PACKAGE in Path(frame.filename).parents:
            return True
        if "sglang" in Path(frame.filename).parts:
            return False
    return False


@contextlib.contextmanager
def own_errors_reported(model: str) -> Iterator[None]:
    """Turn an exception of this package's own code, for a configuration that it cannot read, into a ``FlagError``."""
    try:
        yield
    except FlagError:
        raise
    except Exception as error:
        if not raised_here(error):
            raise
        raise FlagError([_described(error, model)]) from error


def _described(error: Exception, model: str) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    reason = " ".join(str(error).split())
    return (
        f"sglang-uvm-offload cannot read the configuration of {model}: {type(error).__name__} in {Path(frame.filename).name}:"
        f"{frame.lineno}: {reason}; please report it (SGLang has not refused the model)"
    )
