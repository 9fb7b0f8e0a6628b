"""Arms faults in the schedulers of a real server: at load, before a step of the target model, or before a call. Installed by a
plugin of SGLang's own kind (``builders.plugins.saboteur``)."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from faults.arming import ACTIONS, found

ARMED, STRUCK = "A fault is armed: ", "A fault struck: "
"""How what the log says of them begins."""
MANAGER = "sglang_uvm_offload.residency.manager:OffloadManager"
LOAD, STEP = f"{MANAGER}.begin_model", f"{MANAGER}.begin_step"


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
    """``job``: as ``faults.arming`` has it, with ``rank``, and ``at``: "load", the number of steps before, or a method, before
    its first call ("module:Class.method"); or ``after``: the seconds since the first step. ``what`` is for the log."""
    at = job.get("at", 0)
    owner, name = found(LOAD if at == "load" else STEP if isinstance(at, int) else at)
    original, calls, begun, armed = getattr(owner, name), 0, 0.0, False

    def arming(self: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal calls, begun, armed
        begun = begun or time.monotonic()
        due = calls >= at if isinstance(at, int) else True
        if due and time.monotonic() - begun >= job.get("after", 0.0) and not armed and rank() == job["rank"]:
            armed = True
            what = job.get("what", job["action"])
            print(ARMED + what, flush=True)
            config = getattr(self, "config", None)
            saved = None if config is None else config.save_profile or config.trace
            experts = next(iter(getattr(self, "models", ())), None)
            target = SimpleNamespace(profile_path=Path(saved or "none"), hung=False, experts=experts)
            ACTIONS[job["action"]](job, target, Told(what))  # type: ignore[arg-type]
        calls += 1
        return original(self, *arguments, **more)

    setattr(owner, name, arming)


def rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def code(tests: Path, *jobs: dict[str, Any], witness: bool = False) -> str:
    """What the plugin runs in every process of the server. ``witness``: whether the scheduler looks at its experts too."""
    look = "    from faults import witness\n    witness.install()\n" if witness else ""
    return (
        "if multiprocessing.parent_process() is not None and 'sglang.srt.managers.scheduler' in sys.modules:\n"
        f"    sys.path.append({str(tests)!r})\n"
        f"{look}"
        "    from faults.served import install\n"
        f"    for job in {jobs!r}:\n"
        "        install(job)\n"
    )
