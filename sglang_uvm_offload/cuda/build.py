"""Builds ``kernels/uvm_ops.cu`` with ninja at first use, once for all processes, and caches the library.

The cache directory is named by a hash of everything that the result depends on, so it is never stale. A lock lets only one of
several starting ranks build. (``torch.utils.cpp_extension.load`` waits forever on the lock file of a killed build.) The library
is renamed into place with a digest, so a partial one is never loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

import torch

from sglang_uvm_offload.files import cache, child, lock

logger = logging.getLogger(__name__)

LIBRARY = "uvm_ops.so"
DEFAULT_HOME = Path("/usr/local/cuda")
PIP_HOMES = Path(torch.__file__).parents[1] / "nvidia"
"""Where pip installs CUDA toolkits, one per major version. SGLang's dependencies include a compiler."""
LOCK_SECONDS = 180
"""How long to wait for another process that builds, before building here too."""
LAST_LINES = 15
"""The number of lines of compiler output that an error quotes."""


class BuildFailure(RuntimeError):
    """The CUDA library could not be built. The message names what to install, or quotes the compiler."""


def find_source() -> Path:
    """The path of ``uvm_ops.cu`` in the installed package, else in the checkout."""
    package = Path(__file__).resolve().parents[1]
    places = [package / "kernels" / "uvm_ops.cu", package.parent / "kernels" / "uvm_ops.cu"]
    for place in places:
        if place.is_file():
            return place
    raise BuildFailure("uvm_ops.cu is missing; reinstall sglang-uvm-offload (searched " + ", ".join(map(str, places)) + ")")


def find_nvcc() -> Path:
    """The first nvcc in ``CUDA_HOME``, ``CUDA_PATH``, ``PATH``, ``DEFAULT_HOME`` and pip's toolkit."""
    candidates = [home / "bin" / "nvcc" for home in _named_homes()]
    # Skip empty and relative entries of PATH: they would run an nvcc in the current folder, perhaps a downloaded model's.
    folders = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(folder)]
    if in_path := shutil.which("nvcc", path=os.pathsep.join(folders)):
        candidates.append(Path(in_path))
    candidates.append(DEFAULT_HOME / "bin" / "nvcc")
    candidates.append(PIP_HOMES / f"cu{str(torch.version.cuda).partition('.')[0]}" / "bin" / "nvcc")
    for nvcc in candidates:
        if os.access(nvcc, os.X_OK):
            return nvcc
    raise BuildFailure(
        f"no nvcc: install the CUDA toolkit {torch.version.cuda or ''} (its nvcc and cudart packages), or set "
        "CUDA_HOME to it; searched " + ", ".join(map(str, candidates))
    )


def _named_homes() -> list[Path]:
    return [Path(os.environ[name]).absolute() for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]


def nvcc_release(nvcc: Path) -> str:
    """The compiler's release, for example "13.0"."""
    try:
        result = child.run([str(nvcc), "--version"])
    except OSError as error:
        raise BuildFailure(f"cannot run {nvcc}: {error}") from error
    found = re.search(r"release (\d+\.\d+)", result.stdout)
    if result.returncode != 0 or not found:
        raise BuildFailure(f"{nvcc} --version prints no release:\n{_tail(result.stdout + result.stderr)}")
    return found[1]


def loaded_cudart() -> Path | None:
    """The CUDA runtime loaded in this process (torch's), if any."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if re.search(r"/libcudart\.so\.\d+[\d.]*$", line):
            return Path(path[1] + path[2])
    return None


def compile_flags(nvcc: Path, release: str, arch: str) -> list[str]:
    """nvcc's flags for the shared library."""
    return [*code_flags(arch), "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden", *runtime_flags(nvcc, release)]


def code_flags(arch: str) -> list[str]:
    return ["-O2", "-std=c++17", "-gencode", f"arch={arch.replace('sm_', 'compute_')},code={arch}"]


def runtime_flags(nvcc: Path, release: str) -> list[str]:
    """``-cudart none`` plus an explicit runtime with the same name as torch's. The loader then reuses torch's, so the process
    has a single CUDA runtime. The directories matter at link time, and if torch's runtime has another version."""
    cudart = loaded_cudart()
    homes = [*_named_homes(), nvcc.resolve().parent.parent, DEFAULT_HOME]
    places = [cudart.parent] if cudart else []
    places += [home / lib for home in homes for lib in ("lib64", "lib")]
    name = f"libcudart.so.{release.split('.')[0]}"
    libraries = dict.fromkeys(place for place in places if (place / name).exists())
    if not libraries:
        raise BuildFailure(f"{name} not found next to {nvcc}: install the cudart package of the CUDA toolkit {release}")
    flags = ["-cudart", "none", f"-l:{name}"]
    for place in libraries:
        flags += ["-L", str(place), "-Xlinker", "-rpath", "-Xlinker", str(place)]
    return flags


def build(arch: str) -> Path:
    """The library for ``arch`` ("sm_90"), built unless it is cached. Raises ``BuildFailure``."""
    if not re.fullmatch(r"sm_\d+[a-z]?", arch):
        raise BuildFailure(f"{arch!r} is not a GPU architecture such as sm_90")
    source = find_source().read_text()
    nvcc = find_nvcc()
    release = nvcc_release(nvcc)
    flags = compile_flags(nvcc, release, arch)
    parts = [source, *flags, str(nvcc), release, torch.__version__]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    try:
        directory = cache.private_folder(f"{arch}-{key}")
        library = directory / LIBRARY
        if cache.sealed(library) is None:
            with lock.held(directory / "lock", LOCK_SECONDS) as alone:
                if not alone:
                    logger.warning("Expert offload: cannot lock %s, building without the lock", directory / "lock")
                if cache.sealed(library) is None:
                    _build(library, source, [str(nvcc), *flags], alone)
    except OSError as error:
        raise BuildFailure(f"cannot build the CUDA library: {error}") from error
    return library


def _build(library: Path, source: str, command: list[str], alone: bool) -> None:
    # A killed build's compiler may still be writing, so each build uses its own directory. Remove stale ones.
    for dead in library.parent.glob("build-*") if alone else ():
        shutil.rmtree(dead, ignore_errors=True)
    prefix = "build-" if alone else "unlocked-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=library.parent, ignore_cleanup_errors=True) as work:
        (Path(work) / "uvm_ops.cu").write_text(source)
        (Path(work) / "build.ninja").write_text(_ninja_file(command))
        result = child.run_module("ninja", "-C", work, "-v")
        if result.returncode != 0:
            raise BuildFailure(f"nvcc failed to compile the CUDA library:\n{_tail(result.stdout + result.stderr)}")
        cache.seal(library, (Path(work) / LIBRARY).read_bytes())


def _ninja_file(command: list[str]) -> str:
    quoted = shlex.join(command).replace("$", "$$")
    return f"rule nvcc\n  command = {quoted} -o $out $in\nbuild {LIBRARY}: nvcc uvm_ops.cu\n"


def _tail(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-LAST_LINES:])
