"""A program that builds a model from its config.json with SGLang's own class, without weights, memory or a GPU, and prints its
shape: ``python -m sglang_uvm_offload.plugin.meta.program FOLDER...``.

It runs as a separate process, because its changes to SGLang, and to what SGLang sees of the machine, would break a server.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """For each folder on the command line, print one line of JSON: the shape of its model, or the ``error`` with which SGLang
    fails to build it. Output of libraries goes to standard error."""
    out = os.dup(1)
    os.dup2(2, 1)
    _prepare_environment()
    from sglang_uvm_offload.plugin.meta import build

    build.start()
    with os.fdopen(out, "w") as file:
        for folder in sys.argv[1:]:
            try:
                shape = build.described(Path(folder))
            except Exception as error:  # noqa: BLE001 -- a model's class may raise anything
                shape = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(shape), file=file)
    sys.stderr.flush()
    os._exit(0)  # skip SGLang's shutdown


def _prepare_environment() -> None:
    """Call this before SGLang is imported: hides GPUs and the network, and defers the import of model files."""
    spec = find_spec("sglang")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    models = [file.stem for folder in folders for file in Path(folder, "srt", "models").glob("*.py")]
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", SGLANG_DISABLED_MODEL_ARCHS=",".join(models))


if __name__ == "__main__":
    main()
