"""One rank's manager over a small emulated model, with its configuration and profiles."""

import msgspec
import numpy as np
import torch
from builders.configs import served_config

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.cpu.slots import CpuSlots
from sglang_uvm_offload.expert_location import ExpertLocation
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.memory.slots import Rows, SlotLayer
from sglang_uvm_offload.policy.slot_policy import WHOLE
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.placement import InitialPlacement
from sglang_uvm_offload.residency.rearranging import Rearranging
from sglang_uvm_offload.residency.status import rank_status
from sglang_uvm_offload.routing.counts import ALL_ROWS, IdFormat, Phase, RoutingCounts
from sglang_uvm_offload.routing.profile import Profile, RoutedModel
from sglang_uvm_offload.streaming.model_slots import LayerSlots

E, LAYERS = 8, 3


def config(**flags):
    return served_config(**{"num_resident": 3, **flags})


def placed_layer(memory, shard, choose, **more):
    """Makes a layer and places its tensors. The arguments are those of ``ExpertLayer`` and its ``place``."""
    layer = ExpertLayer(memory, shard)
    layer.place(choose, **more)
    return layer


def slots_of(pool, home):
    """Returns the range of the slots behind a layer's tensor."""
    kind = pool._kind_of(home)
    return pool.memory.part(kind.whole, pool._slots(kind), "slots")


def slots_on_cpu(experts):
    """Returns what a one-layer model needs to compute from slots: counters, the device's slots, and a kernel's view of them."""
    served = SlotLayer([Rows(*each) for each in experts.slot_rows()], experts.num_experts, 0, experts.pool.first_slot(0))
    counters = CpuRoutingCounters(1, experts.num_experts)
    device = CpuSlots(counters, [served], [experts.pool.num_slots])
    device.set_share(np.full((1, experts.num_experts), WHOLE, dtype=np.uint8))
    return counters, device, LayerSlots(experts, served, device)


class Rank:
    """One rank's manager over a model of ``LAYERS`` layers with one tensor each. By default an expert is one block of emulated
    memory."""

    def __init__(
        self, cfg, memory=None, broadcast_decision=lambda decide: decide(), ep_rank=0, ep_size=1, num_shared=0, profile=None,
        make_counters=CpuRoutingCounters, expert_bytes=PAGE_BYTES, experts=None, link=None, **more,
    ):  # fmt: skip
        """``experts`` gives the expert at each place of every layer, over all ranks; None: each at the place of its id.
        ``link`` is the measured link."""
        self.manager = OffloadManager(
            cfg, memory or EmulatedMemory(), make_counters, broadcast_decision, progress=lambda: False, **more
        )
        routed = (E if experts is None else len(experts)) // ep_size
        local, self.places = routed + num_shared, range(ep_rank * routed, (ep_rank + 1) * routed)
        self.model = self.manager.begin_model(False)
        self.modules = []
        for layer_id in range(1, LAYERS + 1):
            location = None if experts is None else self.located(experts)
            layer = self.model.add_layer(
                self.manager.memory, LayerShard(layer_id, local, num_shared, ep_rank, ep_size, location)
            )
            module = torch.nn.Module()
            with AllocationMode(local, layer.allocate):
                module.w13 = torch.empty(local, expert_bytes, dtype=torch.uint8)
            layer.sync_tensors(module)
            self.modules.append(module)
        self.manager.place_model(self.model, InitialPlacement(cfg, profile))
        self.manager.link = link
        self.manager.finish_model(self.model)
        self.model.place_slots()
        self.rearranging = Rearranging(self.manager)

    def step(self, ids, phase=Phase.DECODE, rows=ALL_ROWS, streams=False):
        """Runs a forward step. ``ids`` is a list of top-k lists for every layer, or one such list per layer. With ``streams``
        the step counts as streamed, but copies nothing."""
        per_layer = ids if isinstance(ids, dict) else dict.fromkeys(range(LAYERS), ids)
        tokens = len(per_layer[0])
        self.manager.begin_step(self.model, rows, tokens, phase, streams=streams)
        for layer in range(LAYERS):
            self.model.counters.count(layer, torch.tensor(per_layer[layer]), 0, IdFormat.PLAIN, in_place=not streams)
        self.manager.end_step(self.model)

    def located(self, experts):
        return ExpertLocation(np.array(experts), self.places)

    def status(self):
        """Returns the status as JSON has it."""
        return msgspec.to_builtins(rank_status(self.manager))

    def counted(self):
        """Returns all routing so far, by place."""
        self.manager.ledger.catch_up()
        return self.manager.ledger.counted

    def resident(self):
        return [np.flatnonzero(layer.resident).tolist() for layer in self.model.layers]


class Draft:
    """A one-layer draft model beside the model of ``rank``."""

    def __init__(self, rank):
        self.manager = rank.manager
        self.model = self.manager.begin_model(draft=True)
        self.layer = self.model.add_layer(self.manager.memory, LayerShard(0, E))
        self.fill(PAGE_BYTES)
        self.manager.place_model(self.model)
        self.manager.finish_model(self.model)

    def fill(self, expert_bytes):
        """Replaces its tensor with a new one."""
        self.module = torch.nn.Module()
        with AllocationMode(E, self.layer.allocate):
            self.module.w13 = torch.empty(E, expert_bytes, dtype=torch.uint8)
        self.layer.sync_tensors(self.module)

    def step(self, ids):
        self.manager.begin_step(self.model, ALL_ROWS, len(ids), Phase.DECODE)
        self.model.counters.count(0, torch.tensor(ids), 0, IdFormat.PLAIN)
        self.manager.end_step(self.model)

    def resident(self):
        return np.flatnonzero(self.layer.resident).tolist()


def profile_of(hot, steps=100):
    """Makes a profile in which every decode step used ``hot[layer]``."""
    model = RoutedModel("m", "M", tuple(range(1, LAYERS + 1)), E, 3)
    counts = np.zeros((LAYERS, 2, 2, E), dtype=np.int64)
    for layer, ids in enumerate(hot):
        counts[layer, Phase.DECODE, :, ids] = steps
    return Profile(model, RoutingCounts(counts, (0, steps)))
