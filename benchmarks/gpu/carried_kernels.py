"""Lets the SGLang in the bundle of ``scripts/gpu_bundle.sh`` find kernels that were compiled on another machine.

SGLang 0.5.23 identifies a compiled kernel by its sources, the host compiler, and the system's and CUDA's headers
(``sglang/kernels/jit/utils/compile/cache.py``). On another machine all but the sources differ; this module accepts that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

OF_THE_MACHINE = ("sys", "toolkit")
"""SGLang's names for the system's and CUDA's headers in the list beside a kernel."""


def serve(cache: Any) -> None:
    """Patches SGLang's module ``cache``: its ``find_prebuilt`` also accepts a kernel of the same name and sources."""
    here = cache.find_prebuilt

    def find_prebuilt(*, scope: Path, module_name: str) -> Path | None:
        found: Path | None = here(scope=scope, module_name=module_name)
        carried = (each for each in sorted(scope.parent.glob(f"*/*/{module_name}.so")) if of_these_sources(cache, each.parent))
        return found or next(carried, None)

    cache.find_prebuilt = find_prebuilt


def of_these_sources(cache: Any, folder: Path) -> bool:
    """Whether every source of the kernel in ``folder`` exists here unchanged."""
    sources = [each for each in cache._read_deps(folder) or () if each.root not in OF_THE_MACHINE]
    current, changed = cache._refresh(sources)
    return bool(sources) and current is not None and not changed
