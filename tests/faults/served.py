"""Arms one fault in a scheduler of a real server: at load, before a step of the target model, or before a call. Installed by a
plugin of SGLang's own kind (``builders.plugins.saboteur``)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from faults.arming import ACTIONS, found

TOLD = "A fault is armed: "
MANAGER = "sglang_uvm_offload.residency.manager:OffloadManager"
LOAD, STEP = f"{MANAGER}.begin_model", f"{MANAGER}.begin_step"


def install(job: dict[str, Any]) -> None:
    """``job``: as ``faults.arming`` has it, with ``rank``, and ``at``: "load", the number of steps before, or a method, before
    its first call ("module:Class.method")."""
    at = job["at"]
    owner, name = found(LOAD if at == "load" else STEP if isinstance(at, int) else at)
    original, calls = getattr(owner, name), 0

    def armed(self: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal calls
        if calls == (at if isinstance(at, int) else 0) and rank() == job["rank"]:
            print(TOLD + job["action"], flush=True)
            config = getattr(self, "config", None)
            saved = None if config is None else config.save_profile or config.trace
            experts = next(iter(getattr(self, "models", ())), None)
            target = SimpleNamespace(profile_path=Path(saved or "none"), hung=False, experts=experts)
            ACTIONS[job["action"]](job, target, {})  # type: ignore[arg-type]
        calls += 1
        return original(self, *arguments, **more)

    setattr(owner, name, armed)


def rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def code(tests: Path, job: dict[str, Any], witness: bool = False) -> str:
    """What the plugin runs in every process of the server. ``witness``: whether the scheduler looks at its experts too."""
    look = "    from faults import witness\n    witness.install()\n" if witness else ""
    return (
        "if multiprocessing.parent_process() is not None and 'sglang.srt.managers.scheduler' in sys.modules:\n"
        f"    sys.path.append({str(tests)!r})\n"
        f"{look}"
        "    from faults.served import install\n"
        f"    install({job!r})\n"
    )
