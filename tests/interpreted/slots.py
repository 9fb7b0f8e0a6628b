"""Prints, as JSON, whether SGLang's own Triton MoE functions give the same bits from slots as from the experts' rows.

Run with TRITON_INTERPRET=1 and the folder in which to look for tile configurations in SGLANG_MOE_CONFIG_DIR.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from sglang.kernels.ops.moe import fused_moe_triton_kernels as kernels
from sglang.kernels.ops.moe.moe_align_small_numel import moe_align_small_numel
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner import triton as runner
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_uvm_offload.memory.slots import BlockLists
from sglang_uvm_offload.plugin.slots.triton import TritonSlotSeam

EXPERTS, SLOTS, TOP_K, HIDDEN, INTERMEDIATE, GROUP = 8, 5, 2, 64, 32, 32
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}
HELD: list[int | None] = [3, None, 0, EXPERTS - 1, 5]
"""The expert in each slot."""


LIBRARIES: list[torch.library.Library] = []
"""What is registered ends with the library."""


class Copies:
    """Slots that hold copies of some experts and never change."""

    num_rows, layer_id = EXPERTS + SLOTS, 0

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.row_bytes = {tensor.data_ptr(): tensor.stride(0) * tensor.element_size() for tensor in tensors}
        self.row = torch.arange(EXPERTS, dtype=torch.int32)
        for slot, expert in enumerate(HELD):
            if expert is not None:
                self.row[expert] = EXPERTS + slot
        self.rewritten = 0
        self.waits = False

    def align(self, *given: Any) -> None:
        """SGLang's function does it."""

    def await_fills(self) -> bool:
        waited, self.waits = self.waits, False
        return waited

    def resolve(self, ids: torch.Tensor, lists: BlockLists, later: frozenset[int]) -> None:
        assert ids.shape[1] == TOP_K
        assert later
        self.waits = True
        used = lists.blocks[: int(lists.padded[0]) // lists.block_size]
        named = used[used >= 0]
        assert set(named.tolist()) == set(ids[ids >= 0].tolist())
        used[used >= 0] = self.row[named.long()]
        self.rewritten += int((used >= EXPERTS).sum())


def on_cpu() -> None:
    """What SGLang asks of a GPU or a server. Its kernel that aligns few rows is a Triton one, and takes many too. Two that
    quantise activations are CUDA's, or call its functions."""
    settings = SimpleNamespace(
        moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    parallel = SimpleNamespace(tp_group=None)
    for module in (fused_moe, fused_moe_triton_config):
        module.get_exec = lambda: settings
    fused_moe.get_parallel = lambda: parallel
    fused_moe.get_tp_group = lambda: None  # which it asks in place of get_parallel before 0.5.22
    fused_moe.is_allocation_symmetric = lambda: False
    fused_moe.use_symmetric_memory = lambda *_, **__: contextlib.nullcontext()
    fused_moe.moe_align_block_size = align
    fused_moe_triton_config.get_device_name = lambda *_: "cpu"
    fused_moe._has_vllm_ops = False
    kernels._set_triton_tma_allocator = lambda: None
    kernels.scaled_fp8_quant = lambda x, *_, **__: quantised(x, x.abs().max(), 448.0, torch.float8_e4m3fn)
    kernels.per_token_quant_int8 = lambda x: quantised(x, x.abs().amax(-1, keepdim=True), 127.0, torch.int8)
    library = torch.library.Library("sglang", "IMPL")
    for name, inplace in (("inplace_fused_experts", True), ("outplace_fused_experts", False)):
        names = [argument.name for argument in getattr(torch.ops.sglang, name).default._schema.arguments]
        library.impl(name, lambda *a, names=names, inplace=inplace, **k: as_on_cuda(names, a, k, inplace), "CPU")
    LIBRARIES.append(library)


def quantised(x: torch.Tensor, largest: torch.Tensor, limit: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale = largest.float() / limit
    values = x.float() / scale
    return (values.to(dtype) if dtype.is_floating_point else values.round().to(dtype)), scale.view(-1, 1)


def as_on_cuda(names: list[str], args: Any, kwargs: Any, inplace: bool) -> torch.Tensor | None:
    out = fused_moe.fused_experts_impl(**dict(zip(names, args, strict=False)), **kwargs, inplace=inplace)
    return None if inplace else out


def align(ids: torch.Tensor, block_size: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    places = ids.numel()
    room = places * block_size if places < num_experts + 1 else places + (num_experts + 1) * (block_size - 1)
    room = (room + 3) // 4 * 4
    order = torch.full((room,), 2**30, dtype=torch.int32)
    blocks = torch.full((triton.cdiv(room, block_size),), 2**30, dtype=torch.int32)
    padded = torch.empty(1, dtype=torch.int32)
    moe_align_small_numel(ids, num_experts + 1, block_size, order, blocks, padded)
    return order, blocks, padded


def weights(kind: str, dtype: torch.dtype, random: torch.Generator) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A layer's tensors and flags, as the Triton runner is given them."""
    w1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=random) / 8
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=random) / 8
    if kind in ("plain", "bias"):
        out = {"w13_weight": w1.to(dtype), "w2_weight": w2.to(dtype)}
        if kind == "bias":
            out["b13"] = torch.randn(EXPERTS, 2 * INTERMEDIATE, generator=random).to(dtype)
            out["b2"] = torch.randn(EXPERTS, HIDDEN, generator=random).to(dtype)
        return out, {}
    quantised = {"w13": w1, "w2": w2}
    out, flags = {}, {}
    for name, weight in quantised.items():
        if kind in ("fp8", "fp8 with TMA"):
            out[f"{name}_weight"], out[f"{name}_scale"] = in_fp8_blocks(weight, GROUP)
            flags = {"use_fp8_w8a8": True, "block_shape": [GROUP, GROUP]}
        elif kind == "fp8 per tensor":
            scale = weight.abs().amax((1, 2)) / 448
            out[f"{name}_weight"], out[f"{name}_scale"] = (weight / scale[:, None, None]).to(torch.float8_e4m3fn), scale
            flags = {"use_fp8_w8a8": True}
        elif kind == "int8 w8a8":
            scale = weight.abs().amax(-1, keepdim=True) / 127
            out[f"{name}_weight"], out[f"{name}_scale"] = (weight / scale).round().to(torch.int8), scale
            flags = {"use_int8_w8a8": True, "per_channel_quant": True}
        elif kind == "int8 w8a16":
            scale = weight.abs().amax(-1) / 127
            out[f"{name}_weight"], out[f"{name}_scale"] = (weight / scale[..., None]).round().to(torch.int8), scale
            flags = {"use_int8_w8a16": True}
        else:
            out[f"{name}_weight"], out[f"{name}_scale"] = in_int4_groups(weight, dtype)
            rows, groups = out[f"{name}_scale"].shape[1:]
            if kind == "int4 with zeros":
                shape = (EXPERTS, rows // 2, groups)
                out[f"{name}_zp"] = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
            flags = {"use_int4_w4a16": True, "block_shape": [0, GROUP]}
    return out, flags


def in_fp8_blocks(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, columns = weight.shape
    blocks = weight.view(experts, rows // group, group, columns // group, group)
    scale = blocks.abs().amax((2, 4)) / 448
    return (blocks / scale[:, :, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn), scale


def in_int4_groups(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, columns = weight.shape
    groups = weight.view(experts, rows, columns // GROUP, GROUP)
    scale = groups.abs().amax(-1) / 7
    values = ((groups / scale[..., None]).round().clamp(-8, 7) + 8).view(weight.shape).to(torch.uint8)
    return (values[..., 0::2] | (values[..., 1::2] << 4)).contiguous(), scale.to(dtype)


def with_slots(tensor: torch.Tensor) -> torch.Tensor:
    """``[E]`` rows of ``[E + S]``, of which those of slotted experts and of empty slots are poisoned."""
    grown = torch.empty((EXPERTS + SLOTS, *tensor.shape[1:]), dtype=tensor.dtype)
    poison(grown)
    for expert in set(range(EXPERTS)) - set(HELD):
        grown[expert] = tensor[expert]
    for slot, expert in enumerate(HELD):
        if expert is not None:
            grown[EXPERTS + slot] = tensor[expert]
    return grown[:EXPERTS]


def poison(tensor: torch.Tensor) -> None:
    """NaN, or integers that are no weights."""
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        tensor.fill_(float("nan"))
    else:
        tensor.view(torch.uint8).fill_(0x7F)


CASES = (
    ("plain", "bfloat16"),
    ("plain", "float16"),
    ("plain", "float32"),
    ("bias", "bfloat16"),
    ("fp8", "bfloat16"),
    ("fp8 with TMA", "bfloat16"),
    ("fp8 per tensor", "bfloat16"),
    ("int8 w8a8", "bfloat16"),
    ("int8 w8a16", "bfloat16"),
    ("int4", "bfloat16"),
    ("int4 with zeros", "bfloat16"),
)
# Tokens, whether some experts are another rank's, and whether the output replaces the input.
STEPS = ((1, False, False), (4, False, True), (4, True, False), (16, False, False), (16, True, False), (64, False, False))
MOST_KINDS = ("plain", "fp8")
"""The kinds that are computed with 64 tokens too, which takes the interpreter as long as all others together."""


def dispatched(x: torch.Tensor, topk: StandardTopKOutput) -> StandardDispatchOutput:
    topk = topk._replace(topk_ids=topk.topk_ids.clone())
    return StandardDispatchOutput(hidden_states=x.clone(), hidden_states_scale=None, topk_output=topk)


def computed(tensors: dict[str, torch.Tensor], x: torch.Tensor, topk: Any, flags: Any, settings: Any) -> torch.Tensor:
    given = runner.TritonMoeQuantInfo(**tensors, **flags)
    return runner.fused_experts_none_to_triton(dispatched(x, topk), given, settings).hidden_states


def outcome(seam: TritonSlotSeam, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    tile_files(kind)
    own, flags = weights(kind, dtype, random)
    slotted = {name: with_slots(tensor) for name, tensor in own.items()}
    copies, found = Copies(slotted.values()), []
    for tokens, parallel, inplace in STEPS if kind in MOST_KINDS else STEPS[:-1]:
        x = torch.randn(tokens, HIDDEN, generator=random).to(dtype)
        factors = torch.rand(tokens, TOP_K, generator=random)
        ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(tokens)]).to(torch.int32)
        ids[0] = torch.tensor([HELD[0], 1])
        if parallel:
            ids[1:][torch.rand(tokens - 1, TOP_K, generator=random) < 0.3] = -1
            ids[0, 1] = -1
        settings = MoeRunnerConfig(
            num_experts=EXPERTS * (2 if parallel else 1),
            num_local_experts=EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            intermediate_size_per_partition=INTERMEDIATE,
            activation="silu",
            inplace=inplace,
        )

        given = (x, StandardTopKOutput(factors, ids, None), flags, settings)
        expected, before = computed(own, *given), copies.rewritten
        assert expected.isfinite().all()
        seam.find = dict.fromkeys(copies.row_bytes, copies).get
        found.append(torch.equal(computed(slotted, *given), expected) and copies.rewritten > before)
        if inplace:
            rewritten = copies.rewritten
            others = torch.equal(computed(own, *given), expected) and copies.rewritten == rewritten
            seam.find = lambda address: None
            poisoned = not torch.equal(computed(slotted, *given), expected)
    return {"equal": found, "other layers equal": others, "own rows poisoned": poisoned}


def tile_files(kind: str, shape: tuple[int, int, int] = (EXPERTS, INTERMEDIATE, GROUP), tile: dict[str, int] = TILE) -> None:
    """Down projections are read by TMA where a file says so; up projections only in files of their own. ``shape``: experts,
    their intermediate size, and the rows and columns of a block with one scale."""
    experts, intermediate, group = shape
    folder = Path(os.environ["SGLANG_MOE_CONFIG_DIR"]) / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    folder.mkdir(parents=True, exist_ok=True)
    for down in (False, True):
        name = fused_moe_triton_config.get_config_file_name(experts, intermediate, "fp8_w8a8", [group, group], down_moe=down)
        if kind == "fp8 with TMA":
            (folder / name).write_text(json.dumps({"1": {**tile, "USE_TMA": True}}))
        else:
            (folder / name).unlink(missing_ok=True)
    fused_moe_triton_config.get_moe_configs.cache_clear()


def main() -> None:
    on_cpu()
    seam = TritonSlotSeam()
    seam.install(HookRegistry.register)
    HookRegistry.apply_hooks()
    for kind, dtype in CASES:
        print(json.dumps({"kind": kind, "dtype": dtype, **outcome(seam, kind, getattr(torch, dtype))}), flush=True)


if __name__ == "__main__":
    main()
