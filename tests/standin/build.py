"""Builds the stand-in CUDA: ``python build.py OUT`` (see README.md).

OUT then has libcuda.so.1 (driver, runtime and libraries in one; also linked as libcuda.so and libnvidia-ml.so.1) and
libkernels.so (our kernels compiled for the host).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
SITE = Path(sysconfig.get_paths()["purelib"])
SOURCES = ["record.c", "memory.c", "stream.c", "link.c", "runtime.c", "driver.c", "libraries.c", "symbols.c"]
USERS = ["torch/lib", "torchaudio", "torchvision", "sgl_kernel", "tvm_ffi", "xgrammar"]
"""Folders with libraries that leave CUDA symbols undefined."""
WHOLE = ["libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"]
"""Libraries in which every function is replaced: mixing ours with the real ones crashes."""
CUDA_NAME = re.compile(r"^(cu[a-z]*[A-Z]|__cuda|nccl[A-Z]|nvml[A-Z])\w*$")


COMPILED = "COMPILED_OVER_STANDIN"
"""Variable with the folder for what SGLang compiles at run time, shared by all servers over a stand-in: it takes minutes."""


def environment(out: Path) -> dict[str, str]:
    """Returns the variables that run a process on the stand-in."""
    return {
        "LD_PRELOAD": str(out / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(out),
        "TRITON_LIBCUDA_PATH": str(out),
        "STANDIN_KERNELS": str(out / "libkernels.so"),
    }


def sglang_environment(out: Path, log: Path, caches: Path) -> dict[str, str]:
    """Returns the variables that run SGLang on it, with our shims. What SGLang compiles at run time links with a stand-in, so
    it goes to the folder in ``COMPILED``, else to ``caches`` like everything else that is kept."""
    compiled = Path(os.environ.get(COMPILED, caches))
    return environment(out) | {
        "STANDIN_LOG": str(log),
        "PYTHONPATH": f"{HERE / 'shims'}{os.pathsep}{HERE.parents[1]}",  # this checkout's package, not an installed one
        "LIBRARY_PATH": str(out),
        "SGLANG_NCCL_SO_PATH": str(out / "libcuda.so.1"),
        "SGLANG_JIT_CACHE_DIR": str(compiled / "sglang"),
        "SGLANG_DG_CACHE_DIR": str(compiled / "deep_gemm"),
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        "XDG_CACHE_HOME": str(caches),
    }


def cuda_include() -> Path:
    """Returns the folder of CUDA 13 headers: the environment's if complete, else the toolkit's."""
    for place in (SITE / "nvidia" / "cu13" / "include", Path("/usr/local/cuda/include")):
        if (place / "cuda_runtime_api.h").is_file() and (place / "crt" / "host_defines.h").is_file():
            return place
    raise SystemExit("no CUDA headers: install nvidia-cuda-runtime or the CUDA toolkit")


def build(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    include = cuda_include()
    objects = []
    for source in SOURCES:
        objects.append(out / Path(source).with_suffix(".o").name)
        command = ["gcc", "-c", "-O1", "-fPIC", "-Wall", "-Wno-unused-parameter", f"-I{include}", str(HERE / source)]
        run(*command, "-o", str(objects[-1]))
    written = defined(objects)
    (out / "rest.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in wanted(include) - written))
    objects.append(out / "rest.o")
    run("gcc", "-c", "-O0", "-fPIC", "-w", "-fno-builtin", str(out / "rest.c"), "-o", str(objects[-1]))
    library = out / "libcuda.so.1"
    run("gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(library), *map(str, objects), "-ldl", "-lpthread")
    for name in ("libcuda.so", "libcudart.so", "libnccl.so", "libnvidia-ml.so.1"):
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(library.name)
    # References to the CUDA runtime stay undefined: the stand-in, loaded first, resolves them.
    flags = ["-shared", "-O1", "-std=c++17", "-fPIC", f"-I{include}", f"-I{KERNELS}"]
    flags += ["-Wall", "-Wno-unknown-pragmas", "-Wno-unused-but-set-variable"]  # a kernel may write a variable only to wait
    flags += ["-U_FORTIFY_SOURCE"]  # it treats a jump to another stack as an error
    run("g++", *flags, str(HERE / "kernels.cpp"), "-o", str(out / "libkernels.so"))
    return library


def wanted(include: Path) -> set[str]:
    """Returns every CUDA function that something in the environment may call."""
    libraries = [path for folder in USERS for path in (SITE / folder).rglob("*.so*") if path.is_file()]
    names = {name for name in symbols(libraries, "--undefined-only") if CUDA_NAME.match(name)}
    whole = [path for name in WHOLE for path in (SITE / "nvidia").rglob(name)]
    names |= {name for name in symbols(whole, "--defined-only") if CUDA_NAME.match(name)}
    return names | set(re.findall(r"\bcu[A-Z]\w+(?= *\()", (include / "cuda.h").read_text()))


def symbols(libraries: list[Path], which: str) -> set[str]:
    """Returns the libraries' dynamic symbols, without versions."""
    names = set()
    for library in libraries:
        answer = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True)
        names |= {line.split()[-1].partition("@")[0] for line in answer.stdout.splitlines() if line.strip()}
    return names


def defined(objects: list[Path]) -> set[str]:
    return {line.split()[-1] for line in run("nm", *map(str, objects)).splitlines() if " T " in line}


def run(*command: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{answer.stdout}{answer.stderr}")
    if answer.stderr.strip():
        print(answer.stderr, file=sys.stderr)
    return answer.stdout


if __name__ == "__main__":
    print(build(Path(sys.argv[1]).absolute()))
