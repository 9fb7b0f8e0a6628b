"""Checks a module of parts without a GPU: imports it, compiles what it compiles, checks its inputs and its arithmetic."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from benchmarks.gpu.sections import SECTIONS

if TYPE_CHECKING:
    from benchmarks.gpu.server_parts import Written
    from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape

H200 = 90
SHARED_MEMORY_BYTES = 232_448
"""What a block may take on sm_90."""


def check_plan(program: str, parts: Collection[str]) -> None:
    """Every part that the plan starts must be there."""
    planned = {part.name for section in SECTIONS.values() for part in section.parts if part.program == program}
    assert planned <= {*parts}, f"{program} has no part {planned - {*parts}}"


def ops_parts() -> None:
    from benchmarks.gpu.ops_parts import PARTS
    from scripts.harness.memory_contract import CHECKS
    from sglang_uvm_offload.cuda.build import build

    check_plan("ops_parts", PARTS)
    print(f"{len(CHECKS)} promises; the extension is {build(f'sm_{H200}')}")


def eviction_parts() -> None:
    from benchmarks.gpu.eviction_parts import PARTS

    check_plan("eviction_parts", PARTS)
    print(f"{len(PARTS)} part that evicts")


def canary_parts() -> None:
    from benchmarks.gpu.canary_parts import PARTS

    check_plan("canary_parts", PARTS)
    print(f"{len(PARTS)} part that asks what a launcher does")


def stream_parts() -> None:
    """The block shapes of long steps too: one that took too much shared memory would show at its launch only."""
    from benchmarks.gpu.moe import compile_for
    from benchmarks.gpu.shapes import GLM_45_AIR
    from benchmarks.gpu.stream_layers import tiles_for
    from benchmarks.gpu.stream_parts import PARTS

    check_plan("stream_parts", PARTS)
    for tiles in dict.fromkeys(tiles_for(GLM_45_AIR, tokens) for tokens in (64, 512, 2048, 8192, 32768)):
        for _, shared_bytes in compile_for(H200, tiles, False):
            assert shared_bytes <= SHARED_MEMORY_BYTES, f"{tiles.name}: {shared_bytes} bytes of shared memory"
        print(f"the MoE kernels compile for sm_{H200} in blocks of {tiles.name}")


def miss_parts() -> None:
    from benchmarks.gpu.miss_parts import PARTS

    check_plan("miss_parts", PARTS)
    print(f"{len(PARTS)} part that misses")


def slots_parts() -> None:
    """The shapes that the parts serve from slots, and how SGLang calls what the plugin hooks."""
    from importlib.util import find_spec

    from benchmarks.gpu.shapes import DEEPSEEK_V3
    from benchmarks.gpu.slots_parts import PARTS, SPLITS
    from sglang_uvm_offload.memory.slots import MAX_EXPERTS

    check_plan("slots_parts", PARTS)
    assert DEEPSEEK_V3.experts <= MAX_EXPERTS
    print(f"{DEEPSEEK_V3.name}: {DEEPSEEK_V3.experts} experts and slots beside them, {len(SPLITS)} splits of the VRAM")
    if find_spec("sglang") is None:
        print("no SGLang here: its functions would not be computed through slots, but this folder's kernels")
        return
    from benchmarks.gpu import slot_moe

    slot_moe.installed_seam()
    print("the plugin's hooks are on SGLang's Triton MoE functions")


def runner_parts() -> None:
    """How SGLang calls what the plugin hooks, and what is compiled ahead."""
    from importlib.util import find_spec
    from inspect import signature

    from benchmarks.gpu.runner_parts import PARTS

    check_plan("runner_parts", PARTS)
    if find_spec("sglang") is None:
        print("no SGLang here, whose runners are to compute")
        return
    from sglang.kernels.ops.moe.moe_wna16_marlin import _jit_moe_wna16_marlin_module

    from benchmarks.gpu import slot_deep_gemm, slot_marlin
    from benchmarks.gpu.marlin_build import VARIANTS

    for variant in VARIANTS:
        signature(_jit_moe_wna16_marlin_module).bind(variant.dtype, False, variant.has_bias, True, variant.second_gemm, True)
    slot_deep_gemm.installed_seam()
    slot_marlin.installed_seam()
    print("the plugin's hooks are on SGLang's Marlin and DeepGEMM MoE functions")


def layer_parts() -> None:
    """The kernels are compiled for sm_90, and what they compute is checked by Triton's interpreter on small shapes."""
    from benchmarks.gpu.layer_parts import PARTS
    from benchmarks.gpu.moe import Tiles, compile_for
    from benchmarks.gpu.routing_trace import for_shape, load
    from benchmarks.gpu.shapes import SHAPES

    check_plan("layer_parts", PARTS)
    print(f"the trace holds {load().shape} ids [step, request, layer, k]")
    for shape in SHAPES.values():
        ids = for_shape(shape)
        print(f"{shape.name}: {shape.layers} layers, ids up to {ids.max()} of {shape.experts} experts")
    for fp8 in (False, True):
        for text, shared_bytes in compile_for(H200, Tiles(), fp8):
            assert f".target sm_{H200}" in text, "compiled for another target"
            assert shared_bytes <= SHARED_MEMORY_BYTES, f"{shared_bytes} bytes of shared memory"
        print(f"the MoE kernels compile for sm_{H200} with {'FP8' if fp8 else 'bf16'} weights")


def server_parts() -> None:
    """The checkpoints' sizes, and every contender's flags in the words of the SGLang that is installed here."""
    from benchmarks.contenders import CONTENDERS, Budget, CannotServe, cells
    from benchmarks.gpu.server_parts import PARTS, PLAN, add_contenders, server_args, sizes
    from scripts.harness.server import flags

    add_contenders()
    check_plan("server_parts", PARTS)
    parse = sglang_parser()
    managed = {part.name: part.managed_gib for section in SECTIONS.values() for part in section.parts}
    for name, served in PLAN.items():
        model = planned_checkpoint(served.written)
        print(f"{name}: {served.written.name}, {model.total_bytes / 1e9:.1f} GB, experts {model.expert_bytes / 1e9:.1f} GB")
        slots = max(served.residencies, default=0) if any(CONTENDERS[each].slots for each in served.contenders) else 0
        assert managed[name] >= (1 + slots) * model.expert_bytes / (1 << 30), f"{name} plans too little managed memory"
        arguments = server_args(served)
        for contender, residency in cells(list(served.contenders), list(served.residencies)):
            try:
                own = flags(contender.flags(Budget(model, residency, sizes(False).warmup_tokens)))
            except CannotServe as reason:
                print(f"    {contender.name} will not be served: {reason}")
                continue
            if parse is not None:
                parse(["--model-path", served.written.name, *arguments, *own])
            print(f"    {contender.name} {' '.join(own)}{'' if parse else ' (not checked: no SGLang here)'}")


def modes_parts() -> None:
    """Each mode's flags, of both servers, in the words of the SGLang that is installed here."""
    from benchmarks.gpu.modes_parts import MODES, ON_GPU, PARTS
    from scripts.harness.server import flags

    check_plan("modes_parts", PARTS)
    parse = sglang_parser()
    for name, mode in MODES.items():
        own = flags({**ON_GPU, **mode.arguments, "expert_offload_num_resident": 4, **mode.offload})
        if parse is not None:
            parse(["--model-path", mode.family, *own])
        print(f"{name}: {mode.family} {' '.join(own)}{'' if parse else ' (not checked: no SGLang here)'}")


def planned_checkpoint(written: Written) -> CheckpointShape:
    """What ``trace_checkpoint.py`` would write, from its config alone."""
    from benchmarks.gpu.server_parts import TRACE
    from benchmarks.trace_checkpoint import MODELS, walk_for
    from benchmarks.trace_walk import STRETCH, read
    from sglang_uvm_offload.sizing.checkpoint import from_config

    trace = read(TRACE)
    sized = MODELS[written.shape].sized(trace, written.layers)
    return from_config(written.shape, sized.configured(walk_for(sized, trace, None, STRETCH).vocabulary, written.quant))


def sglang_parser() -> Callable[[list[str]], object] | None:
    """SGLang's own parser of server arguments, with the plugin's among them; None where it is not installed."""
    from argparse import ArgumentParser
    from importlib.util import find_spec

    if find_spec("sglang") is None:
        return None
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args


def interpreted_moe() -> None:
    """Started with TRITON_INTERPRET=1 in its environment, which Triton reads when a kernel is defined."""
    from dataclasses import replace

    import numpy as np
    import torch

    from benchmarks.gpu.moe import MoeStep, Tiles, align, random_weights, reference
    from benchmarks.gpu.shapes import GLM_45_AIR

    shape = replace(GLM_45_AIR.toy, experts=8, top_k=2)
    for fp8 in (False, True):
        layer = random_weights(shape, fp8, "cpu", 1, torch.float32)
        step = MoeStep(shape, 5, shape.top_k, Tiles(), "cpu", torch.float32)
        ids = np.array([[0, 3], [7, 2], [3, 1], [3, 0], [6, 5]], dtype=np.int32)
        slots, experts = align(ids, shape.experts, Tiles().m)
        step.route(torch.from_numpy(slots), torch.from_numpy(experts))
        step.x.normal_()
        out = step.run(layer)
        expected = reference(shape, layer, step.x, torch.from_numpy(ids))
        error = float((out - expected).norm() / expected.norm())
        assert error < 1e-4, f"the MoE kernels are off by {error:.2g}, interpreted (FP8: {fp8})"
        print(f"the MoE kernels, interpreted on the CPU, FP8 {fp8}: {error:.1e} from torch")


OTHERS = (canary_parts, eviction_parts, stream_parts, miss_parts, slots_parts, runner_parts)

if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreted_moe()
    elif sys.argv[1] == "ops_parts":
        ops_parts()
    elif sys.argv[1] == "server_parts":
        server_parts()
    elif sys.argv[1] == "modes_parts":
        modes_parts()
    elif sys.argv[1] in (others := {each.__name__: each for each in OTHERS}):
        others[sys.argv[1]]()
    else:
        layer_parts()
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], os.environ | {"TRITON_INTERPRET": "1"})
