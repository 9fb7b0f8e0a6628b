"""A long prefill on a GPU without free VRAM, over the stand-in driver: the plugin's manager, its two threads and its streamer,
and residents that prefer the GPU. It ends, all bytes are right, and the log names the cure.

A prefill hangs there if something waits for VRAM while it holds what others wait for. Nothing in the plugin waits for VRAM:
what needs some finds it, has the driver evict for it, or fails. These waits there are, and each ends:

- The thread that launches steps waits for counts of earlier steps and for the rank that decides. It waits for moves only as the
  server becomes ready, before an update of the weights and before it sleeps, ten minutes at most.
- A move gives VRAM up before it takes any, looks once whether more is free, and waits for its own prefetches alone, on a stream
  that waits for no other.
- A read that faults waits for the driver, which evicts the block that was populated longest ago, and keeps what it freed for
  that read (``block_alloc_gpu_chunk`` of uvm_va_block.c): no other fault takes it away. ``cudaMalloc`` and prefetches get
  theirs the same way. No eviction waits for a kernel: one that runs faults when it reads the block next.
- Blocks of the slots' kernel wait for the one that decides, which is running by then and needs plain VRAM alone for it.

Where no managed block is left to evict, ``cudaMalloc`` and prefetches fail, and a fault ends the process with a CUDA error. The
naive variants below wait for VRAM, and hang."""

from __future__ import annotations

import json
from typing import Any

import pytest
from standin.run import Ran, Standin

from scripts.harness.patience import patience

MIB = 1 << 20
VRAM = 256 * MIB
RESIDENT, TAKEN = 16 * MIB, 8 * MIB
"""Bytes of residents, and what a long prompt takes for good on the full card: half of them are evicted for it."""

PROGRAM = """
import ctypes, faulthandler, logging, sys, time
from concurrent.futures import ThreadPoolExecutor
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.device import relax_capture
from sglang_uvm_offload.cuda.staging import CudaStaging
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.residency.manager import CHECK_SECONDS, OffloadManager
from sglang_uvm_offload.residency.placement import InitialPlacement
from sglang_uvm_offload.routing.counts import ALL_ROWS, IdFormat, Phase
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.streamer import Streamer
logging.basicConfig(level=logging.INFO)
LAYERS, E, EXPERT, LONG = 4, 16, 512 << 10, 64
flags = {"num_resident": 8, "resident_selection": "frequency", "warmup_tokens": LONG, "adapt": "continuous"}
flags |= {"stream_tokens": LONG, "headroom_gb": 0.5}
config, now, wrong, beside = parse(flags).resolved(), [0.0], [], [0]
def thread():
    return ThreadPoolExecutor(1, initializer=relax_capture)
memory = CudaMemory()
manager = OffloadManager(
    config, memory, CudaRoutingCounters, lambda decide: decide(), lambda: False, lambda: now[0], thread(), thread()
)
model, modules, written = manager.begin_model(False), [], []
for index in range(LAYERS):
    layer, module = model.add_layer(manager.memory, LayerShard(index, E)), torch.nn.Module()
    with AllocationMode(E, layer.allocate):
        module.w13 = torch.empty(E, EXPERT, dtype=torch.uint8, device="cuda")
    layer.sync_tensors(module)
    modules.append(module)
    written.append(torch.from_numpy(np.random.default_rng(index).integers(0, 255, (E, EXPERT), dtype=np.uint8)))
manager.place_model(model, InitialPlacement(config, None))
for module, values in zip(modules, written):
    module.w13.copy_(values)
manager.finish_model(model)
staging = CudaStaging(0, max(map(buffer_bytes, model.layers)), 2)
streamer = Streamer(model.layers, staging, None, LONG, lambda row, nbytes: None)
manager.begin_serving()
manager.check_for_evictions()
manager.wait_for_moves()
place = memory.place
def place_slowly(*arguments):
    time.sleep(0.01)
    place(*arguments)
memory.place = place_slowly
seen = torch.empty(E, EXPERT, dtype=torch.uint8).pin_memory()
runtime = ctypes.CDLL("libcuda.so.1")
def shuffle(seed):
    runtime.standin_shuffle(ctypes.c_longlong(seed))
def plain(nbytes):
    address = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes)) == 0
    return address
def step(ids, phase, streams=False):
    manager.begin_step(model, ALL_ROWS, len(ids), phase, streams=streams)
    if streams:
        streamer.begin_step()
    for row in range(LAYERS):
        model.counters.count(row, torch.tensor(ids).cuda(), 0, IdFormat.PLAIN, in_place=not streams)
        activations = plain(2 * BLOCK) if len(ids) >= LONG else None
        reading = streamer.enter(row) if streams else None
        used = slice(ids.min(), ids.max() + 1)
        seen[used].copy_(modules[row].w13[used], non_blocking=True)
        if reading is not None:
            streamer.leave(reading)
        torch.cuda.current_stream().synchronize()
        if not torch.equal(seen[used], written[row][used]):
            wrong.append((row, streams))
        runtime.cudaFree(activations)
    if streams:
        streamer.end_step()
    manager.end_step(model)
    now[0] += 0.25
    manager.poll_if_due()
def serve(streams):
    rng = np.random.default_rng(0)
    for hot in (3, 0, 2):  # a block of four experts, which the steps after each prompt use
        for _ in range(8):
            step(np.arange(4 * hot, 4 * hot + 4)[None], Phase.DECODE)
        manager.wait_for_moves()
        manager.readvise()
        beside[0] += manager.mover.moving
        step(rng.integers(0, E, (LONG, 2)), Phase.PREFILL, streams)
        beside[0] += manager.mover.moving
        now[0] += CHECK_SECONDS
        manager.poll_if_due()
"""

FULL = f"""
plain(memory.info().device_free + {TAKEN})
"""
TELL = """
manager.wait_for_moves()
print(json.dumps({"wrong": wrong, "faults": [manager.fault, streamer.fault], "evicted": manager.evictions.evicted_bytes,
                  "moved": manager.ledger.moved_bytes, "beside": beside[0], "free": memory.info().device_free,
                  "resident": sum(layer.resident_bytes for layer in model.layers)}), flush=True)
"""


def limit(seconds: float) -> str:
    """What takes longer from here on ends with exit code 1, and shows where each thread is."""
    return f"faulthandler.dump_traceback_later({patience(seconds)}, exit=True)\n"


def run(standin: Standin, program: str) -> tuple[Ran, list[dict[str, Any]]]:
    """What ``TELL`` told, each time."""
    ran = standin.run(PROGRAM + limit(60) + program, vram=VRAM)
    return ran, [json.loads(line) for line in ran.out.splitlines()]


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "in place"])
def test_long_prompts_end_with_the_right_bytes_while_experts_move_and_the_log_names_the_cure(standin, streams):
    """With free VRAM, on the full card, and there at random timings."""
    serve = f"serve({streams})\n"
    full = "print('full', file=sys.stderr)\n" + FULL
    ran, (before, after) = run(standin, serve + TELL + full + serve + "shuffle(1)\n" + serve + TELL)
    assert ran.code == 0, ran.err
    assert (before["wrong"], before["faults"], before["evicted"]) == ([], [None, None], 0)
    assert before["free"] > TAKEN
    assert (after["wrong"], after["faults"]) == ([], [None, None])
    assert after["moved"] > before["moved"] + RESIDENT
    assert after["beside"] > before["beside"] > 0, "experts moved while a long prompt was computed"
    assert (after["free"], after["resident"]) == (0, RESIDENT)
    evictions, faults = (ran.named(call) for call in ("evict", "fault"))
    assert sum(call["nbytes"] for call in evictions) > 10 * TAKEN, "residents that came back had others evicted"
    assert {call["result"] for call in faults} == {0}
    assert TAKEN // 2 <= after["evicted"] <= RESIDENT
    said = ran.err.split("full\n")
    assert "evicted" not in said[0]
    assert "of the 16.0 MiB of resident experts were evicted from VRAM, because something else needed it" in said[1]
    assert "leave more VRAM free: use a larger --expert-offload-headroom-gb (now 0.5)" in said[1]


def test_a_move_that_finds_nothing_to_evict_ends_moves_with_the_reason(standin):
    """All residents are evicted for what nothing can evict."""
    move = f"plain({RESIDENT - TAKEN})\nmanager.residents.move_to(~model.resident_extents())\n"
    ran, (found,) = run(standin, FULL + move + TELL)
    assert "cudaMemPrefetchAsync to device failed" in found["faults"][0]
    assert "out of memory" in found["faults"][0]
    assert "Serving goes on with the experts where they are; outputs are not affected" in ran.err


WAITS_FOR_FREE_VRAM = """
def wait_for_free_vram(pairs):
    needed = sum(layer.layouts[0].taken_by(after & ~layer.resident_extents()) for layer, after in pairs)
    waiting.append("wait_for_free_vram")
    while memory.info().device_free < needed:
        time.sleep(0.01)
    waiting.pop()
manager.mover._check_vram = wait_for_free_vram
begin_step = manager.begin_step
def begin_after_moves(*arguments, **options):
    manager.wait_for_moves()
    begin_step(*arguments, **options)
manager.begin_step = begin_after_moves
"""
BRINGS_RESIDENTS_BACK = """
begin_step = manager.begin_step
def wait_for_residents():
    blocks = [(layer.tensors[0], int(at)) for layer in model.layers for at in layer.layouts[0].blocks(layer.resident_extents())]
    waiting.append("wait_for_residents")
    while len(missing := [it for it, there in zip(blocks, memory.in_vram([(t.managed, at) for t, at in blocks])) if not there]):
        for tensor, at in missing:
            memory.place(tensor.managed, [Span(at, BLOCK)], DEVICE)
    waiting.pop()
def begin_with_residents(*arguments, **options):
    manager.wait_for_moves()
    wait_for_residents()
    begin_step(*arguments, **options)
manager.begin_step = begin_with_residents
"""
ENDS_WHERE_IT_HANGS = f"""
import os, threading
waiting, alarm = [], threading.Timer(0, print)
def end():
    print("hangs in", *waiting, file=sys.stderr, flush=True)
    os._exit(1)
take_step = step
def step(*arguments, **options):
    global alarm
    alarm.cancel()
    alarm = threading.Timer({patience(3)}, end)
    alarm.start()
    take_step(*arguments, **options)
"""
"""A step, or what follows it, may take this long."""
NAIVE = {"wait_for_free_vram": WAITS_FOR_FREE_VRAM, "wait_for_residents": BRINGS_RESIDENTS_BACK}


@pytest.mark.parametrize("waits", NAIVE)
def test_what_waits_for_vram_ends_where_some_is_free_and_hangs_on_the_full_card(standin, waits):
    """A move waits until VRAM is free, and steps wait for moves; or a step waits until its residents are back, each of which
    evicts another one."""
    program = ENDS_WHERE_IT_HANGS + NAIVE[waits] + "serve(False)\n" + TELL + FULL + "serve(False)\n" + TELL
    ran, (free,) = run(standin, program)
    assert free["moved"] > RESIDENT
    assert ran.code == 1
    assert f"hangs in {waits}\n" in ran.err
