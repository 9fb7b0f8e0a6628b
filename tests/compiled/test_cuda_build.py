"""The build of the CUDA library: real nvcc, in front of it a script that counts and, where a test wants it, stalls."""

from __future__ import annotations

import ctypes
import fcntl
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from scripts.harness.patience import patience
from sglang_uvm_offload.cuda import build as cuda_build
from sglang_uvm_offload.cuda.build import BuildFailure, build

TINY = 'extern "C" __attribute__((visibility("default"))) int tiny() { return 3; }\n'
BUILDER = """
import pathlib, sys
from sglang_uvm_offload.cuda import build
build.find_source = lambda: pathlib.Path(sys.argv[1])
print(build.build("sm_90"))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(cuda_build.__file__).parents[2]))
    return tmp_path / "cache" / "sglang-uvm-offload"


@pytest.fixture
def toolkit(tmp_path, monkeypatch) -> Path:
    """A CUDA_HOME whose nvcc adds a line to ``compiles`` for each compilation, and hangs while ``stall`` exists."""
    real = cuda_build.find_nvcc()
    home = tmp_path / "toolkit"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").write_text(f"""#!/bin/sh
if [ "$1" != --version ]; then
    echo $$ >>{home}/compiles
    for word in "$@"; do [ "$last" = -o ] && [ -e {home}/stall ] && echo half >"$word"; last=$word; done
    while [ -e {home}/stall ]; do sleep 0.05; done
fi
exec {real} "$@"
""")
    (home / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    return home


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """A source that compiles in a moment, in place of the kernels."""
    source = tmp_path / "tiny.cu"
    source.write_text(TINY)
    monkeypatch.setattr(cuda_build, "find_source", lambda: source)
    return source


def works(library: Path) -> bool:
    """In a process of its own: one that is loaded here stays loaded."""
    program = f"import ctypes; print(ctypes.CDLL({str(library)!r}).tiny())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "3\n"


def builder(source: Path, **how) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(source)], stdout=subprocess.PIPE, text=True, **how)


def compiles(toolkit: Path) -> int:
    record = toolkit / "compiles"
    return len(record.read_text().split()) if record.exists() else 0


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_compiles_for_each_architecture(cache, arch):
    library = build(arch)
    assert library.parent.parent == cache
    loaded = ctypes.CDLL(str(library))
    assert loaded.uvm_compiled_version() // 1000 == 13
    assert arch.encode() in library.read_bytes()


def test_shares_the_cuda_runtime_of_torch(cache):
    ctypes.CDLL(str(build("sm_90")))
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcudart.so." in line}
    assert mapped == {str(cuda_build.loaded_cudart())}


def test_another_source_flag_or_arch_is_another_library(cache, toolkit, tiny, monkeypatch):
    first = build("sm_90")
    tiny.write_text(TINY + "// changed\n")
    second = build("sm_90")
    flags = cuda_build.compile_flags
    monkeypatch.setattr(cuda_build, "compile_flags", lambda *arguments: [*flags(*arguments), "-DX"])
    third = build("sm_90")
    monkeypatch.setattr(cuda_build.torch, "__version__", "2.99.0")
    fourth = build("sm_90")
    assert len({first, second, third, fourth}) == compiles(toolkit) == 4
    assert build("sm_90") == fourth
    assert compiles(toolkit) == 4


def test_builders_that_race_build_once(cache, toolkit, tiny):
    (toolkit / "stall").touch()
    builders = [builder(tiny) for _ in range(3)]
    wait_for(lambda: compiles(toolkit))
    time.sleep(1)
    (toolkit / "stall").unlink()
    answers = {one.communicate(timeout=patience(600))[0].strip() for one in builders}
    assert [one.returncode for one in builders] == [0, 0, 0]
    assert compiles(toolkit) == 1
    (library,) = answers
    assert sorted(path.name for path in Path(library).parent.iterdir()) == ["lock", "uvm_ops.so"]


def test_a_killed_builder_blocks_nobody_and_leaves_nothing(cache, toolkit, tiny):
    (toolkit / "stall").touch()
    killed = builder(tiny, start_new_session=True)
    wait_for(lambda: compiles(toolkit))
    wait_for(lambda: list(cache.glob("*/build-*/uvm_ops.so")))
    assert not list(cache.glob("*/uvm_ops.so")), "a half-written library has its final name"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    try:
        library = None
        following = builder(tiny)
        wait_for(lambda: compiles(toolkit) == 2)
        (toolkit / "stall").unlink()
        library = Path(following.communicate(timeout=patience(600))[0].strip())
    finally:
        (toolkit / "stall").unlink(missing_ok=True)
        for orphan in (toolkit / "compiles").read_text().split()[:1]:
            wait_for(lambda orphan=orphan: not Path(f"/proc/{orphan}").exists())
    assert works(library)
    assert sorted(path.name for path in library.parent.iterdir()) == ["lock", "uvm_ops.so"]


def test_a_torn_library_is_built_again_once(cache, toolkit, tiny):
    """As a machine that lost its power may leave it."""
    library = build("sm_90")
    for built, left in enumerate((0, 1000), 2):
        library.write_bytes(library.read_bytes()[:left])
        for _ in range(2):
            assert build("sm_90") == library
        assert compiles(toolkit) == built
    assert works(library)


def test_a_lock_that_a_stopped_process_holds_delays_the_build_and_does_not_end_it(cache, toolkit, tiny, monkeypatch):
    folder = build("sm_90").parent
    (folder / "uvm_ops.so").unlink()
    (folder / "unlocked-of-another").mkdir()
    monkeypatch.setattr(cuda_build, "LOCK_SECONDS", 0.5)
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert works(build("sm_90"))
    assert compiles(toolkit) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "unlocked-of-another", "uvm_ops.so"]


def test_a_library_that_the_loader_refuses_is_named(cache, tmp_path, monkeypatch):
    from sglang_uvm_offload.cuda import ops

    (tmp_path / "uvm_ops.so").write_bytes(b"not a library")
    monkeypatch.setattr(ops, "build", lambda arch: tmp_path / "uvm_ops.so")
    with pytest.raises(BuildFailure, match=rf"cannot load the CUDA library: .*; remove {tmp_path} to rebuild it"):
        ops.load_ops("sm_refused")


def test_no_nvcc_says_what_to_install(cache, tmp_path, monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cuda_build, "DEFAULT_HOME", tmp_path / "cuda")
    monkeypatch.setattr(cuda_build, "PIP_HOMES", tmp_path / "pip")
    with pytest.raises(BuildFailure, match=r"no nvcc: install the CUDA toolkit .* or set CUDA_HOME") as failure:
        build("sm_90")
    assert str(tmp_path / "cuda" / "bin" / "nvcc") in str(failure.value)
    assert not cache.exists()


def test_nvcc_is_taken_from_cuda_home_then_path_then_default_then_pip(tmp_path, monkeypatch):
    pip = f"pip/cu{torch.version.cuda.partition('.')[0]}"
    places = {name: tmp_path / name / "bin" / "nvcc" for name in ("home", "path", "default", pip)}
    for place in places.values():
        place.parent.mkdir(parents=True)
        place.touch(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.setattr(cuda_build, "DEFAULT_HOME", tmp_path / "default")
    monkeypatch.setattr(cuda_build, "PIP_HOMES", tmp_path / "pip")
    assert cuda_build.find_nvcc() == places["home"]
    places["home"].unlink()
    assert cuda_build.find_nvcc() == places["path"]
    places["path"].unlink()
    assert cuda_build.find_nvcc() == places["default"]
    places["default"].unlink()
    assert cuda_build.find_nvcc() == places[pip]
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "path"))
    places["path"].touch(0o755)
    assert cuda_build.find_nvcc() == places["path"]


def test_an_nvcc_that_is_none_is_named(cache, tmp_path, monkeypatch):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho no such thing\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildFailure, match=r"--version prints no release:\nno such thing"):
        build("sm_90")


def test_a_broken_source_quotes_the_compiler_and_leaves_nothing(cache, tmp_path, monkeypatch):
    broken = tmp_path / "uvm_ops.cu"
    broken.write_text("int good;\nint oops = nowhere;\n")
    monkeypatch.setattr(cuda_build, "find_source", lambda: broken)
    with pytest.raises(BuildFailure, match="failed to compile") as failure:
        build("sm_90")
    assert 'uvm_ops.cu(2): error: identifier "nowhere" is undefined' in str(failure.value)
    (directory,) = cache.iterdir()
    assert [path.name for path in directory.iterdir()] == ["lock"]


def test_where_no_cache_can_be_the_error_says_what_to_set(cache, tiny, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(BuildFailure, match=f"cannot build the CUDA library: .*{tmp_path / 'file'}.*set XDG_CACHE_HOME"):
        build("sm_90")


def test_an_architecture_that_is_none_is_refused(cache):
    with pytest.raises(BuildFailure, match="'sm_90; true' is not a GPU architecture"):
        build("sm_90; true")


def test_a_cache_path_with_spaces_and_dollars_builds(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a $HOME: b"))
    assert build("sm_90").is_file()


def test_the_installed_source_is_found_before_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_build, "__file__", str(tmp_path / "package" / "cuda" / "build.py"))
    with pytest.raises(BuildFailure, match=r"uvm_ops\.cu is missing"):
        cuda_build.find_source()
    for place in (tmp_path / "kernels", tmp_path / "package" / "kernels"):
        place.mkdir(parents=True)
        (place / "uvm_ops.cu").touch()
        assert cuda_build.find_source() == place / "uvm_ops.cu"


CUDA_12 = Path(__file__).parents[1] / "standin" / "cuda12"


@pytest.mark.parametrize(
    ("version", "call"), [(12010, "cudaMemAdvise"), (12020, "cudaMemAdvise_v2"), (12090, "cudaMemAdvise_v2")]
)
def test_the_source_compiles_with_the_signatures_of_cuda_12(tmp_path, version, call):
    library = tmp_path / "uvm_ops.o"
    source = CUDA_12.parent / "kernels.cpp"
    include = [f"-I{CUDA_12}", f"-I{cuda_build.find_source().parent}"]
    flags = ["-c", "-std=c++17", "-w", f"-DCUDART_VERSION={version}", *include]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    undefined = subprocess.run(["nm", str(library)], capture_output=True, text=True, check=True).stdout.split()
    assert call in undefined
    assert ("cudaMemAdvise" in undefined) != ("cudaMemAdvise_v2" in undefined)
