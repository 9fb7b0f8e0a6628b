"""Builds a model from its config.json with SGLang's own class, without weights, memory or a GPU, and prints its shape:
``python -m sglang_uvm_offload.plugin.meta.program FOLDER...``.

It runs as a separate process, because its patches to SGLang and to SGLang's view of the machine would break a server.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from sglang_uvm_offload.plan.safetensors_header import NoExperts

MORE_MEMORY = 8 << 30
"""Address space for building, beyond what the imported SGLang uses. A model takes some megabytes."""


def main() -> None:
    """Print one line of JSON per folder on the command line: a ``ModelShape``, ``dense`` for a model without experts, or the
    ``error`` that SGLang raised while building. A folder holds a model's configuration and the arguments of ``ModelConfig``
    (``arguments.json``). Library output goes to standard error."""
    out = os.dup(1)
    os.dup2(2, 1)
    gc.disable()  # the imports create millions of objects and free none: collecting would take a quarter of the time
    _prepare_environment()
    from sglang_uvm_offload.plugin.meta import build

    build.start()
    _limit_memory()
    with os.fdopen(out, "wb") as file:
        for folder in map(Path, sys.argv[1:]):
            try:
                given = json.loads((folder / "arguments.json").read_text())
                line = msgspec.json.encode(build.described(folder, **given), order="deterministic")
            except NoExperts as dense:
                line = msgspec.json.encode({"dense": str(dense)})
            except Exception as error:  # noqa: BLE001 -- a model's class may raise anything
                line = msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})
            file.write(line + b"\n")
            gc.collect()
    sys.stderr.flush()
    os._exit(0)  # skip SGLang's shutdown


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _prepare_environment() -> None:
    """Hide GPUs, the network and SGLang's settings, and defer the import of model files. Call this before importing SGLang.
    SGLang sets some of these variables itself for a launch's GPUs; the shape must not depend on the environment."""
    spec = find_spec("sglang")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    models = [file.stem for folder in folders for file in Path(folder, "srt", "models").glob("*.py")]
    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        del os.environ[name]
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", SGLANG_DISABLED_MODEL_ARCHS=",".join(models))


if __name__ == "__main__":
    main()
