"""A compact fused MoE in Triton: gathered GEMM with w13, SiLU-and-multiply in its epilogue, GEMM with w2, sum over the top k.

Weights are bf16, or FP8 (e4m3) with one scale a block of 128 x 128; activations are bf16 (float32 only where Triton's
interpreter checks the kernels on a CPU, since its products of bf16 are wrong). FP8 tiles are widened before the
product, so an FP8 layer moves the bytes of FP8 and computes in bf16: that is what a memory-bound decode needs. Routing
comes sorted by expert in tiles of ``block_m`` slots (``align``), made on the CPU, so that a captured graph only reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from benchmarks.gpu.shapes import FP8_BLOCK, MoeShape


@dataclass(frozen=True)
class Tiles:
    """Block shapes of both GEMMs."""

    m: int = 16
    n: int = 64
    k: int = 128
    stages: int = 3
    warps: int = 4

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}, {self.stages} stages, {self.warps} warps"


# Not specialised: each batch size would compile its own kernels.
@triton.jit(do_not_specialize=["num_slots", "top_k"])
def gate_up_kernel(
    x,
    w13,
    scales,
    out,
    slots,
    experts,
    num_slots,
    top_k,
    hidden,
    intermediate,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
):
    """out[slot, intermediate] = silu(x w_gate) * (x w_up), for the slots of one tile and expert."""
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < 0:
        return
    slot = tl.load(slots + tile * M + tl.arange(0, M))
    valid = slot < num_slots
    token = slot // top_k
    first_n = tl.program_id(0) * N
    n = first_n + tl.arange(0, N)
    k = tl.arange(0, K)
    rows = x + token[:, None].to(tl.int64) * hidden + k[None, :]
    gate = w13 + expert * 2 * intermediate * hidden + n[None, :].to(tl.int64) * hidden + k[:, None]
    up = gate + intermediate.to(tl.int64) * hidden
    gate_sum = tl.zeros((M, N), dtype=tl.float32)
    up_sum = tl.zeros((M, N), dtype=tl.float32)
    blocks_k = hidden // 128
    gate_scale = scales + expert * (2 * intermediate // 128) * blocks_k + first_n // 128 * blocks_k
    up_scale = gate_scale + intermediate // 128 * blocks_k
    for first_k in range(0, hidden, K):
        a = tl.load(rows + first_k, mask=valid[:, None], other=0.0)
        g = tl.load(gate + first_k)
        u = tl.load(up + first_k)
        if FP8:
            gate_sum += tl.dot(a, g.to(a.dtype)) * tl.load(gate_scale + first_k // 128)
            up_sum += tl.dot(a, u.to(a.dtype)) * tl.load(up_scale + first_k // 128)
        else:
            gate_sum = tl.dot(a, g, gate_sum)
            up_sum = tl.dot(a, u, up_sum)
    y = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
    where = out + slot[:, None].to(tl.int64) * intermediate + n[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["num_slots"])
def down_kernel(
    act,
    w2,
    scales,
    weights,
    out,
    slots,
    experts,
    num_slots,
    hidden,
    intermediate,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
):
    """out[slot, hidden] = weight * (act w2), for the slots of one tile and expert."""
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < 0:
        return
    slot = tl.load(slots + tile * M + tl.arange(0, M))
    valid = slot < num_slots
    first_n = tl.program_id(0) * N
    n = first_n + tl.arange(0, N)
    k = tl.arange(0, K)
    rows = act + slot[:, None].to(tl.int64) * intermediate + k[None, :]
    columns = w2 + expert * hidden * intermediate + n[None, :].to(tl.int64) * intermediate + k[:, None]
    total = tl.zeros((M, N), dtype=tl.float32)
    blocks_k = intermediate // 128
    scale = scales + expert * (hidden // 128) * blocks_k + first_n // 128 * blocks_k
    for first_k in range(0, intermediate, K):
        a = tl.load(rows + first_k, mask=valid[:, None], other=0.0)
        w = tl.load(columns + first_k)
        if FP8:
            total += tl.dot(a, w.to(a.dtype)) * tl.load(scale + first_k // 128)
        else:
            total = tl.dot(a, w, total)
    weight = tl.load(weights + slot, mask=valid, other=0.0)
    where = out + slot[:, None].to(tl.int64) * hidden + n[None, :]
    tl.store(where, (total * weight[:, None]).to(out.dtype.element_ty), mask=valid[:, None])


@dataclass(frozen=True, eq=False)
class Weights:
    """One layer's experts: w13 ``[E, 2 * intermediate, hidden]`` (gate rows, then up rows), w2 ``[E, hidden, intermediate]``,
    and for FP8 float32 scales a block; for bf16 the scales are one number that nobody reads."""

    w13: torch.Tensor
    w2: torch.Tensor
    scale13: torch.Tensor
    scale2: torch.Tensor

    @property
    def fp8(self) -> bool:
        return self.w13.dtype == torch.float8_e4m3fn


def random_weights(shape: MoeShape, fp8: bool, device: str, seed: int, wide: torch.dtype = torch.bfloat16) -> Weights:
    """Random experts of magnitudes that keep activations near one. Expert by expert, so that little else is held."""
    random = torch.Generator(device).manual_seed(seed)
    dtype = torch.float8_e4m3fn if fp8 else wide

    def tensor(rows: int, columns: int) -> torch.Tensor:
        made = torch.empty(shape.experts, rows, columns, dtype=dtype, device=device)
        for expert in made:
            values = torch.empty(rows, columns, dtype=torch.float32, device=device).normal_(generator=random)
            expert.copy_(values if fp8 else values / columns**0.5)
        return made

    def scales(rows: int, columns: int) -> torch.Tensor:
        if not fp8:
            return torch.ones(1, device=device)
        size = shape.experts, rows // FP8_BLOCK, columns // FP8_BLOCK
        return (torch.rand(size, generator=random, device=device) + 0.5) / columns**0.5

    inner, hidden = shape.intermediate, shape.hidden
    return Weights(tensor(2 * inner, hidden), tensor(hidden, inner), scales(2 * inner, hidden), scales(hidden, inner))


def max_tiles(slots: int, experts: int, block_m: int) -> int:
    """The most tiles that routing of so many slots can need."""
    return min(slots, experts + slots // block_m)


def align(ids: np.ndarray, experts: int, block_m: int) -> tuple[np.ndarray, np.ndarray]:
    """``ids[tokens, top_k]`` sorted by expert into tiles of one expert each: slots ``[tiles * block_m]`` (token * top_k + j;
    the number of slots where a tile has no more) and the expert of each tile, -1 for a tile that is not needed."""
    flat = ids.ravel()
    tiles = max_tiles(flat.size, experts, block_m)
    slots = np.full((tiles, block_m), flat.size, dtype=np.int32)
    owner = np.full(tiles, -1, dtype=np.int32)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    counts = np.bincount(flat, minlength=experts)
    at, tile = 0, 0
    for expert in np.flatnonzero(counts):
        mine = order[at : at + counts[expert]]
        at += counts[expert]
        for first in range(0, mine.size, block_m):
            part = mine[first : first + block_m]
            slots[tile, : part.size] = part
            owner[tile] = expert
            tile += 1
    return slots.ravel(), owner


class MoeStep:
    """Buffers of one batch size, at fixed addresses: a graph captured over ``run`` follows whatever routing ``route`` put
    there."""

    def __init__(
        self,
        shape: MoeShape,
        tokens: int,
        top_k: int,
        tiles: Tiles,
        device: str,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.shape, self.tokens, self.top_k, self.tiles = shape, tokens, top_k, tiles
        slots = tokens * top_k
        count = max_tiles(slots, shape.experts, tiles.m)
        self.x = torch.zeros(tokens, shape.hidden, dtype=dtype, device=device)
        self.weights = torch.full((slots,), 1.0 / top_k, device=device)
        self.slots = torch.full((count * tiles.m,), slots, dtype=torch.int32, device=device)
        self.experts = torch.full((count,), -1, dtype=torch.int32, device=device)
        self.act = torch.zeros(slots, shape.intermediate, dtype=dtype, device=device)
        self.parts = torch.zeros(slots, shape.hidden, dtype=dtype, device=device)
        self.out = torch.zeros(tokens, shape.hidden, dtype=dtype, device=device)

    def route(self, slots: torch.Tensor, experts: torch.Tensor) -> None:
        self.slots.copy_(slots)
        self.experts.copy_(experts)

    def run(self, layer: Weights, x: torch.Tensor | None = None) -> torch.Tensor:
        """``out`` of ``x`` (else of its own ``x``)."""
        shape, tiles, slots = self.shape, self.tiles, self.tokens * self.top_k
        options = {"M": tiles.m, "N": tiles.n, "K": tiles.k, "FP8": layer.fp8}
        machine = {"num_stages": tiles.stages, "num_warps": tiles.warps}
        gate_up_kernel[(shape.intermediate // tiles.n, self.experts.numel())](
            self.x if x is None else x,
            layer.w13,
            layer.scale13,
            self.act,
            self.slots,
            self.experts,
            slots,
            self.top_k,
            shape.hidden,
            shape.intermediate,
            **options,
            **machine,
        )
        down_kernel[(shape.hidden // tiles.n, self.experts.numel())](
            self.act,
            layer.w2,
            layer.scale2,
            self.weights,
            self.parts,
            self.slots,
            self.experts,
            slots,
            shape.hidden,
            shape.intermediate,
            **options,
            **machine,
        )
        torch.sum(self.parts.view(self.tokens, self.top_k, -1), 1, out=self.out)
        return self.out


def reference(shape: MoeShape, layer: Weights, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same in torch and float32, expert by expert, rounded where the kernels round."""

    def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = weight.float()
        if not layer.fp8:
            return wide
        return wide * scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)

    out = torch.zeros(x.shape[0], shape.hidden, device=x.device)
    for expert in ids.unique().tolist():
        w13 = dequantised(layer.w13[expert], layer.scale13[expert] if layer.fp8 else layer.scale13)
        w2 = dequantised(layer.w2[expert], layer.scale2[expert] if layer.fp8 else layer.scale2)
        token, _ = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ w13.T).chunk(2, dim=-1)
        act = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
        out.index_add_(0, token, (act @ w2.T / ids.shape[1]).to(x.dtype).float())
    return out.to(x.dtype)


def compile_for(arch: int, tiles: Tiles, fp8: bool) -> list[tuple[str, int]]:
    """Compile both kernels for an architecture (90: sm_90) without a GPU. Returns each one's PTX and bytes of shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    weight = "*fp8e4nv" if fp8 else "*bf16"
    pointers = {"x": "*bf16", "act": "*bf16", "w13": weight, "w2": weight, "scales": "*fp32", "weights": "*fp32"}
    pointers |= {"out": "*bf16", "slots": "*i32", "experts": "*i32"}
    constants = {"M": tiles.m, "N": tiles.n, "K": tiles.k, "FP8": fp8}
    made = []
    for kernel in (gate_up_kernel, down_kernel):
        signature = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
        # What a launch finds out of its arguments: without it loads are narrow and nothing is pipelined.
        aligned = [i for i, name in enumerate(kernel.arg_names) if name in {*pointers, "hidden", "intermediate"}]
        attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
        source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
        options = {"num_stages": tiles.stages, "num_warps": tiles.warps}
        compiled = compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        made.append((compiled.asm["ptx"], compiled.metadata.shared))
    return made
