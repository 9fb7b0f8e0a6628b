"""One rank that serves ``model`` with this plugin's own objects: memory, manager, thread of moves, stream buffers, slots, saved
profile. A program of its own process; it arms one fault at the beginning of one phase."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faults import model

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.cpu.slots import CpuSlots
from sglang_uvm_offload.cpu.staging import CpuStaging
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.device import relax_capture
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.cuda.staging import CudaStaging
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.files.autosave import LAST_SECONDS, Saver
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.memory.slots import BlockLists
from sglang_uvm_offload.memory.staging import Staging
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.residency import evictions
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.placement import InitialPlacement
from sglang_uvm_offload.residency.status import rank_status
from sglang_uvm_offload.routing.counts import IdFormat, Phase
from sglang_uvm_offload.routing.profile import Profile, RoutedModel
from sglang_uvm_offload.routing.profile_file import ProfileFile
from sglang_uvm_offload.streaming.model_slots import ModelSlots
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.streamer import Reading, Streamer

PHASES = ("load", "warm-up", "serve", "re-advise", "stream", "look", "save", "end")
RESIDENT, WARMUP, STREAM_TOKENS, SLOT_BLOCK = 6, 12, 16, 16
evictions.ROOM_BYTES = sys.maxsize
"""Residents are looked at although VRAM is free."""


class Rank:
    """``backend``: "uvm" over the stand-in driver, or "emulated". ``slots``: of each layer; four seconds instead of two on the
    stand-in."""

    def __init__(self, backend: str, profile: Path, slots: int = 0):
        self.cuda = backend == "uvm"
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        self.profile_path = profile
        self.seconds = 0.0
        """By the manager's clock. Half of one passes between steps, so that all that is due by time comes by steps."""
        self.config: OffloadConfig = config(slots)
        self.hung = False
        """Whether the thread of moves is known to hang: a server waits for it only where tensors may be replaced."""
        self.streams = False
        self.shift = 0
        """How often weights were replaced."""
        self.answers = 0
        self.ids: list[list[int]] = []

    def load(self) -> None:
        begin = start_thread if self.cuda else None
        self.executor = ThreadPoolExecutor(1, "expert offload", initializer=begin)
        self.memory: Memory = CudaMemory(0) if self.cuda else EmulatedMemory(BLOCK_BYTES)
        counters = CudaRoutingCounters if self.cuda else CpuRoutingCounters
        self.manager = OffloadManager(
            self.config,
            self.memory,
            counters,
            lambda decide: decide(),
            progress=lambda: False,
            clock=lambda: self.seconds,
            executor=self.executor,
        )
        earlier = Profile.load(self.profile_path) if self.profile_path.exists() else None
        self.experts = self.manager.begin_model(False)
        self.modules = [self._module(index) for index in range(model.LAYERS)]
        self.manager.place_model(self.experts, InitialPlacement(self.config, earlier))
        self._write_weights()
        self.manager.finish_model(self.experts)
        self.experts.place_slots()
        slots = CudaSlots if self.cuda else CpuSlots
        self.slots = ModelSlots(self.experts.layers, partial(slots, self.experts.counters))  # type: ignore[arg-type]
        self.streamer = Streamer(
            self.experts.layers, self._staging(), self.slots, STREAM_TOKENS, self.manager.ledger.add_streamed
        )
        self.manager.check_for_evictions()
        self.manager.wait_for_moves()
        routed = RoutedModel("small", "Small", tuple(range(model.LAYERS)), model.EXPERTS, model.TOP_K)
        layers = self.experts.layers
        file = ProfileFile(
            self.profile_path,
            earlier or Profile.empty(routed),
            "this run",
            [layer.layer_id for layer in layers],
            "all",
        )
        self.saver = Saver(
            "profile", lambda wait: file.pending(self.manager.routing_by_expert(wait)), clock=lambda: self.seconds
        )

    def _staging(self) -> Staging | None:
        """For the layers that have no slots, or too few to stream into."""
        without = [layer for layer in self.experts.layers if not self.slots.has_room(layer.index)]
        if not without:
            return None
        made = CudaStaging if self.cuda else CpuStaging
        return made(0 if self.cuda else self.memory, max(map(buffer_bytes, without)), 2)  # type: ignore[arg-type]

    def _module(self, index: int) -> torch.nn.Module:
        layer, module = self.experts.add_layer(self.memory, LayerShard(index, model.EXPERTS)), torch.nn.Module()
        with AllocationMode(model.EXPERTS, layer.allocate):
            for name, nbytes in model.TENSORS.items():
                empty = torch.empty(model.EXPERTS, nbytes, dtype=torch.uint8, device=self.device)
                setattr(module, name, torch.nn.Parameter(empty, requires_grad=False))
        layer.sync_tensors(module)
        return module

    def _write_weights(self) -> None:
        for index, module in enumerate(self.modules):
            for name in model.TENSORS:
                getattr(module, name).data.copy_(self._weights(index, name))

    def _weights(self, index: int, name: str) -> torch.Tensor:
        return torch.from_numpy(np.roll(model.weights(index, name), -self.shift, axis=0))

    def replace_weights(self) -> None:
        """As an update between two steps does: each expert gets the weights of the next one."""
        self.shift += 1
        self._write_weights()
        self.slots.bytes_written()

    # Serving, as plugin/rank/step_hooks and plugin/rank/fused_moe do it.

    def answer(self, prompt: int, domain: int, tokens: int, length: int = 1) -> None:
        """Raises ``WrongAnswer``."""
        got = model.answer(prompt, domain, tokens, length, self._route, self._begin, self._read, self._end)
        expected = model.expected(prompt, domain, tokens, length, self.shift)
        if got != expected:
            raise WrongAnswer(f"prompt {prompt}: {got}, not {expected}")
        self.answers += 1

    def _begin(self, rows: int) -> None:
        self.seconds += 0.5
        phase = Phase.PREFILL if rows > 1 else Phase.DECODE
        self.streams = rows > 1 and self.streamer.streams(rows)
        self.manager.begin_step(self.experts, rows, rows, phase, streams=self.streams)
        self.slots.begin_step(rows, phase, [(0, rows)] if phase is Phase.PREFILL else (), streams=self.streams)
        if self.streams:
            self.streamer.begin_step()

    def _route(self, layer: int, ids: list[list[int]]) -> None:
        self.ids = ids

    def _read(self, layer: int, experts: Sequence[int]) -> list[int]:
        reading = self.streamer.enter(layer) if self.streams else None
        failed = True
        try:
            seen = self._read_from(layer, experts, in_place=reading is None)
            failed = False
            return seen
        finally:
            if isinstance(reading, Reading):
                self.streamer.leave(reading, failed)

    def _read_from(self, layer: int, experts: Sequence[int], *, in_place: bool) -> list[int]:
        counters, ids = self.experts.counters, torch.tensor(self.ids, dtype=torch.int32).to(self.device)
        assert counters is not None
        counters.count(layer, ids, 0, IdFormat.PLAIN, in_place=in_place)
        bases = [getattr(self.modules[layer], name).data_ptr() for name in model.TENSORS]
        used, rows = sorted(set(experts)), {}
        held = self.slots.at(bases[0])
        named = used
        if held is not None:
            blocks = torch.tensor(used, dtype=torch.int32).to(self.device)
            padded = torch.tensor([len(used) * SLOT_BLOCK], dtype=torch.int32).to(self.device)
            held.resolve(ids, BlockLists(blocks, padded, SLOT_BLOCK))
            named = blocks.cpu().tolist()
        if self.cuda:
            torch.cuda.current_stream().synchronize()  # and not what others do: the layer must have waited for what it reads
        for expert, row in zip(used, named, strict=True):
            places = [base + row * nbytes for base, nbytes in zip(bases, model.TENSORS.values(), strict=True)]
            rows[expert] = model.checksum(*places)
        return [rows[expert] for expert in experts]

    def _end(self) -> None:
        if self.streams:
            self.streamer.end_step()
        self.manager.end_step(self.experts)
        self.manager.poll_if_due()
        self.settle()

    def settle(self) -> None:
        """Let the thread of moves finish, so that the same calls come in the same phases."""
        if not self.hung:
            self.executor.submit(lambda: None).result()

    # Phases.

    def run(self, phase: str) -> None:
        getattr(self, phase.replace("-", "_"))()

    def warm_up(self) -> None:
        for prompt in range(2):
            self.answer(prompt, 0, 8)
        self.settle()

    def serve(self) -> None:
        for prompt in range(10, 12):
            self.answer(prompt, 0, 4)

    def re_advise(self) -> None:
        for prompt in range(20, 22):
            self.answer(prompt, 2, 16)

    def stream(self) -> None:
        self.answer(30, 1, 4, length=24)
        self.answer(31, 1, 2, length=24)

    def look(self) -> None:
        self.manager.check_for_evictions()
        self.settle()
        self.answer(40, 1, 1)
        rank_status(self.manager)

    def save(self) -> None:
        self.seconds += 1000.0
        self.saver.save_if_due()
        self.answer(50, 3, 1)
        if (thread := self.saver._thread) is not None:
            thread.join(LAST_SECONDS)  # it would replace a file that is broken at the end, and leave nothing new to save

    def end(self) -> None:
        """Save, and give all memory back, like a server that shuts down."""
        self.saver.finish()
        for index, module in enumerate(self.modules):
            for name in model.TENSORS:
                if not torch.equal(getattr(module, name).data.cpu(), self._weights(index, name)):
                    raise WrongAnswer(f"the bytes of {name} of layer {index} changed")
        self.executor.shutdown(wait=not self.hung)
        self.modules.clear()

    def faults(self) -> list[str]:
        """What the rank's status says it goes on without."""
        found = (self.manager.fault, self.streamer.fault)
        return [fault for fault in found if fault is not None]


class WrongAnswer(AssertionError):
    """A token or a byte differs from that of the same traffic without faults."""


def config(slots: int) -> OffloadConfig:
    requested = parse(
        {
            "num_resident": RESIDENT,
            "warmup_tokens": WARMUP,
            "adapt": "continuous",
            "slots": str(slots) if slots else None,
            "stream_tokens": STREAM_TOKENS,
        }
    )
    assert requested is not None
    return requested.resolved()


def start_thread() -> None:
    torch.cuda.set_device(0)
    relax_capture()


def serve(backend: str, profile: Path, arm: Callable[[str, Rank], None], told: dict[str, Any], slots: int = 0) -> None:
    """Run all phases, with ``arm(phase, rank)`` before each, and write to ``told`` what happened."""
    rank = Rank(backend, profile, slots)
    for phase in PHASES:
        told["phase"] = phase
        arm(phase, rank)
        rank.run(phase)
        told |= {"answers": rank.answers, "faults": rank.faults() if phase != "end" else told["faults"]}
    arm("ended", rank)
    told["phase"] = "ended"
    memory = rank.memory
    rank.__dict__.clear()
    gc.collect()
    if isinstance(memory, EmulatedMemory):
        told["managed_bytes"] = sum(live.managed.nbytes for live in memory._live.values())


class Standin:
    """What the stand-in driver counts."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.standin_managed_bytes.restype = ctypes.c_size_t

    @property
    def failures(self) -> int:
        return self._library.standin_failures()

    def seen(self, index: int) -> int:
        return self._library.standin_seen(index)

    @property
    def managed_bytes(self) -> int:
        return self._library.standin_managed_bytes()


def main(job: dict[str, Any]) -> None:
    """``job``: ``backend``, ``folder``, and the fault (see ``arm``). Prints what happened, and ends as a server does: with
    0, or with the reason on stderr."""
    from faults.arming import arm

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    np.random.seed(0)
    told: dict[str, Any] = {"phase": "start", "answers": 0, "faults": [], "wrong": None}
    try:
        serve(job["backend"], Path(job["folder"]) / "profile.npz", arm(job, told), told, job.get("slots", 0))
    except WrongAnswer as wrong:
        told["wrong"] = str(wrong)
    finally:
        os.environ.pop("STANDIN_FAIL", None)
        if job["backend"] == "uvm":
            standin = Standin()
            told |= {"injected": told.get("injected", 0) + standin.failures, "managed_bytes": standin.managed_bytes}
        print(json.dumps(told), flush=True)
    if told["wrong"] is None and told.get("hung"):
        os._exit(0)  # a server's process is killed, with all its threads
