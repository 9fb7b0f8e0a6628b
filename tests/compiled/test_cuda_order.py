"""Work on several streams at random timings, over the stand-in driver: where something orders it, its bytes are right at
each timing and the log proves the order; where nothing does, both are not so."""

from __future__ import annotations

import textwrap

import pytest
from standin.run import Standin
from standin.shuffled import BEGINNING, SEEDS, Shuffled, named, run_shuffled

# ---- one copy into a slot, and one that reads it ----

COPY_AND_READ = """
blank, new, slot, read = cells(0, 0), cells(1, 2), cells(0, 0), cells(0, 0)
event = torch.cuda.Event()
def begin():
    slot.copy_(blank)
    read.copy_(blank)
    event.record()
def work():
    with torch.cuda.stream(stream_a):
        slot.copy_(new)
        {order}
    with torch.cuda.stream(stream_b):
        read.copy_(slot)
def outcome():
    return read.tolist()
"""


def copy_and_read(standin: Standin, order: str) -> tuple[Shuffled, set[bool]]:
    ran = run_shuffled(standin, COPY_AND_READ.format(order=order))
    proven = set()
    for calls, outcome in zip(ran.rounds, ran.outcomes, strict=True):
        copy, read, *_ = named(calls, "cudaMemcpyAsync")
        assert not ran.order.happens_before(read, copy)
        proven.add(before := ran.order.happens_before(copy, read))
        assert not before or outcome == [1, 2]
    return ran, proven


@pytest.mark.parametrize(
    "order",
    [
        "stream_b.wait_stream(stream_a)",
        "event.record(stream_a); stream_b.wait_event(event)",
        "event.record(stream_a); stream_b.wait_event(event); event.record(stream_b)",
        "stream_a.synchronize()",
        "event.record(stream_a); event.synchronize()",
        "event.record(stream_a)\n        while not event.query(): pass",
        "while not stream_a.query(): pass",
        "slot.cpu()",
    ],
)
def test_what_waits_for_a_copy_reads_it_at_each_timing(standin, order):
    ran, proven = copy_and_read(standin, order)
    assert ran.outcomes == [[1, 2]] * SEEDS
    assert proven == {True}


@pytest.mark.parametrize(
    "order",
    [
        "pass",
        "stream_b.wait_event(event)",  # as it was recorded before
        "event.record(stream_a); event.record(stream_b); stream_b.wait_event(event)",
        "stream_a.wait_stream(stream_b)",
        "stream_a.query()",
    ],
)
def test_what_does_not_wait_for_a_copy_reads_old_bytes_at_some_timing(standin, order):
    ran, proven = copy_and_read(standin, order)
    assert {tuple(read) for read in ran.outcomes} == {(0, 0), (1, 2)}
    assert False in proven


def test_an_order_is_proven_exactly_where_no_timing_breaks_it(standin):
    """Programs of random records and waits, each at several timings."""
    timings, programs = 200, 20
    ran = run_shuffled(
        standin,
        """
        blank, new, slot, read = cells(0), cells(1), cells(0), cells(0)
        streams = [torch.cuda.current_stream(), stream_a, stream_b]
        def begin():
            slot.copy_(blank)
        def work():
            rng = np.random.default_rng(seed // 200)
            events = [torch.cuda.Event() for _ in range(2)]
            for step in range(12):
                stream, event = streams[rng.integers(3)], events[rng.integers(2)]
                kind = rng.choice(["record", "wait", "wait for a stream", "synchronize"], p=[0.5, 0.4, 0.08, 0.02])
                with torch.cuda.stream(stream):
                    if step == 1:
                        slot.copy_(new)
                    elif step == 11:
                        read.copy_(slot)
                    elif kind == "record":
                        event.record()
                    elif kind == "wait":
                        event.wait()
                    elif kind == "wait for a stream":
                        stream.wait_stream(streams[rng.integers(3)])
                    else:
                        event.synchronize()
        def outcome():
            return read.item()
        """,
        seeds=timings * programs,
    )
    proven = []
    for first in range(0, timings * programs, timings):
        copy, read, *_ = named(ran.rounds[first], "cudaMemcpyAsync")
        proven.append(ran.order.happens_before(copy, read))
        assert set(ran.outcomes[first : first + timings]) == ({1} if proven[-1] else {0, 1}), first
    assert True in proven
    assert False in proven


def test_a_graph_is_ordered_as_one_operation(standin):
    program = """
    graph = torch.cuda.CUDAGraph()
    blank, new, slot, read = cells(0, 0), cells(1, 2), cells(0, 0), [cells(0, 0), cells(0, 0)]
    with torch.cuda.graph(graph):
        for it in read:
            it.copy_(slot)
    def begin():
        slot.copy_(blank)
    def work():
        with torch.cuda.stream(stream_a):
            slot.copy_(new)
            {order}
        with torch.cuda.stream(stream_b):
            graph.replay()
    def outcome():
        return [it.tolist() for it in read]
    """
    for order, expected in (("stream_b.wait_stream(stream_a)", {2}), ("pass", {0, 2})):
        ran = run_shuffled(standin, program.format(order=order))
        assert all(first == second for first, second in ran.outcomes)
        assert {last for (_, last), _ in ran.outcomes} == expected
        for calls in ran.rounds:
            copy, graph, *_ = named(calls, "cudaMemcpyAsync", "cudaGraphLaunch")
            assert ran.order.happens_before(copy, graph) == (order != "pass")


# ---- two slots, into which one stream copies what a kernel on another one reads ----

RING = """
from sglang_uvm_offload.cuda.structs import Counted
from sglang_uvm_offload.cuda.ops import device_ops
def ids(expert):
    return cells(*[expert] * 4).view(1, 4)
ops, experts, slots = device_ops(0), [ids(expert) for expert in range(8)], [ids(0), ids(0)]
control, counts, zero = (on_device(np.zeros(shape, dtype=np.int64)) for shape in (2, (8, 2, 2, 8), (8, 2, 2, 8)))
copied, read = ([torch.cuda.Event() for _ in slots] for _ in range(2))
def copy(i):
    slot = i % 2
    with torch.cuda.stream(stream_a):
        if {copy_waits} and i >= 2:
            stream_a.wait_event(read[slot])
        slots[slot].copy_(experts[i])
        copied[slot].record()
def begin():
    counts.copy_(zero)
def work():
    with torch.cuda.stream(stream_b):
        ops.begin_step(control, 1, 0)
        for i in range(8):
            copy(i)
            slot = i % 2
            if {read_waits}:
                stream_b.wait_event(copied[slot])
            ops.count_routing([Counted(i, slots[slot], True)], False, 0, control, counts)
            read[slot].record()
def outcome():
    layer, expert = counts.cpu().sum((1, 2)).nonzero(as_tuple=True)
    return layer.tolist() == expert.tolist() == list(range(8))
"""


@pytest.mark.parametrize(
    ("copy_waits", "read_waits"),
    [(True, True), (False, True), (True, False)],
    ids=["both wait", "copies wait for no reader", "readers wait for no copy"],
)
def test_slots_are_right_at_each_timing_only_if_copies_wait_for_readers_and_readers_for_copies(standin, copy_waits, read_waits):
    ran = run_shuffled(standin, RING.format(copy_waits=copy_waits, read_waits=read_waits))
    assert set(ran.outcomes) == ({True} if copy_waits and read_waits else {True, False})
    for calls in ran.rounds:
        copies, reads = named(calls, "cudaMemcpyAsync"), named(calls, "uvm_count_routing_kernel")
        copies = copies[:8]  # the last one brings the counts to the host
        assert len({copy["to"] for copy in copies}) == 2
        filled = [ran.order.happens_before(*pair) for pair in zip(copies, reads, strict=True)]
        emptied = [ran.order.happens_before(*pair) for pair in zip(reads[:-2], copies[2:], strict=True)]
        assert all(filled) == read_waits
        assert all(emptied) == copy_waits


def test_slots_are_right_where_another_thread_submits_the_copies_and_a_third_one_its_own_work(standin):
    program = RING.format(copy_waits=True, read_waits=True) + textwrap.dedent("""
    from concurrent.futures import ThreadPoolExecutor
    copier, own, done = ThreadPoolExecutor(1), torch.cuda.Stream(), threading.Event()
    submit, copy_here = copier.submit, copy
    def copy(i):
        submit(copy_here, i).result()
    mine = [cells(*[0] * 4096) for _ in range(2)]
    def busy():
        with torch.cuda.stream(own):
            while not done.is_set():
                mine[0].copy_(mine[1])
                torch.cuda.Event().record()
                own.synchronize()
    beside = threading.Thread(target=busy, daemon=True)
    beside.start()
    run = outcome
    def outcome():
        if seed == 49:
            done.set()
            beside.join()
        return run()
    """)
    ran = run_shuffled(standin, program, seeds=50)
    assert ran.outcomes == [True] * 50
    for calls in ran.rounds:
        reads = named(calls, "uvm_count_routing_kernel")
        copies = [call for call in named(calls, "cudaMemcpyAsync") if call["nbytes"] == 16]
        assert {call["thread"] for call in copies}.isdisjoint({call["thread"] for call in reads})
        assert all(ran.order.happens_before(*pair) for pair in zip(copies, reads, strict=True))
        assert all(ran.order.happens_before(*pair) for pair in zip(reads[:-2], copies[2:], strict=True))


def test_counts_are_of_the_steps_so_far_at_each_timing(standin):
    program = """
    from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
    from sglang_uvm_offload.routing.counts import IdFormat, Phase
    counters, ids = CudaRoutingCounters(1, 4), cells(1, 2).view(1, 2)
    def begin():
        global asked
        asked = []
    def work():
        with torch.cuda.stream(stream_a):
            for _ in range(4):
                counters.begin_step(1, Phase.DECODE)
                counters.count(0, ids, 0, IdFormat.PLAIN)
                asked.append(counters.read_async())
    def outcome():
        return [it.wait().counts[0, 1, 0].tolist() for it in asked]
    """
    ran = run_shuffled(standin, program, seeds=50)
    assert ran.outcomes == [[[0, n, n, 0] for n in range(4 * seed + 1, 4 * seed + 5)] for seed in range(50)]


def test_what_a_step_left_to_be_counted_is_in_the_counts_whichever_stream_asks(standin):
    """The step ends at its first layer of two."""
    program = """
    from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
    from sglang_uvm_offload.routing.counts import IdFormat, Phase
    ids = cells(1, 2).view(1, 2)
    def begin():
        global counters
        counters = CudaRoutingCounters(2, 4)
    def work():
        global asked
        with torch.cuda.stream(stream_a):
            counters.begin_step(1, Phase.DECODE)
            counters.count(0, ids, 0, IdFormat.PLAIN, lasting=True)
        with torch.cuda.stream(stream_b):
            asked = counters.read_async()
    def outcome():
        return asked.wait().counts[0, 1, 0].tolist()
    """
    assert run_shuffled(standin, program, seeds=50).outcomes == [[0, 1, 1, 0]] * 50


# ---- the timings ----

RACE = """
blank, values, cell, read = cells(0), [cells(1), cells(2)], cells(0), [cells(0), cells(0)]
def begin():
    cell.copy_(blank)
def work():
    for value, it in zip(values, read):
        with torch.cuda.stream(stream_a):
            cell.copy_(value)
        with torch.cuda.stream(stream_b):
            it.copy_(cell)
def outcome():
    return [it.item() for it in read]
"""


def test_two_streams_interleave_in_all_ways(standin):
    ran = run_shuffled(standin, RACE)
    assert {tuple(outcome) for outcome in ran.outcomes} == {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)}


def test_a_seed_always_gives_the_same_timing(standin):
    assert run_shuffled(standin, RACE, seeds=50).outcomes == run_shuffled(standin, RACE, seeds=50).outcomes


def test_any_stream_may_be_far_ahead_of_another(standin):
    ran = run_shuffled(
        standin,
        """
        count = 32
        blank, one, written, read = cells(0), cells(1), *(cells(*[0] * count) for _ in range(2))
        def begin():
            for i in range(count):
                written[i:i + 1].copy_(blank)
        def work():
            for i in range(count):
                with torch.cuda.stream(stream_a):
                    written[i:i + 1].copy_(one)
                with torch.cuda.stream(stream_b):
                    read[i:i + 1].copy_(written[i:i + 1])
        def outcome():
            return sum(read.tolist())
        """,
    )
    assert {0, 32} < set(ran.outcomes)


def test_work_on_the_default_stream_is_late_too(standin):
    ran = run_shuffled(
        standin,
        """
        blank, new, slot, read = cells(0), cells(1), cells(0), cells(0)
        def begin():
            slot.copy_(blank)
        def work():
            slot.copy_(new)
            with torch.cuda.stream(stream_b):
                read.copy_(slot)
        def outcome():
            return read.item()
        """,
    )
    assert set(ran.outcomes) == {0, 1}


def test_a_process_may_be_given_its_seed(standin):
    rounds = """
    outcomes = []
    for _ in range(50):
        begin()
        torch.cuda.synchronize()
        work()
        torch.cuda.synchronize()
        outcomes.append(outcome())
    print(json.dumps(outcomes))
    """
    program = BEGINNING + RACE + textwrap.dedent(rounds)
    assert standin.run(program).said == [[1, 2]] * 50
    shuffled = standin.run(program, shuffle=1).said
    assert len({tuple(outcome) for outcome in shuffled}) > 1


def test_the_log_shows_what_orders_work_only_if_asked(standin):
    program = BEGINNING + COPY_AND_READ.format(order="stream_b.wait_stream(stream_a)") + "begin(); work()"
    ordering = ("cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent")
    plain, full = standin.run(program), standin.run(program, log_order=1)
    assert plain.code == full.code == 0, plain.err + full.err
    assert plain.named(*ordering) == []
    assert {call["call"] for call in full.named(*ordering)} == set(ordering)
