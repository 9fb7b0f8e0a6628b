"""Parts that run the project's own extension and memory layer on the device: its promises, and what its calls cost."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.environment import computes
from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.shapes import GLM_45_AIR
from scripts.harness.memory_contract import CHECKS
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.expert_location import ExpertLocation
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, ExpertLayout
from sglang_uvm_offload.memory.protocol import Location, Span
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, IdFormat, Phase
from sglang_uvm_offload.routing.recorder import Recorder

MIB = 1 << 20


def contract(rows: Rows) -> None:
    """Every promise of ``Memory``, and one of CUDA's threads. Broken ones are told at the end."""
    memory, broken = CudaMemory(), []
    for check in (*CHECKS, check_a_capture_survives_moves_of_another_thread):
        started = time.perf_counter()
        try:
            check(memory)
        except AssertionError as error:
            broken.append(f"{check.__name__}: {error}")
        else:
            rows.put("promise", "s", [time.perf_counter() - started], check=check.__name__)
        gc.collect()
    if broken:
        raise AssertionError("\n".join(broken))


def check_a_capture_survives_moves_of_another_thread(memory: CudaMemory) -> None:
    """Which advise, prefetch and wait while this one captures."""
    moved = memory.allocate(4 * BLOCK_BYTES, "what moves")
    tensor, spans, arrived = memory.tensor(moved), [Span(0, moved.nbytes)], []

    def move() -> None:
        for location in (Location.HOST, Location.DEVICE, Location.HOST, Location.DEVICE):
            memory.place(moved, spans, location)
            arrived.append(location)

    thread, graph = threading.Thread(target=move), torch.cuda.CUDAGraph()
    one, total = torch.ones(1 << 20, dtype=torch.int32, device="cuda"), torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    with torch.cuda.graph(graph):
        thread.start()
        total += one
        thread.join()
    assert len(arrived) == 4, f"the other thread ended after {arrived}"
    graph.replay()
    graph.replay()
    assert not computes() or bool((total == 2).all()), "a replay computed something else"
    del tensor


def counters(rows: Rows) -> None:
    """Graphs of counting kernels against a plain count: formats, padding, phases, ids that change between replays; steps
    between replays that stream; and counts that are requested between two steps, and taken when later ones have run."""
    random = np.random.default_rng(7)
    for tokens, k, experts, first in ((1, 8, 128, 0), (32, 8, 256, 0), (33, 6, 64, 64), (256, 8, 256, 128)):
        for form in (IdFormat.PLAIN, IdFormat.PACKED):
            layers = 3
            counted = CudaRoutingCounters(layers, experts)
            ids = torch.zeros(layers, tokens, k, dtype=torch.int32, device="cuda")
            graph = torch.cuda.CUDAGraph()
            start = counted.read()
            counted.begin_step(0, Phase.DECODE)
            with torch.cuda.graph(graph):
                for layer in range(layers):
                    counted.count(layer, ids[layer].clone(), first, form, lasting=True)
            want = np.zeros((layers, 2, 2, experts), dtype=np.int64)
            steps = rows.pick(200, 8)
            asked = []
            for number in range(steps):
                asked.append((counted.read_async(), want.copy()))
                new = random.integers(-1, first + experts + 3, (layers, tokens, k)).astype(np.int32)
                valid, phase = int(random.integers(0, tokens + 1)), Phase(int(random.integers(0, 2)))
                streams = number % 4 == 3
                if streams:
                    phase = Phase.PREFILL
                ids.copy_(torch.from_numpy(new << 16 if form is IdFormat.PACKED else new))
                counted.begin_step(valid, phase)
                if streams:
                    for layer in range(layers):
                        counted.count(layer, ids[layer], first, form, in_place=False)
                else:
                    graph.replay()
                for layer in range(layers):
                    local = new[layer, :valid].ravel() - first
                    routed = np.bincount(local[(local >= 0) & (local < experts)], minlength=experts)
                    want[layer, phase, ROUTED] += routed
                    if not streams:
                        want[layer, phase, ACTIVATIONS] += routed > 0
            shape = {"tokens": tokens, "experts": experts, "ids": form.value, "steps": steps}
            wrong = int((counted.read().since(start).counts != want).sum())
            rows.put("counts_wrong", "counts", [wrong], **shape)
            late = sum(int((counts.wait().since(start).counts != then).sum()) for counts, then in asked)
            rows.put("asked_counts_wrong", "counts", [late], **shape)
            if wrong or late:
                raise AssertionError(f"{wrong} counts, and {late} that were asked for, differ from a plain count: {shape}")


def recording(rows: Rows) -> None:
    """Captured copies of expert ids against the ids: formats, graphs of two batch sizes, steps that begin before the ids of the
    last one have arrived."""
    random = np.random.default_rng(11)
    layers, k, experts = 4, 8, 256
    for form in (IdFormat.PLAIN, IdFormat.PACKED):
        recorder = Recorder(Path("unused"), [ExpertLocation.trivial(experts, range(experts))] * layers, k, 32, "cuda")
        graphs = {tokens: captured_recording(recorder, layers, tokens, k, form) for tokens in (1, 32)}
        want = []
        steps = rows.pick(400, 12)
        for step in range(steps):
            tokens = int(random.choice([1, 32]))
            graph, ids = graphs[tokens]
            new = random.integers(0, experts, (layers, tokens, k)).astype(np.int32)
            ids.copy_(torch.from_numpy(new << 16 if form is IdFormat.PACKED else new))
            graph.replay()
            before = recorder.dropped_steps
            recorder.end_step([str(row) for row in range(tokens)], [2 * step] * tokens)  # no request goes on
            if recorder.dropped_steps == before:
                want.append(new.transpose(1, 0, 2))
        recorder.poll(wait=True)
        trace, expected = recorder.log.trace(recorder.log.tokens), np.concatenate(want)
        wrong = int((trace.ids != expected).sum()) if trace.ids.shape == expected.shape else expected.size
        rows.put("ids_wrong", "ids", [wrong], ids=form.value, steps=steps, dropped=recorder.dropped_steps)
        if wrong and computes():
            raise AssertionError(f"{wrong} recorded ids differ from what was routed")


def captured_recording(
    recorder: Recorder, layers: int, tokens: int, k: int, form: IdFormat
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph in which all layers record, and the ids that they read."""
    ids = torch.zeros(layers, tokens, k, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            recorder.record(layer, ids[layer], form)
    return graph, ids


def moves(rows: Rows) -> None:
    """Random promotions and demotions under a graph that was captured once: every replay's output is the first one's, bit for
    bit. Half of the moves are made by another thread while the graph is replayed."""
    experts, expert_bytes = rows.pick(96, 12), 3 * MIB + 7 * 4096
    count = rows.pick(1000, 40)
    memory = CudaMemory()
    tensor = ExpertTensor(memory, "experts", ExpertLayout(experts, expert_bytes))
    extents = tensor.layout.num_extents
    tensor.place(np.arange(extents) < extents // 2)
    weights = tensor.bytes()
    random = np.random.default_rng(3)
    values = random.standard_normal(experts * expert_bytes // 2, dtype=np.float32)
    weights.copy_(torch.from_numpy(values).bfloat16().view(torch.uint8))
    columns = 64
    matrix = weights.view(torch.bfloat16).view(-1, columns)
    x = torch.from_numpy(random.standard_normal((columns, 16), dtype=np.float32)).bfloat16().cuda()
    out = torch.zeros(matrix.shape[0], 16, dtype=torch.bfloat16, device="cuda")
    captured = 0

    def step() -> None:
        torch.mm(matrix, x, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    captured += 1
    graph.replay()
    expected, address = out.cpu(), tensor.address
    on_device = expected.cuda()
    different, moved, done = 0, 0, 0
    for number in range(count):
        if rows.late():
            break
        after = tensor.resident.copy()
        swapped = random.choice(extents, size=random.integers(1, 5), replace=False)
        after[swapped] = ~after[swapped]
        moved += tensor.layout.taken_by(after ^ tensor.resident)
        mover = threading.Thread(target=lambda after=after: (tensor.demote(after), tensor.promote(after)))
        mover.start()
        if number % 2:
            mover.join()
        out.zero_()
        graph.replay()
        different += not torch.equal(out.cpu(), expected) if rows.small else not bool((out == on_device).all())
        mover.join()
        done += 1
    rows.put("moves", "replays that differ", [different], moves=done, captures=captured, moved_gb=moved / 1e9)
    same_address = tensor.address == address == weights.data_ptr()
    rows.put("moves", "bool", [same_address], figure="the address stayed")
    intact = torch.equal(weights.cpu(), torch.from_numpy(values).bfloat16().view(torch.uint8))
    rows.put("moves", "bool", [intact], figure="the bytes stayed")
    if different or not same_address or not intact:
        raise AssertionError(f"{different} of {done} replays differ; address kept: {same_address}; bytes kept: {intact}")


def identity(rows: Rows) -> None:
    """Bytes after random resident sets, checked on the GPU against a copy in plain memory."""
    experts, expert_bytes = rows.pick(60, 8), rows.pick(17 * MIB + 4096, 3 * MIB + 4096)
    memory = CudaMemory()
    tensor = ExpertTensor(memory, "experts", ExpertLayout(experts, expert_bytes))
    tensor.place(np.zeros(tensor.layout.num_extents, dtype=bool))
    weights = tensor.bytes()
    plain = torch.randint(0, 256, (tensor.layout.nbytes,), dtype=torch.uint8, device="cuda")
    weights.copy_(plain)
    random = np.random.default_rng(5)
    rounds = rows.pick(40, 4)
    for done in range(rounds):
        if rows.late():
            return
        after = random.random(tensor.layout.num_extents) < random.random()
        tensor.demote(after)
        tensor.promote(after)
        same = torch.equal(weights.cpu(), plain.cpu()) if rows.small else torch.equal(weights, plain)
        if not same:
            raise AssertionError(f"bytes changed in round {done}")
        if done % 4 == 0:  # new bytes, written wherever the pages are now
            plain = torch.randint(0, 256, (tensor.layout.nbytes,), dtype=torch.uint8, device="cuda")
            weights.copy_(plain)
    rows.put("identity", "rounds", [rounds], gib=tensor.layout.nbytes / 2**30)


def load(rows: Rows) -> None:
    """A layer after the other as a server loads them, 78 % resident, and what the driver reports as free afterwards."""
    shape = GLM_45_AIR.toy if rows.small else GLM_45_AIR
    memory = CudaMemory()
    torch.zeros(1, device="cuda")
    resident = np.arange(shape.experts) < round(0.78 * shape.experts)
    for repeat in range(3):
        if rows.late():
            return
        before, tensors, held = memory.info(), [], []
        for layer in range(rows.pick(6, 2)):
            for name, nbytes in (("w13", 2), ("w2", 1)):
                expert = nbytes * shape.intermediate * shape.hidden
                tensor = ExpertTensor(memory, f"{name} of layer {layer}", ExpertLayout(shape.experts, expert))
                flat = tensor.bytes()
                tensor.place(tensor.layout.holding(resident))
                staging = torch.zeros(expert, dtype=torch.uint8)
                for index in range(shape.experts):
                    flat[index * expert : (index + 1) * expert].copy_(staging)
                tensors.append(tensor)
                held.append(flat)
        torch.cuda.synchronize()
        after = memory.info()
        predicted = sum(tensor.resident_bytes for tensor in tensors)
        offloaded = sum(tensor.layout.nbytes for tensor in tensors) - predicted
        used = before.device_free - after.device_free
        rows.put("load", "GiB", [predicted / 2**30], figure="VRAM predicted", repeat=repeat)
        rows.put("load", "GiB", [used / 2**30], figure="VRAM used", repeat=repeat)
        rows.put("load", "GiB", [abs(used - predicted) / 2**30], figure="error of VRAM used", repeat=repeat)
        rows.put("load", "GiB", [offloaded / 2**30], figure="host RAM predicted", repeat=repeat)
        taken = before.host_available - after.host_available
        rows.put("load", "GiB", [taken / 2**30], figure="host RAM used", repeat=repeat)
        random, either = np.random.default_rng(repeat), 0
        for tensor in tensors:
            anew = random.permutation(tensor.resident)
            either += tensor.layout.taken_by(tensor.resident | anew)
            tensor.demote(anew)
            tensor.promote(anew)
        used = before.device_free - memory.info().device_free
        rows.put("load", "GiB", [used / 2**30], figure="VRAM used after a re-selection", repeat=repeat)
        rows.put("load", "GiB", [either / 2**30], figure="VRAM of all who were resident", repeat=repeat)
        rows.put("load", "ratio", [used / either], figure="VRAM used after a re-selection, of theirs", repeat=repeat)
        del tensors, tensor, held, flat
        gc.collect()
        left = before.device_free - memory.info().device_free
        rows.put("load", "GiB", [left / 2**30], figure="VRAM not given back", repeat=repeat)


def extension(rows: Rows) -> None:
    """The moves of ``probe`` through Python and the extension, which waits for them: their time, and what a thread that replays
    a graph notices when they are made from it or from another thread."""
    experts, expert_bytes = rows.pick(128, 8), rows.pick(8 * MIB, BLOCK_BYTES)
    memory = CudaMemory()
    managed = memory.allocate(experts * expert_bytes, "experts")
    weights = memory.tensor(managed)
    spans = [Span(index * expert_bytes, expert_bytes) for index in range(experts)]

    def bring(groups: Sequence[Sequence[Span]], location: Location) -> float:
        """Seconds until all bytes are there."""
        start = time.perf_counter()
        for group in groups:
            memory.place(managed, group, location)
        return time.perf_counter() - start

    bring([spans], Location.HOST)
    weights.random_()
    for location, other in ((Location.DEVICE, Location.HOST), (Location.HOST, Location.DEVICE)):
        for calls, groups in (("a span a call", [[span] for span in spans]), ("all spans in a call", [spans])):
            times = []
            for _ in range(5):
                bring([spans], other)
                times.append(bring(groups, location))
            labels = {"to": location.value, "calls": calls, "expert_mib": expert_bytes / MIB}
            rows.put("extension_call", "us a span", [1e6 * seconds / experts for seconds in times], **labels)
            rows.put("extension_move", "GB/s", [managed.nbytes / seconds / 1e9 for seconds in times], **labels)

    scratch = torch.zeros(rows.pick(64 * MIB, MIB), dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            scratch.add_(1)

    def replays(count: int) -> list[float]:
        """Milliseconds of one replay after the other, as the thread that waits for each sees them. Waits for its own stream
        alone: all streams would end with the moves."""
        return [replay() for _ in range(count)]

    def replay() -> float:
        start = time.perf_counter()
        graph.replay()
        torch.cuda.current_stream().synchronize()
        return (time.perf_counter() - start) * 1e3

    def promote() -> None:
        memory.place(managed, spans[:16], Location.DEVICE)

    for where in ("scheduler", "helper"):
        usual, worst, lost, control = [], [], [], []
        for _ in range(rows.pick(8, 2)):
            bring([spans], Location.HOST)
            before = statistics.median(replays(rows.pick(50, 3)))
            held = 0.0
            thread = threading.Thread(target=promote)
            if where == "helper":
                thread.start()
            else:
                start = time.perf_counter()
                promote()
                held = (time.perf_counter() - start) * 1e3
            seen = [replay()]
            while thread.is_alive():
                seen.append(replay())
            if where == "helper":
                thread.join()
            usual.append(before)
            worst.append(max(seen))
            # What a replay gains counts too, so that noise alone has no sum.
            lost.append(held + sum(each - before for each in seen))
            control.append(sum(each - before for each in replays(len(seen))))
        rows.put("extension_stall", "ms", usual, thread=where, figure="replay before")
        rows.put("extension_stall", "ms", worst, thread=where, figure="slowest replay")
        rows.put("extension_stall", "ms", lost, thread=where, figure="time lost to 16 promotions")
        rows.put("extension_stall", "ms", control, thread=where, figure="time lost without any")


PARTS = {each.__name__: each for each in (contract, counters, recording, moves, identity, load, extension)}

if __name__ == "__main__":
    if not computes():
        print("no kernel computes here: outputs are not checked on the device, and no time is a measurement")
    run_part(PARTS)
