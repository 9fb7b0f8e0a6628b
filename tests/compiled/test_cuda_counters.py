"""The GPU's counters, on the stand-in driver."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(("most_rows", "experts", "steps"), [(9, 20, 60), (300, 256, 20), (40, 4096, 20)])
def test_the_gpu_counts_what_the_cpu_counts(standin, most_rows, experts, steps):
    ran = standin.run(f"""
        from sglang_uvm_offload.routing.counts import ALL_ROWS, IdFormat, Phase
        from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
        E = {experts}
        rng, both = np.random.default_rng(0), (CpuRoutingCounters(3, E), CudaRoutingCounters(3, E))
        for _ in range({steps}):
            rows, phase, in_place = int(rng.integers(0, {most_rows})), Phase(int(rng.integers(2))), bool(rng.integers(2))
            phase = phase if in_place else Phase.PREFILL
            valid = rows if rng.random() < 0.5 else int(rng.integers(0, rows + 1)) if rng.random() < 0.9 else ALL_ROWS
            ids = torch.from_numpy(rng.integers(-1, E + 4, (rows, 6)).astype(rng.choice(["int32", "int64"])))
            packed = ids.dtype == torch.int32 and rng.random() < 0.3
            form = IdFormat.PACKED if packed else IdFormat.PLAIN
            ids = (ids << 16) | 5 if packed else ids
            layer, first = int(rng.integers(3)), int(rng.choice([0, 4]))
            histogram = torch.from_numpy(rng.integers(0, 3, E).astype("int32"))
            for counters, move in zip(both, (lambda t: t, lambda t: t.cuda())):
                counters.begin_step(valid, phase)
                counters.count(layer, move(ids)[:, :4], first, form, in_place=in_place)
                counters.count_histogram(layer, move(histogram), in_place=in_place)
        cpu, gpu = (counters.read() for counters in both)
        assert cpu.counts.sum() > 500
        print(json.dumps([bool((cpu.counts == gpu.counts).all()), cpu.steps == gpu.steps]))
    """)
    assert ran.said == [True, True], ran.err


STEPS = """
    import logging
    from sglang_uvm_offload.routing.counts import IdFormat, Phase
    from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
    from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
    logging.basicConfig()
    LAYERS, E, rng = 5, 12, np.random.default_rng(1)
    cpu, gpu = CpuRoutingCounters(LAYERS, E), CudaRoutingCounters(LAYERS, E)
    def count(layer, ids, first=0, form=IdFormat.PLAIN, in_place=True, lasting=True):
        cpu.count(layer, ids, first, form, in_place=in_place)
        gpu.count(layer, ids.cuda(), first, form, in_place=in_place, lasting=lasting)
    def begin(rows, phase=Phase.DECODE):
        for counters in (cpu, gpu):
            counters.begin_step(rows, phase)
    def some(rows=3, k=2, dtype="int32"):
        return torch.from_numpy(rng.integers(-1, E, (rows, k)).astype(dtype))
    def told():
        a, b = cpu.read(), gpu.read()
        return [bool((a.counts == b.counts).all()), int(a.counts.sum())]
"""


def counting(ran) -> list[int]:
    """The layers of each launch that counts."""
    return [call["blocks"] for call in ran.calls if call.get("kernel") == "uvm_count_routing_kernel"]


def test_the_layers_of_a_step_are_counted_by_one_launch_after_its_last_one(standin):
    ran = standin.run(
        STEPS
        + """
    for step in range(3):
        begin(3)
        for layer in range(LAYERS):
            count(layer, some())
    print(json.dumps(told()))
    """
    )
    right, total = ran.said
    assert right, ran.err
    assert total > 50
    assert counting(ran) == [5, 5, 5]


def test_layers_that_differ_are_counted_apart_and_all_the_same(standin):
    """Ids of another type, more of a row, another numbering, packed, read from a buffer, of no rows, and of two batches."""
    ran = standin.run(
        STEPS
        + """
    begin(9, Phase.PREFILL)
    for ids in ([some()], [some(dtype="int64")], [some(k=3)], [some(), some(5)], [some(0)]):
        for layer in range(LAYERS):
            for each in ids:
                count(layer, each, in_place=layer % 2 == 0)
    for layer in range(LAYERS):
        count(layer, some(), first=4 * (layer > 2))
    begin(3)
    for layer in range(LAYERS):
        count(layer, (some().clamp_min(0) << 16) | 9, form=IdFormat.PACKED)
        count(layer, some(dtype=["int32", "int64"][layer % 2]))
    print(json.dumps(told()))
    """
    )
    right, total = ran.said
    assert right, ran.err
    assert total > 100
    assert counting(ran) == [5, 5, 5, 9, 1, 3, 2, *[1] * 10], "the last layer of the first of two batches ends the others' wait"


def test_ids_that_do_not_last_and_long_ones_are_counted_at_once(standin):
    ran = standin.run(
        STEPS
        + """
    begin(9000, Phase.PREFILL)
    for layer in range(LAYERS):
        count(layer, some(), lasting=False)
    for layer in range(LAYERS):
        count(layer, some(8193))
    print(json.dumps(told()))
    """
    )
    assert ran.said[0], ran.err
    assert counting(ran) == [1] * 10


@pytest.mark.parametrize(
    ("layers", "later", "launches"),
    [("0, 1", "range(LAYERS - 1)", [2, *[1] * 8]), ("0, 1, *range(LAYERS)", "()", [2, *[1] * 5])],
)
def test_what_ends_before_its_last_layer_is_counted_and_what_follows_layer_by_layer(standin, layers, later, launches):
    """A step; or a run, of which some follow each other without a step before a server serves."""
    ran = standin.run(
        STEPS
        + f"""
    begin(3)
    for layer in ({layers}):
        count(layer, some())
    said = [told()]
    for step in range(2):
        begin(3)
        for layer in {later}:
            count(layer, some())
    print(json.dumps([*said, told()]))
    """
    )
    assert [right for right, _ in ran.said] == [True, True], ran.err
    assert counting(ran) == launches


def test_ids_that_turn_out_to_share_a_buffer_are_counted_at_once_from_then_on(standin):
    """What waited had been overwritten: it is not counted, for others are not either in the runs before a server serves."""
    ran = standin.run(
        STEPS
        + """
    shared = some().cuda()
    gpu.begin_step(3, Phase.DECODE)
    for step in range(2):
        for layer in range(LAYERS):
            gpu.count(layer, shared, 0, IdFormat.PLAIN, lasting=True)
    begin(3)
    for layer in range(LAYERS):
        count(layer, shared.cpu())
    print(json.dumps(int(gpu.read().counts.sum())))
    """
    )
    assert counting(ran) == [1] * 14, ran.err


def test_a_graph_counts_all_layers_at_each_replay_whatever_comes_to_lie_where_the_ids_did(standin):
    ran = standin.run(
        STEPS
        + """
    router = torch.stack([some() for _ in range(LAYERS)]).cuda()
    graph, others = torch.cuda.CUDAGraph(), torch.full((3, 2), 1, dtype=torch.int32).cuda()
    gpu.begin_step(0, Phase.DECODE)
    with torch.cuda.graph(graph):
        try:
            gpu.begin_step(3, Phase.DECODE)
        except CudaFailure as refusal:
            assert "capturing a CUDA graph" in str(refusal)
        else:
            raise AssertionError("not refused")
        for layer in range(LAYERS):
            ids = torch.empty_like(router[layer])
            ids.copy_(router[layer])
            gpu.count(layer, ids, 0, IdFormat.PLAIN, lasting=True)
            del ids
            torch.empty_like(others).copy_(others)  # of the graph's pool, as large as the ids
    for _ in range(2):
        gpu.begin_step(2, Phase.DECODE)
        cpu.begin_step(2, Phase.DECODE)
        graph.replay()
        for layer in range(LAYERS):
            cpu.count(layer, router[layer].cpu(), 0, IdFormat.PLAIN)
        router.copy_(torch.stack([some() for _ in range(LAYERS)]))
    print(json.dumps(told()))
    """
    )
    right, total = ran.said
    assert right, ran.err
    assert total > 20
    assert counting(ran) == [5]


@pytest.mark.parametrize("begins", [True, False])
def test_a_graph_that_does_not_reach_the_last_layer_is_told_of(standin, begins):
    ran = standin.run(
        STEPS.replace("LAYERS, E,", "BEGINS, LAYERS, E,").replace("= 5, 12", f"= {begins}, 5, 12")
        + """
    graph, ids = torch.cuda.CUDAGraph(), some().cuda()
    begin(3)
    with torch.cuda.graph(graph):
        gpu.count(0, ids, 0, IdFormat.PLAIN, lasting=True)
    if BEGINS:
        begin(3)
    for layer in range(1, LAYERS):
        count(layer, some())
    print(json.dumps(told()))
    """
    )
    assert ran.said[0], ran.err
    assert ran.err.count("a step that does not reach the last MoE layer") == 1
    assert counting(ran) == [1] * 4


@pytest.mark.parametrize("timing", [{"late": 1}, {"late": 2}, {"shuffle": 1}, {"shuffle": 2}], ids=str)
def test_ids_of_another_stream_are_counted_when_they_are_written_and_before_their_memory_is(standin, timing):
    ran = standin.run(
        STEPS
        + """
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    values, other = [some().pin_memory() for _ in range(LAYERS)], torch.full((3, 2), 1, dtype=torch.int32).pin_memory()
    begin(3)
    for layer, each in enumerate(values):
        cpu.count(layer, each, 0, IdFormat.PLAIN)
        on = side if layer < 2 else main
        with torch.cuda.stream(on):
            ids = torch.empty(3, 2, dtype=torch.int32, device="cuda")
            ids.copy_(each, non_blocking=True)
            gpu.count(layer, ids, 0, IdFormat.PLAIN, lasting=True)
            del ids
    with torch.cuda.stream(side):
        for _ in range(LAYERS):
            torch.empty(3, 2, dtype=torch.int32, device="cuda").copy_(other, non_blocking=True)
    print(json.dumps(told()))
    """,
        **timing,
    )
    assert ran.said[0], ran.err
    assert counting(ran) == [5]


@pytest.mark.parametrize("late", [0, 1, 2], ids=["no stream is late", "steps are late", "copies are late"])
def test_what_is_asked_for_is_of_the_steps_so_far_and_whoever_asks_waits_for_none(standin, late):
    ran = standin.run(
        """
        from sglang_uvm_offload.routing.counts import IdFormat, Phase
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
        counters, ids = CudaRoutingCounters(1, 4), torch.tensor([[1, 2]], dtype=torch.int32).cuda()
        def step():
            counters.begin_step(1, Phase.DECODE)
            counters.count(0, ids, 0, IdFormat.PLAIN)
        step()
        asked = [counters.read_async()]
        ready = asked[0].ready()
        step()
        asked.append(counters.read_async())
        step()
        counted = [counts.wait() for counts in asked] + [counters.read(), asked[0].wait()]
        print(json.dumps([ready, [[c.counts[0, 1, 0].tolist(), c.steps] for c in counted]]))
        """,
        late=late,
    )
    ready, counted = ran.said
    assert counted == [[[0, n, n, 0], [0, n]] for n in (1, 2, 3, 1)], ran.err
    assert ready == (late != 2)
    first, *_, last = (i for i, call in enumerate(ran.calls) if call.get("kernel") == "uvm_count_routing_kernel")
    assert not [call for call in ran.calls[first:last] if "Synchronize" in call["call"]]
