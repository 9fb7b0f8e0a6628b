"""Fixtures shared by several test files."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from arguments import Arguments
from builders.shapes import use_recorded
from builders.wheels import Installed, build_wheel
from checkpoints import MEASURED, Checkpoints, WalkedCheckpoints, unserved_models
from nursery import Nurseries, Nursery
from processor_time import ProcessorTime
from serving import Engines
from standin.build import COMPILED, sglang_environment
from standin.run import Standin
from support_marks import MARKERS, Support

from scripts.harness.server import environment
from sglang_uvm_offload.plan.gpus import GPUS
from sglang_uvm_offload.routing.trace import Trace

# For everything that the tests start. Test runs share two cores, where threads that wait for each other waste others' time.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(unserved_models())
use_recorded()

H200_BYTES = GPUS["H200"].memory_mib << 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also run tests marked nightly")
    parser.addoption("--ceilings", action="store_true", help="fail if a tier takes more CPU time than its ceiling")
    parser.addoption("--support", type=Path, metavar="FILE", help="write the results of the tests of docs/support.md to FILE")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.pluginmanager.register(Support(config), "support")
    config.pluginmanager.register(ProcessorTime(config.getoption("--ceilings")), "processor_time")
    if not hasattr(config, "workerinput"):
        os.environ[COMPILED] = tempfile.mkdtemp(prefix="compiled-")  # shared by all workers: SGLang's compilers have locks


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The environment with the installed wheel, outside the checkout."""
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="session")
def trace() -> Trace:
    """The measured trace that ships with the benchmarks."""
    return Trace.load(MEASURED)


@pytest.fixture(scope="session")
def walked(tmp_path_factory: pytest.TempPathFactory) -> WalkedCheckpoints:
    return WalkedCheckpoints(tmp_path_factory.mktemp("walked"), MEASURED)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    """Runs small programs over the stand-in CUDA driver."""
    built = Standin(tmp_path_factory.mktemp("standin"))
    yield built
    built.close()


@pytest.fixture(autouse=True)
def hooks_end_with_the_test() -> Iterator[None]:
    """SGLang cannot remove a hook, so a test that left one would change every later test of this process. One that loads the
    plugin runs in a process of ``sglang``."""
    before = our_hooks()
    yield
    left = [target for target in our_hooks() if target not in before]
    assert not left, f"hooks stay in the tests' own process: {', '.join(left)}"


def our_hooks() -> list[str]:
    return list(getattr(sys.modules.get("sglang_uvm_offload.plugin.hooks"), "_targets", ()))


PRELOAD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import serving_host
serving_host.preload()
"""


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Runs small programs in which SGLang is imported as in a spawned scheduler before it loads plugins."""
    ready = Nursery(tmp_path_factory.mktemp("sglang"), PRELOAD, environment({}))
    yield ready
    ready.close()


@pytest.fixture(scope="session")
def every_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Runs small programs with all of SGLang's models imported, where other tests import only those that they serve."""
    env = {name: value for name, value in environment({}).items() if name != "SGLANG_DISABLED_MODEL_ARCHS"}
    imports = f"""
        import sys
        import sglang.srt.entrypoints.engine
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import architectures.build
        import architectures.checkpoints
    """
    ready = Nursery(tmp_path_factory.mktemp("every_model"), imports, env)
    yield ready
    ready.close()


@pytest.fixture(scope="session")
def sglang_on_standin(tmp_path_factory: pytest.TempPathFactory, standin: Standin) -> Iterator[Nurseries]:
    """As ``sglang``, over the stand-in CUDA: SGLang finds a GPU and starts CUDA at import."""
    folder = tmp_path_factory.mktemp("sglang_on_standin")
    env = environment(sglang_environment(standin.library.parent, folder / "calls.jsonl", folder / "caches"))
    ready = Nurseries(folder, PRELOAD, env)
    yield ready
    ready.close()


@pytest.fixture(scope="session")
def cuda_arguments(tmp_path_factory: pytest.TempPathFactory, standin: Standin) -> Iterator[Arguments]:
    """Resolves SGLang's arguments for launches on a machine with eight H200."""
    folder = tmp_path_factory.mktemp("cuda_arguments")
    env = sglang_environment(standin.library.parent, folder / "calls.jsonl", folder / "caches")
    arguments = Arguments(environment(env | {"STANDIN_GPUS": "8", "STANDIN_VRAM": str(H200_BYTES)}))
    yield arguments
    arguments.close()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(COMPILED))
    keep_runtime_data()


def keep_runtime_data() -> None:
    """Never frees the runtime data of SWIG modules. sentencepiece, which SGLang imports, frees it as the interpreter ends and
    crashes if the types that it needs went first, as they do in a process that has drawn a chart."""
    for name, module in sys.modules.items():
        if name.startswith("swig_runtime_data"):
            for value in vars(module).values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
