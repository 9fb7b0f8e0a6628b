"""Host pages that are populated while a model loads, by the compiled library over the stand-in driver: which calls are made,
when, and by which thread."""

from __future__ import annotations

import pytest

BLOCK = 2 << 20
MOVES = ("cudaMallocManaged", "cudaMemAdvise", "cudaMemPrefetchAsync", "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaFree")

GATED = """
        import threading
        memory = CudaMemory()
        go, seen = threading.Event(), []
        populate = type(memory._ops).populate
        def when_told(self, *arguments):
            go.wait()
            seen.append([threading.current_thread() is threading.main_thread(), torch.cuda.current_device()])
            populate(self, *arguments)
        type(memory._ops).populate = when_told
        def made(name, blocks):
            it = memory.allocate(blocks * BLOCK, name)
            return it, memory.tensor(it)
"""
"""Nothing is populated on the thread before ``go`` is set."""


def words(ran) -> list[str]:
    """The calls on the last range, in words, addresses in blocks from its begin."""
    found, base, end = [], 0, 0
    for call in ran.named(*MOVES):
        match call["call"]:
            case "cudaMallocManaged":
                base, end, found = call["address"], call["address"] + call["nbytes"], ["malloc"]
            case "cudaStreamSynchronize":
                found.append("wait")
            case "cudaMemcpyAsync":
                found += [f"write {(call['to'] - base) // BLOCK}"] if base <= call["to"] < end else []
            case "cudaFree":
                found += ["free"] if call["managed"] else []
            case _:
                first = (call["address"] - base) // BLOCK
                verb = call.get("advice", "prefetch")
                found.append(f"{verb} {call['location']} [{first}, {first + call['nbytes'] // BLOCK})")
    return found


@pytest.mark.parametrize("gpu", [0, 1])
def test_pages_prefer_the_host_at_once_and_are_populated_by_a_thread_of_the_gpu_until_loading_ends(standin, gpu):
    ran = standin.run(
        GATED.replace("CudaMemory()", f"CudaMemory({gpu})")
        + f"""
        torch.cuda.set_device({gpu})
        it, tensor = made("w13", 20)
        expected = torch.zeros(20 * BLOCK, dtype=torch.uint8)
        with memory.loading():
            memory.populate(it, [Span(0, 2 * BLOCK), Span(4 * BLOCK, 16 * BLOCK)])
            for block in (19, 0):
                expected[block * BLOCK : (block + 1) * BLOCK] = block + 1
                tensor[block * BLOCK : (block + 1) * BLOCK].copy_(expected[block * BLOCK : (block + 1) * BLOCK])
            torch.cuda.synchronize()
            go.set()
        print(json.dumps([seen, torch.equal(tensor.cpu(), expected)]))
        """,
        log_order=1,
        gpus=2,
    )
    seen, kept = ran.said
    assert seen == [[False, gpu]] * 3, "on GPU 0 it would take VRAM for a context"
    assert kept
    found = [word for word in words(ran) if word != "wait"]
    assert found == [
        "malloc",
        "SetAccessedBy device [0, 20)",
        "SetPreferredLocation host [0, 20)",
        "write 19",
        "write 0",
        "prefetch host [0, 2)",
        "prefetch host [4, 10)",
        "prefetch host [10, 18)",
        "prefetch host [18, 20)",
    ]
    prefetches = [index for index, word in enumerate(words(ran)) if word.startswith("prefetch")]
    assert [words(ran)[index + 1] for index in prefetches[1:]] == ["wait"] * 3, "after each piece"
    threads = {call["thread"] for call in ran.named("cudaMemPrefetchAsync")}
    assert threads.isdisjoint({call["thread"] for call in ran.named("cudaMemAdvise")})


def test_what_it_populates_is_on_a_stream_of_its_own(standin):
    ran = standin.run(
        GATED
        + """
        it, tensor = made("w13", 2)
        go.set()
        with memory.loading():
            memory.populate(it, [Span(0, BLOCK)])
        memory.place(it, [Span(BLOCK, BLOCK)], DEVICE)
        """
    )
    assert ran.code == 0, ran.err
    streams = {call["location"]: call["stream"] for call in ran.named("cudaMemPrefetchAsync")}
    made = [call["stream"] for call in ran.named("cudaStreamCreateWithFlags") if call["flags"] == 1]
    assert [streams["host"], streams["device"]] == made


def test_while_a_model_loads_scattered_residents_take_one_advice_each_and_one_for_all_others(standin):
    """Each waits for what is being populated."""
    ran = standin.run(
        """
        import numpy as np
        from sglang_uvm_offload.experts.tensor import ExpertTensor
        from sglang_uvm_offload.memory.layout import ExpertLayout
        memory = CudaMemory()
        tensor = ExpertTensor.allocated(memory, "w13", ExpertLayout(9, 2 * BLOCK))
        kept = tensor.bytes()
        with memory.loading():
            tensor.place(np.arange(9) % 2 == 1)
        kept.fill_(7)
        in_vram = memory.in_vram([(tensor.managed, at * BLOCK) for at in range(18)])
        print(json.dumps([np.flatnonzero(in_vram).tolist(), tensor.resident.tolist()]))
        """
    )
    blocks, resident = ran.said
    assert resident == [False, True] * 4 + [False]
    assert blocks == [2, 3, 6, 7, 10, 11, 14, 15]
    begin = max(call["address"] for call in ran.named("cudaMallocManaged") if call["nbytes"] == 18 * BLOCK)
    advised = [call for call in ran.named("cudaMemAdvise") if 0 <= call["address"] - begin < 18 * BLOCK]
    preferred = [call for call in advised if call["advice"] == "SetPreferredLocation"]
    assert [((call["address"] - begin) // BLOCK, call["nbytes"] // BLOCK, call["location"]) for call in preferred] == [
        (0, 18, "host"),
        *((at, 2, "device") for at in (2, 6, 10, 14)),
    ]


@pytest.mark.parametrize("when", ["before a load", "after a load", "without a tensor"])
def test_outside_of_a_load_and_without_a_tensor_the_caller_waits(standin, when):
    """A range without a tensor is freed at once, and the thread could be populating it."""
    ran = standin.run(
        GATED
        + f"""
        when = {when!r}
        if when == "after a load":
            with memory.loading():
                pass
        it = memory.allocate(4 * BLOCK, "w13")
        if when == "without a tensor":
            with memory.loading():
                memory.populate(it, [Span(0, 4 * BLOCK)])
                memory.free(it)
        else:
            tensor = memory.tensor(it)
            memory.populate(it, [Span(0, 4 * BLOCK)])
        print(json.dumps(threading.active_count()))
        """
    )
    assert ran.said == 1
    moves = ["SetPreferredLocation host [0, 4)", "prefetch host [0, 4)", "wait"]
    assert words(ran)[:5] == ["malloc", "SetAccessedBy device [0, 4)", *moves]


def test_a_failure_ends_the_load_by_name_and_no_later_call_begins(standin):
    ran = standin.run(
        GATED
        + """
        it, tensor = made("w13", 24)
        go.set()
        try:
            with memory.loading():
                memory.populate(it, [Span(0, 24 * BLOCK)])
        except ManagedMemoryError as error:
            print(json.dumps(str(error)))
        memory.populate(it, [Span(20 * BLOCK, 4 * BLOCK)])
        """,
        fail="cudaMemPrefetchAsync:2:2",
    )
    assert ran.said.startswith("cudaMemPrefetchAsync to host failed on w13 [16777216, 33554432) (16777216 bytes): cudaErrorM")
    prefetched = [call["nbytes"] // BLOCK for call in ran.named("cudaMemPrefetchAsync")]
    assert prefetched == [8, 8, 4], "the last one by the call after the load"


def test_host_ram_that_is_still_to_be_taken_is_not_available(standin):
    ran = standin.run(
        GATED
        + """
        from sglang_uvm_offload.cuda import memory as module
        module.host_available = lambda: 1000 * BLOCK
        it, tensor = made("w13", 20)
        found = []
        with memory.loading():
            memory.populate(it, [Span(0, 20 * BLOCK)])
            found.append(memory.info().host_available // BLOCK)
            go.set()
            memory.wait_until_populated()
            found.append(memory.info().host_available // BLOCK)
            go.clear()
            memory.populate(it, [Span(0, 20 * BLOCK)])
            module.host_available = lambda: 300 * BLOCK
            found.append(memory.info().host_available // BLOCK)
            go.set()
        found.append(memory.info().host_available // BLOCK)
        print(json.dumps(found))
        """
    )
    assert ran.said == [980, 1000, 280, 300]


def test_nothing_more_is_populated_where_others_have_taken_the_host_ram(standin):
    ran = standin.run(
        GATED
        + """
        from sglang_uvm_offload.cuda import memory as module
        from sglang_uvm_offload.memory.host_ram import HOST_LEFT_BYTES
        (w13, one), (w2, other) = made("w13", 2), made("w2", 2)
        left = iter([HOST_LEFT_BYTES, HOST_LEFT_BYTES - 1])
        module.LOOK_BYTES, module.host_available = 0, lambda: next(left)
        try:
            with memory.loading():
                for it in (w13, w2):
                    memory.populate(it, [Span(0, 2 * BLOCK)])
                go.set()
        except ManagedMemoryError as error:
            print(json.dumps(str(error)))
        """
    )
    assert "w2" in ran.said
    assert "of host RAM is left, but 512.0 MiB must stay free" in ran.said
    assert [call["nbytes"] for call in ran.named("cudaMemPrefetchAsync")] == [2 * BLOCK]


def test_host_ram_is_looked_at_after_each_48_mib(standin):
    ran = standin.run(
        GATED
        + """
        from sglang_uvm_offload.cuda import memory as module
        from sglang_uvm_offload.memory.layout import MOVE_BYTES
        available, looked = module.host_available, []
        def look():
            looked.append(len(seen) * MOVE_BYTES)
            return available()
        it, tensor = made("w13", 10 * module.LOOK_BYTES // (3 * BLOCK))
        module.host_available = look
        go.set()
        with memory.loading():
            memory.populate(it, [Span(0, it.nbytes)])
        print(json.dumps([each / module.LOOK_BYTES for each in looked]))
        """
    )
    assert ran.said == [1, 2, 3]


def test_it_goes_on_while_a_graph_is_captured_and_takes_no_new_range_there(standin):
    ran = standin.run(
        GATED
        + """
        it, tensor = made("w13", 4)
        with memory.loading():
            memory.populate(it, [Span(0, 2 * BLOCK)])
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                go.set()
                memory.wait_until_populated()
                try:
                    memory.populate(it, [Span(2 * BLOCK, 2 * BLOCK)])
                except ManagedMemoryError as error:
                    print(json.dumps(str(error)))
        """
    )
    assert "w13" in ran.said
    assert "capturing a CUDA graph" in ran.said
    calls = [call["call"] for call in ran.calls]
    assert "cudaMemPrefetchAsync" in calls[calls.index("cudaStreamBeginCapture") : calls.index("cudaStreamEndCapture")]


READ = """
        import ctypes, resource
        libc = ctypes.CDLL(None)
        memory = CudaMemory()
        it = memory.allocate(12 * BLOCK, "w13")
        def touched():
            found = np.zeros(it.nbytes // 4096, dtype=np.uint8)
            vector = found.ctypes.data_as(ctypes.c_void_p)
            assert libc.mincore(ctypes.c_void_p(it.address), ctypes.c_size_t(it.nbytes), vector) == 0
            return np.flatnonzero((found & 1).reshape(12, -1).any(axis=1)).tolist()
        def populate(readers):
            try:
                spans = [Span(0, BLOCK), Span(3 * BLOCK, 5 * BLOCK), Span(11 * BLOCK, BLOCK)]
                memory._ops.populate(0, it.address, spans, readers)
            except CudaFailure as failure:
                assert failure.call == "cudaMemPrefetchAsync", failure
"""
"""The prefetch fails, so that only reads can have touched anything."""


@pytest.mark.parametrize("readers", [0, 1, 2, 3, 7, 16])
def test_threads_read_each_block_before_the_prefetch_and_no_other(standin, readers):
    ran = standin.run(
        READ + f"\n        populate({readers})\n        print(json.dumps(touched()))", fail="cudaMemPrefetchAsync:1:2"
    )
    assert ran.said == ([0, 3, 4, 5, 6, 7, 11] if readers else [])


def test_where_no_thread_can_start_the_caller_reads_all_blocks(standin):
    ran = standin.run(
        READ
        + """
        import threading
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), resource.RLIM_INFINITY))
        try:
            threading.Thread(target=print).start()
            started = True
        except RuntimeError:
            started = False
        populate(8)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(json.dumps([started, touched()]))
        """,
        fail="cudaMemPrefetchAsync:1:2",
    )
    assert ran.said == [False, [0, 3, 4, 5, 6, 7, 11]], ran.err


@pytest.mark.parametrize("readers", [-1, 17])
def test_more_readers_than_there_may_be_are_refused(standin, readers):
    ran = standin.run(
        READ
        + f"""
        try:
            memory._ops.populate(0, it.address, [Span(0, BLOCK)], {readers})
        except CudaFailure as failure:
            print(json.dumps([failure.call, touched()]))
        """
    )
    assert ran.said == ["uvm_populate", []]


def test_while_a_model_loads_each_piece_is_read_before_it_is_prefetched(standin):
    ran = standin.run(
        READ
        + """
        tensor = memory.tensor(it)
        try:
            with memory.loading():
                memory.populate(it, [Span(0, 12 * BLOCK)])
        except ManagedMemoryError:
            print(json.dumps(touched()))
        """,
        fail="cudaMemPrefetchAsync:1:2",
    )
    assert ran.said == [*range(8)]
