"""Compiles probe.cu with nvcc, once for each state of its sources. As a program: prints the path (no GPU is needed)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang_uvm_offload.cuda.build import code_flags, find_nvcc, nvcc_release, runtime_flags
from sglang_uvm_offload.files.cache import private_folder

HERE = Path(__file__).resolve().parent


def build(arch: str = "sm_90") -> Path:
    sources = [HERE / "probe.cu", *sorted((HERE / "probe").glob("*.h"))]
    nvcc = find_nvcc()
    release = nvcc_release(nvcc)
    flags = [*code_flags(arch), *runtime_flags(nvcc, release)]
    texts = [source.read_text() for source in sources]
    key = hashlib.sha256("\0".join([*texts, *flags, str(nvcc), release]).encode()).hexdigest()[:20]
    program = private_folder() / f"probe-{arch}-{key}"
    if program.exists():
        return program
    with tempfile.TemporaryDirectory(dir=program.parent) as work:
        made = Path(work) / "probe"
        answer = subprocess.run(
            [str(nvcc), *flags, "-o", str(made), str(sources[0])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if answer.returncode != 0:
            raise SystemExit(f"nvcc could not compile probe.cu:\n{answer.stdout}")
        os.replace(made, program)
    return program


if __name__ == "__main__":
    print(build(*sys.argv[1:]))
