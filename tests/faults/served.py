"""Arms faults in the schedulers of a real server: at load, or before a step of the target model. Installed by a plugin of
SGLang's own kind (``builders.plugins.saboteur``)."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from faults.arming import ACTIONS

ARMED, STRUCK = "A fault is armed: ", "A fault struck: "
"""How what the log says of them begins."""


class Told(dict[str, Any]):
    """What became of a fault; the first time that it strikes, it says so."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "injected" and name not in self:
            print(STRUCK + self.what, flush=True)
        super().__setitem__(name, value)


def install(job: dict[str, Any]) -> None:
    """``job``: as ``faults.arming`` has it, with ``rank``, and ``at``: "load", or the number of steps before; or ``after``: the
    seconds since the first step. ``what`` is for the log."""
    from sglang_uvm_offload.residency.manager import OffloadManager

    at = job.get("at")
    name = "begin_model" if at == "load" else "begin_step"
    original, steps, begun, armed = getattr(OffloadManager, name), 0, None, False

    def arming(manager: OffloadManager, *arguments: Any, **more: Any) -> Any:
        nonlocal steps, begun, armed
        begun = begun or time.monotonic()
        due = time.monotonic() - begun >= job["after"] if "after" in job else at in ("load", steps)
        if due and not armed and rank() == job["rank"]:
            armed = True
            what = job.get("what", job["action"])
            print(ARMED + what, flush=True)
            saved = manager.config.save_profile or manager.config.trace
            target = SimpleNamespace(profile_path=Path(saved or "none"), hung=False, experts=None)
            ACTIONS[job["action"]](job, target, Told(what))  # type: ignore[arg-type]
        steps += 1
        return original(manager, *arguments, **more)

    setattr(OffloadManager, name, arming)


def rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def code(tests: Path, *jobs: dict[str, Any]) -> str:
    """What the plugin runs in every process of the server."""
    return (
        "if multiprocessing.parent_process() is not None and 'sglang.srt.managers.scheduler' in sys.modules:\n"
        f"    sys.path.append({str(tests)!r})\n"
        "    from faults.served import install\n"
        f"    for job in {jobs!r}:\n"
        "        install(job)\n"
    )
