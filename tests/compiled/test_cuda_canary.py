"""The try of unified memory, over the stand-in driver: what it calls, and how it names what fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.hostile import Hostile
from standin.run import Ran, Standin

PROGRAM = """
    from sglang_uvm_offload.cuda.canary import canary_problems
    print(json.dumps(canary_problems((0,))))
"""


def calls(ran: Ran) -> list[str]:
    names = ("cudaMallocManaged", "cudaMalloc", "cudaMemAdvise", "cudaMemPrefetchAsync", "cudaFree")
    words = [(call["call"].removeprefix("cuda"), call.get("advice"), call.get("location")) for call in ran.named(*names)]
    return [" ".join(filter(None, each)) for each in words]


def test_it_moves_two_mib_both_ways_reads_them_and_frees_all(standin: Standin):
    ran = standin.run(PROGRAM)
    assert ran.said == []
    read = ["Malloc", "Free"]
    moves = {place: [f"MemAdvise SetPreferredLocation {place}", f"MemPrefetchAsync {place}"] for place in ("host", "device")}
    there, back = [*moves["host"], *read], [*moves["device"], *read]
    assert calls(ran) == ["MallocManaged", "MemAdvise SetAccessedBy device", *there, *back, *there, "Free"]
    assert {call["nbytes"] for call in ran.named("cudaMemAdvise")} == {2 << 20}


def test_what_a_launcher_asks_leaves_no_context_and_one_would_show(standin: Standin):
    ran = standin.run("""
        from benchmarks.gpu.canary_parts import has_context
        from sglang_uvm_offload.cuda.canary import canary_problems
        from sglang_uvm_offload.cuda.device import free_vram, make_context, problems_of, visible_gpus
        asked = problems_of([0]), canary_problems((0,)), visible_gpus(), free_vram([0])
        told = [has_context()]
        make_context(0)
        print(json.dumps([*told, has_context()]))
    """)
    assert ran.said == [False, True]


def test_what_asks_the_driver_and_builds_runs_nothing_of_the_current_folder(standin: Standin, tmp_path: Path):
    """In a server that is started in a checkpoint's folder."""
    hostile = Hostile(tmp_path / "model")
    (tmp_path / "tiny.cu").write_text('extern "C" __attribute__((visibility("default"))) int tiny() { return 3; }\n')
    ran = standin.run(f"""
        import ctypes, os, pathlib
        from sglang_uvm_offload.cuda import build
        from sglang_uvm_offload.cuda.canary import canary_problems
        from sglang_uvm_offload.cuda.device import free_vram
        os.chdir({str(hostile.folder)!r})
        os.environ.update(PATH=":.:" + os.environ["PATH"], PYTHONPATH=":" + os.environ["PYTHONPATH"])
        build.find_source = lambda: pathlib.Path({str(tmp_path / "tiny.cu")!r})
        tiny = ctypes.CDLL(str(build.build("sm_90"))).tiny()
        print(json.dumps([canary_problems((0,)), len(free_vram([0])), tiny]))
    """)
    assert ran.said == [[], 1, 3]
    assert hostile.ran == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fail": "cudaMallocManaged:1:2"}, "cuMemAllocManaged failed"),
        ({"fail": "cudaMemAdvise:1:801"}, "cuMemAdvise(SetAccessedBy) failed"),
        ({"fail": "cudaMemAdvise:3:801"}, "cuMemAdvise(SetPreferredLocation) failed"),
        ({"fail": "cudaMemPrefetchAsync:2:801"}, "cuMemPrefetchAsync failed"),
        ({"corrupt": 1}, "the GPU's read in host RAM returned wrong bytes"),
    ],
)
def test_the_call_that_fails_is_named_in_one_line(standin: Standin, settings, named):
    ran = standin.run(PROGRAM, **settings)
    (problem,) = ran.said
    assert problem.startswith(f"CUDA device 0 cannot keep experts in unified memory: in a test on 2 MiB, {named}")
    assert "gVisor" in problem
    assert ran.named("cudaFree") or "AllocManaged" in named, "what was allocated is freed"


def test_a_gpu_that_is_not_there_is_named(standin: Standin):
    assert standin.run(PROGRAM.replace("(0,)", "(0, 1)")).said == ["CUDA device 1 does not exist: the driver shows 1"]


def test_a_driver_that_does_not_start_is_named(standin: Standin):
    (problem,) = standin.run(PROGRAM, cuinit=100).said
    assert "no CUDA-capable device" in problem
