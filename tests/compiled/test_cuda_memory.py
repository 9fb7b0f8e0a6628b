"""The CUDA backend and its kernels: the compiled library, over the stand-in driver of ``standin/``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.harness import memory_contract
from sglang_uvm_offload.cuda import read_times
from sglang_uvm_offload.cuda.read_times import told_apart

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
BLOCK = 2 << 20
PAGE = 64 << 10
MOVES = ("cudaMallocManaged", "cudaMemAdvise", "cudaMemPrefetchAsync", "cudaFree")


def steps(ran, *more: str) -> list[str]:
    """The memory calls, and ``more``, in words, addresses relative to the last range: "SetAccessedBy device [0, 2097152)"."""
    words, base = [], 0
    for call in ran.named(*MOVES, *more):
        if call["call"] == "cudaMallocManaged":
            base = call["address"]
            words.append(f"malloc {call['nbytes']}")
        elif call["call"] == "cudaFree":
            words += ["free"] if call["managed"] else []
        elif call["call"] == "cudaStreamSynchronize":
            words.append("wait")
        else:
            start = call["address"] - base
            verb = call.get("advice", "prefetch")
            words.append(f"{verb} {call['location']} [{start}, {start + call['nbytes']})")
    return words


# ---- the protocol ----


@pytest.fixture(scope="module")
def contract(standin) -> dict[str, str]:
    ran = standin.run("""
        import traceback
        from scripts.harness import memory_contract
        memory, failed = CudaMemory(), {}
        for check in memory_contract.CHECKS:
            try:
                check(memory)
            except Exception:  # the test of this check fails with it
                failed[check.__name__] = traceback.format_exc()
        print(json.dumps(failed))
    """)
    assert ran.named("cudaFree")[-1]["live_managed_bytes"] == BLOCK  # the one that reads are compared with
    return ran.said


@pytest.mark.parametrize("check", [check.__name__ for check in memory_contract.CHECKS])
def test_contract(contract, check):
    assert check not in contract, contract[check]


# ---- which calls, in which order, over which bytes ----


def test_allocate_advises_access_once_over_whole_blocks(standin):
    ran = standin.run("memory = CudaMemory(); memory.free(memory.allocate(5 * PAGE, 'w13'))")
    assert ran.code == 0, ran.err
    assert steps(ran) == [f"malloc {BLOCK}", f"SetAccessedBy device [0, {BLOCK})", "free"]
    assert ran.named("cudaMallocManaged")[0]["flags"] == 1  # cudaMemAttachGlobal


def test_a_move_takes_one_advice_and_one_prefetch_for_neighbours_in_the_order_that_keeps_them_mapped(standin):
    """To the GPU: prefetch, wait, then advise what has arrived. To the host: advise, prefetch, wait."""
    ran = standin.run("""
        memory = CudaMemory()
        layout = ExpertLayout(num_experts=8, expert_bytes=3 * BLOCK // 2 + 1024)
        it = memory.allocate(layout.nbytes, "w13")
        def move(experts, location):
            mask = np.zeros(8, dtype=bool)
            mask[experts] = True
            memory.place(it, layout.spans(layout.holding(mask)), location)
        move([1, 2, 3, 6], DEVICE)
        move([7], HOST)
    """)
    assert ran.code == 0, ran.err
    neighbours, single = f"[{BLOCK}, {7 * BLOCK})", f"[{9 * BLOCK}, {11 * BLOCK})"
    end = f"[{10 * BLOCK}, {13 * BLOCK})"  # the range's end, with the rest of its last block
    assert steps(ran, "cudaStreamSynchronize")[2:] == [
        f"prefetch device {neighbours}",
        f"prefetch device {single}",
        "wait",
        f"SetPreferredLocation device {neighbours}",
        f"SetPreferredLocation device {single}",
        f"SetPreferredLocation host {end}",
        f"prefetch host {end}",
        "wait",
    ]


def test_a_long_move_goes_in_batches_of_16_mib_each_of_which_has_arrived_before_the_next(standin):
    ran = standin.run("""
        memory = CudaMemory()
        it = memory.allocate(23 * BLOCK + PAGE, "w13")
        for location in (DEVICE, HOST):
            memory.place(it, [Span(0, 3 * BLOCK), Span(4 * BLOCK, 13 * BLOCK), Span(18 * BLOCK, 5 * BLOCK + PAGE)], location)
    """)
    assert ran.code == 0, ran.err
    cuts = [[(0, 3), (4, 9)], [(9, 17)], [(18, 24)]]
    spans = [[f"[{a * BLOCK}, {b * BLOCK})" for a, b in batch] for batch in cuts]
    expected = []
    for batch in spans:
        expected += [*(f"prefetch device {span}" for span in batch), "wait"]
        expected += [f"SetPreferredLocation device {span}" for span in batch]
    for batch in spans:
        expected += [f"SetPreferredLocation host {span}" for span in batch]
        expected += [*(f"prefetch host {span}" for span in batch), "wait"]
    assert steps(ran, "cudaStreamSynchronize")[2:] == expected


def test_prefetches_go_to_one_non_blocking_stream_of_their_own_and_are_waited_for(standin):
    ran = standin.run("""
        memory, other = CudaMemory(), CudaMemory()
        it, its = memory.allocate(PAGE, "w13"), other.allocate(PAGE, "w2")
        with torch.cuda.stream(torch.cuda.Stream()):
            memory.place(it, [Span(0, PAGE)], DEVICE)
        other.place(its, [Span(0, PAGE)], HOST)
        print(json.dumps(torch.cuda.current_stream().cuda_stream))
    """)
    assert ran.said == 0
    (made,) = [call for call in ran.named("cudaStreamCreateWithFlags") if call["flags"] == 1]  # cudaStreamNonBlocking
    assert {call["stream"] for call in ran.named("cudaMemPrefetchAsync")} == {made["stream"]}
    assert [call["stream"] for call in ran.named("cudaStreamSynchronize")] == [made["stream"]] * 2


def test_a_range_is_aligned_where_the_driver_does_not_align(standin):
    ran = standin.run(
        """
        memory = CudaMemory()
        it = memory.allocate(PAGE, "w13")
        address = it.address
        memory.free(it)
        print(json.dumps(address))
        """,
        misalign=PAGE,
    )
    assert ran.said % BLOCK == 0
    first, again = ran.named("cudaMallocManaged")
    freed, advised = ran.named("cudaFree"), ran.named("cudaMemAdvise")
    assert (first["nbytes"], again["nbytes"]) == (BLOCK, 2 * BLOCK)
    assert [call["address"] for call in freed] == [first["address"], again["address"]]
    assert [(call["address"], call["nbytes"]) for call in advised] == [(ran.said, BLOCK)]
    assert again["address"] <= ran.said <= again["address"] + again["nbytes"] - BLOCK
    assert freed[-1]["live_managed_bytes"] == 0


# ---- whether blocks are in VRAM ----

EVICTING = """
        import ctypes
        import threading
        memory = CudaMemory()
        it = memory.allocate(8 * BLOCK, "w13")
        weights = memory.tensor(it)
        memory.place(it, [Span(0, 6 * BLOCK)], DEVICE)
        memory.place(it, [Span(6 * BLOCK, 2 * BLOCK)], HOST)
        def look():
            return memory.in_vram([(it, i * BLOCK) for i in range(8)]).tolist()
"""
IN_PLACE = [True] * 6 + [False] * 2


def test_evicted_blocks_are_told_by_their_first_read_which_brings_them_back(standin):
    ran = standin.run(
        EVICTING
        + """
        ctypes.CDLL("libcuda.so.1").standin_evict(ctypes.c_void_p(it.address + BLOCK), ctypes.c_size_t(2 * BLOCK))
        print(json.dumps([look(), look()]))
        """
    )
    assert ran.said == [[True, False, False, True, True, True, False, False], IN_PLACE]


def test_a_look_reads_on_the_stream_of_the_moves_while_another_thread_captures(standin):
    ran = standin.run(
        EVICTING
        + """
        graph, looked = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            weights.view(torch.int32).add_(1)
            beside = threading.Thread(target=lambda: looked.append(look()))
            beside.start()
            beside.join()
        print(json.dumps(looked))
        """
    )
    assert ran.code == 0, ran.err
    assert ran.said == [IN_PLACE]
    (launch,) = [call for call in ran.named("cudaLaunchKernel") if call["kernel"] == "uvm_time_reads_kernel"]
    assert {launch["stream"]} == {call["stream"] for call in ran.named("cudaMemPrefetchAsync")}


def test_a_range_lives_while_it_is_read(standin):
    """Its last tensor may die on another thread meanwhile: a read of freed memory would end the process."""
    ran = standin.run(
        EVICTING
        + """
        time_reads = type(memory._ops).time_reads
        def dying(*arguments):
            global weights
            del weights
            assert memory.holds(it)
            time_reads(*arguments)
        type(memory._ops).time_reads = dying
        print(json.dumps([look(), memory.holds(it)]))
        """
    )
    assert ran.said == [IN_PLACE, False]


def test_more_blocks_than_a_launch_reads_are_read_in_several(standin):
    ran = standin.run(
        EVICTING
        + """
        from sglang_uvm_offload.cuda import read_times
        read_times.LAUNCH_BLOCKS = 3
        print(json.dumps([look(), memory.in_vram([]).tolist()]))
        """
    )
    assert ran.said == [IN_PLACE, []]
    assert len([call for call in ran.named("cudaLaunchKernel") if call["kernel"] == "uvm_time_reads_kernel"]) == 4


def test_the_cycles_measured_on_a_gpu_are_told_apart():
    """Also by the slowest read of VRAM and the fastest one over the link."""
    probe = json.loads((RESULTS / "2026-11-22-nvidia-h200" / "probe.json").read_text())
    rows = [row for row in probe["parts"]["residency"]["rows"] if row["row"] == "read_latency"]
    near, far = (np.array(next(row["values"] for row in rows if row["blocks"] == which)) for which in ("resident", "offloaded"))
    assert len(near) == len(far) == 5
    assert told_apart(near, near, near, far).all()
    assert not told_apart(far, far, near, far).any()


def test_the_faults_measured_on_a_gpu_are_told_from_reads_that_miss_the_tlb():
    """The first and the second read of residents of an H100 under pressure, beside reads of plain VRAM and of host RAM."""
    looks = json.loads((RESULTS / "2026-11-26-nvidia-h100" / "eviction.json").read_text())["parts"]["eviction"]["rows"]
    rows = [row for row in looks if row["row"] == "look" and row["design"] == "prefer GPU for residents"]
    reads = [("residents", "first"), *((memory, "second") for memory in ("residents", "plain VRAM", "prefers the host"))]
    found = [[row["values"] for row in rows if (row["memory"], row["read"]) == each] for each in reads]
    first, later, near, far = (np.array(values) for (values,) in found)
    told, faults = told_apart(first, later, near, far), first > 5_000
    assert told is not None
    assert faults.sum() > 100
    assert not told[faults].any()
    assert told[~faults & (later < 1_000)].all(), "also where the first read missed the TLB"
    slow = np.array([11 * np.median(near)])  # ten times as long took all residents of a server on an H200 for evicted
    assert told_apart(slow, near[:1], near, far).tolist() == [True], "shorter than any fault"
    assert told_apart(first, later, near, far + read_times.BUSY_CYCLES) is None, "steps fill the link"
    assert told_apart(first, later, near, 1.9 * near) is None, "a coherent link"


def test_a_read_of_seconds_is_no_fast_one(standin):
    ran = standin.run(
        EVICTING
        + """
        time_reads = type(memory._ops).time_reads
        def late(self, device, addresses, times):
            time_reads(self, device, addresses, times)
            times.numpy().view(np.uint32)[64, 0] = 3 << 30  # of the first block, after the 64 to compare with
        type(memory._ops).time_reads = late
        print(json.dumps(look()))
        """
    )
    assert ran.said == [False, *IN_PLACE[1:]]


def test_a_look_without_memory_for_what_it_compares_with_fails_as_one_and_keeps_nothing(standin):
    """Whoever looks after a fault goes on without an answer."""
    ran = standin.run(
        EVICTING
        + """
        try:
            look()
        except ManagedMemoryError as error:
            print(json.dumps(str(error)))
        """,
        fail="cudaHostAlloc:1:2",
    )
    assert "allocate failed on the reference block in VRAM" in ran.said
    assert "out of memory" in ran.said
    assert [call["managed"] for call in ran.named("cudaFree")][-1:] == [True]


# ---- failures ----

LIFE = """
    memory = CudaMemory()
    live, said = [], None
    try:
        for name in ("w13", "w2"):
            live.append(memory.allocate(8 * BLOCK, name))
            memory.place(live[-1], [Span(0, BLOCK), Span(4 * BLOCK, BLOCK)], DEVICE)
        memory.info()
    except ManagedMemoryError as error:
        said = str(error)
    for it in live:
        memory.free(it)
    torch.ones(1, device="cuda")  # raises where a handled error is still the runtime's last one
    print(json.dumps(said))
"""


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (
            "cudaMallocManaged:1:2",
            ["cudaMallocManaged failed on w13 [0, 16777216)", "cudaErrorMemoryAllocation: out of memory"],
        ),
        (
            "cudaMemAdvise:1:1",
            ["cudaMemAdvise(SetAccessedBy) failed on w13", "cudaErrorInvalidValue: invalid argument"],
        ),
        (
            "cudaMemAdvise:3:1",
            ["cudaMemAdvise(SetPreferredLocation) to device failed on w13 [8388608, 10485760) (2097152 bytes)"],
        ),
        ("cudaMemPrefetchAsync:4:2", ["cudaMemPrefetchAsync to device failed on w2 [8388608, 10485760)"]),
        (
            "cudaStreamSynchronize:1:700",
            ["cudaStreamSynchronize to device failed on w13 [0, 10485760)", "illegal"],
        ),
        ("cudaMemGetInfo:1:2", ["cudaMemGetInfo failed on the device"]),
    ],
)
def test_a_failing_call_is_named_and_unwound(standin, fail, words):
    ran = standin.run(LIFE, fail=fail)
    for word in words:
        assert word in ran.said
    assert sum(call["result"] != 0 for call in ran.calls) == (0 if fail.startswith("cudaMemGetInfo") else 1)
    frees = [call for call in ran.named("cudaFree") if call["managed"]]
    assert not frees or frees[-1]["live_managed_bytes"] == 0
    assert len(frees) == sum(call["result"] == 0 for call in ran.named("cudaMallocManaged"))


def test_a_life_without_a_failure_says_nothing(standin):
    """The program that the failures are put into."""
    assert standin.run(LIFE).said is None


def test_a_failing_free_is_told(standin):
    ran = standin.run(
        """
        memory = CudaMemory()
        it = memory.allocate(PAGE, "w13")
        try:
            memory.free(it)
        except ManagedMemoryError as error:
            print(json.dumps(str(error)))
        """,
        fail="cudaFree:1:1",
    )
    assert "cudaFree failed on w13 [0, 65536)" in ran.said


@pytest.mark.parametrize(
    ("fail", "failing", "moved", "prefer"),
    [
        ("cudaMemAdvise:4:1", 4, [0, 2, 4, 6], [0, 2]),
        ("cudaMemPrefetchAsync:3:2", 4, [0, 2], [0, 2]),
        ("cudaMemPrefetchAsync:1:2", 0, [], []),
        ("cudaStreamSynchronize:1:700", 0, [0, 2, 4, 6], []),
    ],
)
def test_what_moved_before_a_failure_is_known_and_no_page_prefers_the_gpu_that_did_not_move(
    standin, fail, failing, moved, prefer
):
    ran = standin.run(
        """
        memory = CudaMemory()
        it = memory.allocate(8 * BLOCK, "w13")
        spans = [Span(block * BLOCK, BLOCK) for block in (0, 2, 4, 6)]
        try:
            memory.place(it, spans, DEVICE)
        except ManagedMemoryError as error:
            failed = error.span.offset
        there = np.flatnonzero(memory.in_vram([(it, block * BLOCK) for block in range(8)])).tolist()
        print(json.dumps([it.address, failed // BLOCK, there]))
        """,
        fail=fail,
    )
    address, failed, there = ran.said
    advice = [call for call in ran.named("cudaMemAdvise") if call["advice"] == "SetPreferredLocation" and call["result"] == 0]
    advised = [(call["address"] - address) // BLOCK for call in advice if call["location"] == "device"]
    assert (failed, there, advised) == (failing, moved, prefer)


@pytest.mark.parametrize(("error", "ends"), [("2", False), ("719!", True)])
def test_an_error_of_a_kernel_says_that_the_process_ends_and_names_the_way_out(standin, error, ends):
    ran = standin.run(
        """
        memory = CudaMemory()
        it = memory.allocate(16 * BLOCK, "w13")
        try:
            memory.place(it, [Span(0, 16 * BLOCK)], DEVICE)
        except ManagedMemoryError as failure:
            print(json.dumps([failure.span.offset // BLOCK, failure.ends_process, failure.with_outlook("It goes on.")]))
        """,
        fail=f"cudaMemPrefetchAsync:2:{error}",
    )
    block, ends_process, told = ran.said
    assert (block, ends_process) == (8, ends)
    assert ("--expert-offload-config tma off" in told) == ends
    assert ("It goes on." in told) == (not ends)


# ---- graphs ----


def test_nothing_moves_while_a_graph_is_captured(standin):
    ran = standin.run("""
        memory = CudaMemory()
        it = memory.allocate(2 * BLOCK, "w13")
        dying = memory.tensor(memory.allocate(PAGE, "dying"))
        graph, said = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for action in (
                lambda: memory.allocate(PAGE, "w2"),
                lambda: memory.place(it, [Span(BLOCK, BLOCK)], DEVICE),
            ):
                try:
                    action()
                except ManagedMemoryError as error:
                    said.append(str(error))
            del dying
        graph.replay()
        memory.place(it, [Span(0, BLOCK)], DEVICE)
        memory.free(it)
        print(json.dumps(said))
    """)
    assert len(ran.said) == 2
    assert all("capturing a CUDA graph" in said for said in ran.said)
    assert "w13 [2097152, 4194304)" in ran.said[1]
    calls = [call["call"] for call in ran.calls]
    captured = calls[calls.index("cudaStreamBeginCapture") + 1 : calls.index("cudaStreamEndCapture")]
    assert not {"cudaMallocManaged", "cudaMemAdvise", "cudaMemPrefetchAsync", "cudaStreamSynchronize"} & set(captured)
    assert "cudaFree" in captured  # the range that died


def test_another_thread_may_move_experts_and_wait_for_counts_while_a_graph_is_captured(standin):
    """In the mode that threads start in, waiting would end the capture."""
    ran = standin.run("""
        import threading
        from sglang_uvm_offload.cuda.device import relax_capture
        memory = CudaMemory()
        it = memory.allocate(2 * BLOCK, "w13")
        recorded, found = torch.cuda.Event(), []
        recorded.record()
        def work():
            memory.place(it, [Span(0, BLOCK)], DEVICE)
            for prepare in (lambda: None, relax_capture):
                prepare()
                try:
                    found.append(recorded.synchronize())
                except RuntimeError as error:
                    found.append(type(error).__name__)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        print(json.dumps([found, memory.in_vram([(it, 0)]).tolist()]))
    """)
    (refused, waited), moved = ran.said
    assert "Error" in refused
    assert waited is None
    assert moved == [True]


# ---- life and death of ranges ----


def test_an_interpreter_that_ends_with_live_tensors_ends_quietly(standin):
    ran = standin.run("""
        memory = CudaMemory()
        kept = [memory.tensor(memory.allocate(PAGE, "w13")), memory.allocate(PAGE, "w2")]
        cycle = [memory.tensor(memory.allocate(PAGE, "w1"))]
        cycle.append(cycle)
        sys.modules["keeper"] = kept
    """)
    assert (ran.code, ran.err) == (0, "")
    # Other exit handlers and threads may still read the tensors.
    assert not [call for call in ran.named("cudaFree") if call["managed"]]


def test_a_forked_child_leaves_its_parents_ranges_alone(standin):
    ran = standin.run("""
        memory = CudaMemory()
        tensor = memory.tensor(memory.allocate(PAGE, "w13"))
        child = os.fork()
        if child == 0:
            del tensor
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(json.dumps(os.getpid()))
    """)
    assert {call["pid"] for call in ran.named("cudaFree")} <= {ran.said}


# ---- what the machine can do ----


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, None),
        ({"attribute_89": 0}, "concurrentManagedAccess is 0"),
        ({"attribute_83": 0}, "does not support managed memory"),
        ({"driver": 12040}, "driver is too old: it supports CUDA 12.4"),
        ({"confidential": 1}, "confidential computing"),
        ({"cuinit": 100}, "no CUDA-capable device is detected"),
    ],
)
def test_a_machine_that_cannot_is_told_why(standin, settings, words):
    ran = standin.run(
        """
        from sglang_uvm_offload.cuda.device import device_problems
        problems = device_problems(0)
        if problems:
            try:
                CudaMemory()
            except RuntimeError as refusal:
                assert problems[0] in str(refusal)
            else:
                raise AssertionError("not refused")
        print(json.dumps(problems))
        """,
        **settings,
    )
    if words is None:
        assert ran.said == []
    else:
        (problem,) = ran.said
        assert words in problem


# ---- the routing counters ----

COUNTERS = """
    from sglang_uvm_offload.cuda.structs import Counted
    ops = CudaMemory()._ops

    def fresh(experts):
        return torch.zeros(2, dtype=torch.int64).cuda(), torch.zeros(2, 2, experts, dtype=torch.int64).cuda()

    def refused(action):
        try:
            action()
        except (ValueError, CudaFailure) as refusal:
            return str(refusal)
        raise AssertionError("not refused")
"""


def test_what_cannot_be_counted_is_refused(standin):
    ran = standin.run(
        COUNTERS
        + """
    control, counts = fresh(8)
    ids = on_device(np.zeros((4, 2), dtype=np.int32))
    print(json.dumps([
        refused(lambda: ops.check_ids(ids.to("cpu").float().cuda(), False)),
        refused(lambda: ops.check_ids(ids.flatten(), False)),
        refused(lambda: ops.check_ids(ids.T, False)),
        refused(lambda: ops.check_ids(ids.to("cpu").long().cuda(), True)),
        refused(lambda: ops.count_routing([Counted(0, ids, True)], False, 0, control, fresh(4097)[1][None])),
        refused(lambda: ops.count_routing([Counted(0, ids, True)], False, 0, control, counts[None, :, :1])),
        refused(lambda: ops.count_routing([Counted(0, ids.cpu(), True)], False, 0, control, counts[None])),
        refused(lambda: ops.count_routing([Counted(0, ids, True)] * (ops.max_counted + 1), False, 0, control, counts[None])),
        refused(lambda: ops.count_histogram(on_device(np.zeros(9, dtype=np.int32)), control, counts)),
        refused(lambda: ops.begin_step(control, -1, 0)),
        refused(lambda: ops.begin_step(control, 1, 2)),
    ]))
    """
    )
    words = [
        "float32",
        "rows, top_k",
        "2 elements apart",
        "int64",
        "4097 experts",
        "counts are",
        "routing on cpu",
        "invalid argument",
        "histogram",
    ]
    for word, said in zip([*words, "invalid argument", "invalid argument"], ran.said, strict=True):
        assert word in said
    assert "uvm_count_routing_kernel" not in {call.get("kernel") for call in ran.calls}
