"""Parts that run the project's extension and memory layer on the device: whether promises hold, and what moves cost."""

from __future__ import annotations

import gc
import itertools
import threading
import time

import numpy as np
import torch

from benchmarks.gpu.environment import computes
from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.timing import capture
from scripts.harness.memory_contract import CHECKS
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.ops import device_ops
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, ExpertLayout
from sglang_uvm_offload.memory.protocol import Location, Span

MIB = 1 << 20


def contract(rows: Rows) -> None:
    """Checks every promise of ``Memory``, and one about threads in CUDA. Reports broken ones at the end."""
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
    """The other thread advises, prefetches and waits while this one captures."""
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


def moves(rows: Rows) -> None:
    """Promotes and demotes at random under a graph that is captured once: every replay's output must equal the first one's, bit
    for bit. Another thread makes half of the moves while the graph replays."""
    experts, expert_bytes = rows.pick(96, 12), 3 * MIB + 7 * 4096
    count = rows.pick(1000, 40)
    memory = CudaMemory()
    tensor = ExpertTensor.allocated(memory, "experts", ExpertLayout(experts, expert_bytes))
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


def load(rows: Rows) -> None:
    """Loads layer by layer as a server does, 78 % resident, and compares what the driver then reports as free."""
    experts, matrix_bytes = 128, rows.pick(4096 * 1408 * 2, 256 * 128 * 2)
    memory = CudaMemory()
    torch.zeros(1, device="cuda")
    resident = np.arange(experts) < round(0.78 * experts)
    for repeat in range(3):
        if rows.late():
            return
        before, tensors, held = memory.info(), [], []
        for layer in range(rows.pick(6, 2)):
            for name, expert in (("w13", 2 * matrix_bytes), ("w2", matrix_bytes)):
                tensor = ExpertTensor.allocated(memory, f"{name} of layer {layer}", ExpertLayout(experts, expert))
                flat = tensor.bytes()
                tensor.place(tensor.layout.holding(resident))
                staging = torch.zeros(expert, dtype=torch.uint8)
                for index in range(experts):
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


def sustained(rows: Rows) -> None:
    """Replays a graph that reads experts while some move up and down all the time, with more and more bytes per call: a span is
    unmapped from its first copy on."""
    resident, moving = rows.pick(512 * MIB, 4 * MIB), rows.pick(128 * MIB, 8 * MIB)
    memory = CudaMemory()
    managed = memory.allocate(resident + moving, "experts")
    words = memory.tensor(managed).view(torch.int64)
    memory.place(managed, [Span(0, managed.nbytes)], Location.DEVICE)
    words.random_()
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = capture(lambda: torch.sum(words, dim=0, out=total))
    graph.replay()
    expected, ops = int(total), device_ops(memory.device)

    def move(piece: int, over: threading.Event) -> None:
        """Calls the driver as the memory layer does, except for the size. Each piece arrives before the next one moves."""
        stream = torch.cuda.Stream().cuda_stream
        for location in itertools.cycle((Location.HOST, Location.DEVICE)):
            for at in range(resident, managed.nbytes, piece):
                if over.is_set():
                    return
                ops.place(memory.device, managed.address, [Span(at, min(piece, managed.nbytes - at))], location, stream)

    for piece in (0, 2 * MIB, rows.pick(16 * MIB, 4 * MIB), moving):
        if rows.late():
            return
        over, times, wrong = threading.Event(), [], 0
        mover = threading.Thread(target=move, args=(piece, over)) if piece else None
        if mover:
            mover.start()
        until = time.perf_counter() + rows.pick(1500, 50) / 1e3
        while time.perf_counter() < until:
            started = time.perf_counter()
            graph.replay()
            torch.cuda.current_stream().synchronize()
            times.append((time.perf_counter() - started) * 1e3)
            wrong += int(total) != expected
        over.set()
        if mover:
            mover.join()
        memory.place(managed, [Span(0, managed.nbytes)], Location.DEVICE)
        labels = {"moves": f"{piece // MIB} MiB a call" if piece else "none"}
        for figure, share in (("p50", 50), ("p99", 99), ("slowest", 100)):
            rows.put("sustained", "ms", [float(np.percentile(times, share))], figure=figure, **labels)
        rows.put("sustained_wrong", "replays", [wrong], done=len(times), **labels)
        if wrong and computes():
            raise AssertionError(f"{wrong} of {len(times)} replays read other bytes while experts moved")


PARTS = {each.__name__: each for each in (contract, moves, load, sustained)}

if __name__ == "__main__":
    if not computes():
        print("no kernel computes here: outputs are not checked on the device, and no time is a measurement")
    run_part(PARTS)
