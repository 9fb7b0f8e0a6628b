"""A program that builds a model from its config.json by SGLang's own class, without weights, memory or a GPU, and prints its
shape: ``python -m sglang_uvm_offload.plugin.meta.program FOLDER...``.

It is a process of its own: what it does to SGLang, and to what SGLang sees of the machine, would not suit a server.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Print the shape of the model in each folder that the command line names, a JSON object a line: its shape, or the
    ``error`` with which SGLang does not build it. What libraries print goes to standard error."""
    out = os.dup(1)
    os.dup2(2, 1)
    _prepare_environment()
    from sglang_uvm_offload.plugin.meta import build

    build.start()
    with os.fdopen(out, "w") as file:
        for folder in sys.argv[1:]:
            try:
                shape = build.described(Path(folder))
            except Exception as error:  # noqa: BLE001 -- whatever a model's class raises is why it is not built
                shape = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(shape), file=file)
    sys.stderr.flush()
    os._exit(0)  # nothing of SGLang is to be ended in order


def _prepare_environment() -> None:
    """Before SGLang is imported: no GPU, no network, and none of its models, which are imported when they are built."""
    spec = find_spec("sglang")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    models = [file.stem for folder in folders for file in Path(folder, "srt", "models").glob("*.py")]
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", SGLANG_DISABLED_MODEL_ARCHS=",".join(models))


if __name__ == "__main__":
    main()
