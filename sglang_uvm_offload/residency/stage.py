"""What may change residents now."""

from __future__ import annotations

from enum import Enum, auto


class Stage(Enum):
    """What may change the target's residents. It is the same on all ranks that share experts; a fault is known to its own rank
    alone, so it is no stage."""

    WARM_UP = auto()
    """They are chosen once enough tokens were counted."""
    FOLLOW = auto()
    """They follow the traffic."""
    STAY = auto()
    """They stay until an operator has them chosen."""
    PAUSED = auto()
    """An operator has them stay."""
    ASLEEP = auto()
    """The server has given up its VRAM."""
