"""The GPU's counters and the manager over the CUDA backend, on the stand-in driver."""

from __future__ import annotations

import pytest


def test_the_gpu_counts_what_the_cpu_counts(standin):
    ran = standin.run("""
        from sglang_uvm_offload.routing.counts import ALL_ROWS, IdFormat, Phase
        from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
        from sglang_uvm_offload.residency.reporting import rank_status
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
        rng, both = np.random.default_rng(0), (CpuRoutingCounters(3, 20), CudaRoutingCounters(3, 20))
        for _ in range(60):
            rows, phase, in_place = int(rng.integers(0, 9)), Phase(int(rng.integers(2))), bool(rng.integers(2))
            phase = phase if in_place else Phase.PREFILL
            valid = rows if rng.random() < 0.5 else int(rng.integers(0, rows + 1)) if rng.random() < 0.9 else ALL_ROWS
            ids = torch.from_numpy(rng.integers(-1, 24, (rows, 4)).astype(rng.choice(["int32", "int64"])))
            packed = ids.dtype == torch.int32 and rng.random() < 0.3
            form = IdFormat.PACKED if packed else IdFormat.PLAIN
            ids = (ids << 16) | 5 if packed else ids
            layer, first = int(rng.integers(3)), int(rng.choice([0, 4]))
            histogram = torch.from_numpy(rng.integers(0, 3, 20).astype("int32"))
            for counters, move in zip(both, (lambda t: t, lambda t: t.cuda())):
                counters.begin_step(valid, phase)
                counters.count(layer, move(ids), first, form, in_place=in_place)
                counters.count_histogram(layer, move(histogram), in_place=in_place)
        cpu, gpu = (counters.read() for counters in both)
        assert cpu.counts.sum() > 500
        print(json.dumps([bool((cpu.counts == gpu.counts).all()), cpu.steps == gpu.steps]))
    """)
    assert ran.said == [True, True], ran.err


def test_counting_begins_at_nothing_whatever_the_memory_held(standin):
    """The kernel that counts runs during capture too, before any step has told it of rows or phase."""
    ran = standin.run("""
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
        before = torch.full((1 << 16,), 7).cuda()
        start, end = before.data_ptr(), before.data_ptr() + before.nbytes
        del before
        counters = CudaRoutingCounters(3, 20)
        again = [start <= each.data_ptr() < end for each in (counters.control, counters._counts)]
        print(json.dumps([again, counters.control.cpu().tolist(), int(counters.read().counts.sum())]))
    """)
    assert ran.said == [[True, True], [0, 0], 0], ran.err


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


def test_reselection_over_cuda_keeps_bytes_and_addresses_and_demotes_a_layer_before_it_promotes(standin):
    ran = standin.run("""
        from sglang_uvm_offload.layer_shard import LayerShard
        from sglang_uvm_offload.requested_config import parse
        from sglang_uvm_offload.residency.manager import OffloadManager
        from sglang_uvm_offload.residency.reporting import rank_status
        from sglang_uvm_offload.routing.counts import IdFormat, Phase
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
        from sglang_uvm_offload.experts.takeover import AllocationMode
        config = parse({"num_resident": 2, "warmup_tokens": 4, "stream_tokens": "inf"}).resolved()
        manager = OffloadManager(config, CudaMemory(), CudaRoutingCounters, lambda decide: decide(), progress=lambda: False)
        model, modules = manager.begin_model(draft=False), []
        for layer_id in range(2):
            layer, module = manager.add_layer(model, LayerShard(layer_id, 6)), torch.nn.Module()
            with AllocationMode(6, layer.allocate):
                module.w13 = torch.nn.Parameter(torch.empty(6, BLOCK, dtype=torch.uint8, device="cuda"), requires_grad=False)
            layer.sync_tensors(module)
            values = np.random.default_rng(layer_id).integers(0, 255, (6, BLOCK), dtype=np.uint8)
            module.w13.data.copy_(torch.from_numpy(values))
            modules.append(module)
        manager.finish_model(model)
        before = [(m.w13.data_ptr(), m.w13.data.cpu().clone()) for m in modules]
        for _ in range(3):
            manager.begin_step(model, 2, 2, Phase.DECODE)
            for layer in range(2):
                model.counters.count(layer, torch.tensor([[5, 3], [5, 3]], dtype=torch.int32).cuda(), 0, IdFormat.PLAIN)
            manager.end_step(model)
        status = rank_status(manager)
        same = [m.w13.data_ptr() == a and bool((m.w13.data.cpu() == v).all()) for m, (a, v) in zip(modules, before)]
        print(json.dumps([status.resident_ids, status.hit_rate, same, status.backend]))
    """)
    resident, covered, same, backend = ran.said
    assert resident == [[3, 5], [3, 5]], ran.err
    assert covered == pytest.approx(1 / 3)
    assert same == [True, True]
    assert backend == "uvm"
    moves = [call["location"] for call in ran.named("cudaMemPrefetchAsync")]
    # Placing two layers (host, then device), then moving each: its two residents out in one call, the two new ones in.
    assert moves == ["host", "device"] * 2 + ["host", "device", "device"] * 2
