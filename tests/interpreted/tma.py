"""Prints, as JSON, what SGLang's own Triton MoE functions make of layers that compute from one stream buffer by TMA, one after
the other, while their experts move.

    tma.py on|off

Run with TRITON_INTERPRET=1 and the folder in which to look for tile configurations in SGLANG_MOE_CONFIG_DIR.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from slots import computed, in_fp8_blocks, on_cpu, tile_files

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.cpu.staging import CpuStaging
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.plugin.rank import scheduler_hooks
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.streamer import Streamer

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, GROUP, TOKENS, STEPS = 3, 4, 2, 256, 256, 128, 8, 3
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
SHAPES = {"w13": (2 * INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}


class Layer:
    """The parameters of a layer in managed memory, and a copy of them."""

    def __init__(self, memory: EmulatedMemory, index: int, random: torch.Generator):
        self.experts = ExpertLayer(memory, LayerShard(index, EXPERTS))
        self.experts.place(lambda layout: np.zeros(layout.num_extents, dtype=bool))
        self.module, self.own = torch.nn.Module(), {}
        for name, shape in SHAPES.items():
            weight, scale = in_fp8_blocks(torch.randn(EXPERTS, *shape, generator=random) / 16, GROUP)
            self.own |= {f"{name}_weight": weight, f"{name}_scale": scale}
            with AllocationMode(EXPERTS, self.experts.allocate):
                managed = torch.empty(weight.shape, dtype=weight.dtype)
            self.module.register_parameter(f"{name}_weight", torch.nn.Parameter(managed.copy_(weight), requires_grad=False))
            self.module.register_parameter(f"{name}_scale", torch.nn.Parameter(scale.clone(), requires_grad=False))
        self.experts.sync_tensors(self.module)

    def move(self, resident: np.ndarray) -> None:
        after = np.concatenate([layout.holding(resident) for layout in self.experts.layouts])
        self.experts.demote(after)
        self.experts.promote(after)


def main() -> None:
    on_cpu()
    tile_files("fp8 with TMA", (EXPERTS, INTERMEDIATE, GROUP), TILE)
    made = [0]

    def counted(result: object, *args: object, **kwargs: object) -> None:
        made[0] += 1

    if sys.argv[1] == "off":
        scheduler_hooks.without_tma(HookRegistry.register)
    HookRegistry.register("sglang.kernels.ops.moe.fused_moe_triton_kernels._get_b_tma_desc_cached", counted, HookType.AFTER)
    HookRegistry.apply_hooks()
    random, memory = torch.Generator().manual_seed(1), EmulatedMemory()
    layers = [Layer(memory, index, random) for index in range(LAYERS)]
    staging = CpuStaging(memory, max(buffer_bytes(layer.experts) for layer in layers), 1)
    streamer = Streamer([layer.experts for layer in layers], staging, None, TOKENS, lambda row, nbytes: None)
    flags = {"use_fp8_w8a8": True, "block_shape": [GROUP, GROUP]}
    settings = MoeRunnerConfig(
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        activation="silu",
    )
    equal = []
    for step in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
        ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(TOKENS)]).to(torch.int32)
        topk = StandardTopKOutput(torch.rand(TOKENS, TOP_K, generator=random), ids, None)
        streamer.begin_step()
        for row, layer in enumerate(layers):
            reading = streamer.enter(row)
            assert reading is not None, streamer.fault
            layer.move(np.arange(EXPERTS) == (row + step) % EXPERTS)
            found = computed(dict(layer.module.named_parameters()), x, topk, flags, settings)
            streamer.leave(reading)
            before = made[0]
            equal.append(torch.equal(found, computed(layer.own, x, topk, flags, settings)))
            made[0] = before
        streamer.end_step()
    print(json.dumps({"equal": equal, "descriptors": made[0], "fault": streamer.fault}))


if __name__ == "__main__":
    main()
