"""Arms one fault in a scheduler of a real server: at load, or before a step of the target model. Installed by a plugin of
SGLang's own kind (``builders.plugins.saboteur``)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from faults.arming import ACTIONS

TOLD = "A fault is armed: "


def install(job: dict[str, Any]) -> None:
    """``job``: as ``faults.arming`` has it, with ``rank``, and ``at``: "load", or the number of steps before."""
    from sglang_uvm_offload.residency.manager import OffloadManager

    name = "begin_model" if job["at"] == "load" else "begin_step"
    original, steps = getattr(OffloadManager, name), 0

    def armed(manager: OffloadManager, *arguments: Any, **more: Any) -> Any:
        nonlocal steps
        if steps == (0 if job["at"] == "load" else job["at"]) and rank() == job["rank"]:
            print(TOLD + job["action"], flush=True)
            saved = manager.config.save_profile or manager.config.trace
            target = SimpleNamespace(profile_path=Path(saved or "none"), hung=False, experts=None)
            ACTIONS[job["action"]](job, target, {})  # type: ignore[arg-type]
        steps += 1
        return original(manager, *arguments, **more)

    setattr(OffloadManager, name, armed)


def rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def code(tests: Path, job: dict[str, Any]) -> str:
    """What the plugin runs in every process of the server."""
    return (
        "if multiprocessing.parent_process() is not None and 'sglang.srt.managers.scheduler' in sys.modules:\n"
        f"    sys.path.append({str(tests)!r})\n"
        "    from faults.served import install\n"
        f"    install({job!r})\n"
    )
