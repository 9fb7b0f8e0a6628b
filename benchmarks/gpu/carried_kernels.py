"""Lets the SGLang that ``scripts/gpu_bundle.sh`` carries find kernels that were compiled on another machine.

SGLang 0.5.23 looks for a compiled kernel by its own sources, and by the host's compiler and the headers of the system and of
CUDA too (``sglang/kernels/jit/utils/compile/cache.py``), which are others where the kernel was compiled. Those may differ here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

OF_THE_MACHINE = ("sys", "toolkit")
"""What SGLang calls the system's and CUDA's headers in the list that lies beside a kernel."""


def serve(cache: Any) -> None:
    """``cache`` is SGLang's module: its ``find_prebuilt`` then also takes a kernel of the same name and the same sources."""
    here = cache.find_prebuilt

    def find_prebuilt(*, scope: Path, module_name: str) -> Path | None:
        found: Path | None = here(scope=scope, module_name=module_name)
        carried = (each for each in sorted(scope.parent.glob(f"*/*/{module_name}.so")) if of_these_sources(cache, each.parent))
        return found or next(carried, None)

    cache.find_prebuilt = find_prebuilt


def of_these_sources(cache: Any, folder: Path) -> bool:
    """Whether every source of the kernel in ``folder`` is here and is the same."""
    sources = [each for each in cache._read_deps(folder) or () if each.root not in OF_THE_MACHINE]
    current, changed = cache._refresh(sources)
    return bool(sources) and current is not None and not changed
