"""One expert that all tokens use: in VRAM, read in place (zero-copy), or copied in first."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.gpu.decode_step import Managed, capture, elapsed_ms
from benchmarks.gpu.moe import MoeStep, Tiles, Weights, align, random_weights
from benchmarks.gpu.shapes import MoeShape
from sglang_uvm_offload.cuda.memory import CudaMemory

IN_TURN = 8
"""Experts that are used one after the other, so that the L2 cache does not hold the weights."""


class OneExpert:
    """All tokens on one of ``IN_TURN`` experts: managed, and a scratch in plain memory that one is copied into."""

    def __init__(self, full: MoeShape):
        self.shape = MoeShape(full.name, 1, IN_TURN, 1, full.hidden, full.intermediate)
        plain = random_weights(self.shape, False, "cuda", 1)
        self.managed = Managed(CudaMemory(), plain, full.name)
        self.scratch = Weights(plain.w13[:1].clone(), plain.w2[:1].clone(), plain.scale13, plain.scale2)
        self.nbytes = self.shape.expert_bytes(False)

    def copy_in(self, expert: int) -> None:
        self.scratch.w13[0].copy_(self.managed.weights.w13[expert], non_blocking=True)
        self.scratch.w2[0].copy_(self.managed.weights.w2[expert], non_blocking=True)

    def offload(self, all_of_them: bool) -> None:
        self.managed.keep(np.full(IN_TURN, not all_of_them))

    def arms(self, tokens: int, tiles: Tiles, repeats: int) -> dict[str, list[float]]:
        """Milliseconds with the weights in VRAM, read in place (zero-copy), and copied in first."""
        step = MoeStep(self.shape, tokens, 1, tiles, "cuda")
        step.x.normal_()
        routes = []
        for expert in range(IN_TURN):
            slots, owner = align(np.full((tokens, 1), expert, dtype=np.int32), IN_TURN, tiles.m)
            routes.append((torch.from_numpy(slots).cuda(), torch.from_numpy(owner).cuda()))
        step.route(*routes[0])
        over_managed = capture(lambda: step.run(self.managed.weights))
        over_scratch = capture(lambda: step.run(self.scratch))

        def in_place(expert: int) -> float:
            step.route(*routes[expert])
            return elapsed_ms(over_managed.replay)

        def copied(expert: int) -> float:
            def both() -> None:
                self.copy_in(expert)
                over_scratch.replay()

            step.route(*routes[0])  # the scratch is expert 0
            return elapsed_ms(both)

        times = {}
        for arm, offloaded, once in (
            ("resident", False, in_place),
            ("zero-copy", True, in_place),
            ("copy in first", True, copied),
        ):
            self.offload(offloaded)
            times[arm] = [once(i % IN_TURN) for i in range((repeats + 1) * IN_TURN)][IN_TURN:]
        return times
