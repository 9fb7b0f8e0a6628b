"""Checks modules of parts without a GPU: imports them, compiles what they compile, checks their inputs and arithmetic."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
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
    from scripts.harness.memory_contract import CHECKS
    from sglang_uvm_offload.cuda.build import build

    print(f"{len(CHECKS)} promises; the extension is {build(f'sm_{H200}')}")


def stream_parts() -> None:
    """The block shapes of long steps too: one that took too much shared memory would show at its launch only."""
    from benchmarks.gpu.moe import compile_for
    from benchmarks.gpu.shapes import GLM_45_AIR
    from benchmarks.gpu.stream_layers import tiles_for

    for tiles in dict.fromkeys(tiles_for(GLM_45_AIR, tokens) for tokens in (64, 512, 2048, 8192, 32768)):
        for _, shared_bytes in compile_for(H200, tiles, False):
            assert shared_bytes <= SHARED_MEMORY_BYTES, f"{tiles.name}: {shared_bytes} bytes of shared memory"
        print(f"the MoE kernels compile for sm_{H200} in blocks of {tiles.name}")


def slots_parts() -> None:
    """The shapes that the parts serve from slots, and how SGLang calls what the plugin hooks."""
    from benchmarks.gpu.shapes import DEEPSEEK_V3
    from benchmarks.gpu.slots_parts import SPLITS
    from sglang_uvm_offload.memory.slots import MAX_EXPERTS

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
    from inspect import signature

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
    from benchmarks.gpu.moe import Tiles, compile_for
    from benchmarks.gpu.routing_trace import for_shape, load
    from benchmarks.gpu.shapes import SHAPES

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
    from benchmarks.gpu.server_parts import PLAN, add_contenders, server_args, sizes
    from scripts.harness.server import flags

    add_contenders()
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
    from benchmarks.gpu.modes_parts import MODES, ON_GPU
    from scripts.harness.server import flags

    parse = sglang_parser()
    for name, mode in MODES.items():
        own = flags({**ON_GPU, **mode.arguments, "expert_offload_num_resident": 4, **mode.offload})
        if parse is not None:
            parse(["--model-path", mode.family, *own])
        print(f"{name}: {mode.family} {' '.join(own)}{'' if parse else ' (not checked: no SGLang here)'}")


@functools.cache
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


CHECKS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (ops_parts, stream_parts, slots_parts, runner_parts, layer_parts, server_parts, modes_parts)
}
"""What is checked of a module besides its plan."""


def check(program: str) -> None:
    parts = import_module(f"benchmarks.gpu.{program}").PARTS
    check_plan(program, parts)
    print(f"== {program}: {', '.join(parts)}", flush=True)
    if program in CHECKS:
        CHECKS[program]()


def in_a_fork(work: Callable[[], None]) -> bool:
    """Whether it ends well, in a process that has imported what this one has: a check puts hooks on SGLang."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 -- told, and the exit code; a fork must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(programs: Sequence[str]) -> int:
    import torch  # noqa: F401 -- once for all forks

    if find_spec("sglang") is not None:
        import_module("sglang.srt.server_args")
    failed = [program for program in programs if not in_a_fork(lambda program=program: check(program))]
    if "layer_parts" in programs:
        command = [sys.executable, "-m", __spec__.name]
        if subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}).returncode != 0:
            failed.append("interpreted MoE kernels")
    if failed:
        print(f"dry run failed in {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreted_moe()
    else:
        sys.exit(main(sys.argv[1:]))
