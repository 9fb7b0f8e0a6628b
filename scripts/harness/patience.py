"""How long tests wait before they consider something hung.

The limits suit an idle machine. ``TEST_PATIENCE`` is the factor for a busy one; ``scripts/patience.sh`` sets it from the load.
"""

from __future__ import annotations

import math
import os

VARIABLE = "TEST_PATIENCE"


def parse_factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 1 <= factor < math.inf:
        raise ValueError(f"{VARIABLE} must be a finite number, 1 or greater, not {text!r}")
    return factor


FACTOR = parse_factor(os.environ.get(VARIABLE, "1"))


def patience(seconds: float) -> float:
    """The limit in seconds on this machine for what may take ``seconds`` on an idle one."""
    return seconds * FACTOR
