"""Checks part modules without a GPU: imports them, compiles what they compile, and checks their inputs."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks.gpu.sections import SECTIONS

if TYPE_CHECKING:
    from benchmarks.gpu.server_parts import Written
    from sglang_uvm_offload.plan.model_shape import ModelShape

H200 = 90


def check_plan(program: str, parts: Collection[str]) -> None:
    """Checks that the program has every part that the plan starts."""
    planned = {part.name for section in SECTIONS.values() for part in section.parts if part.program == program}
    assert planned <= {*parts}, f"{program} has no part {planned - {*parts}}"


def ops_parts() -> None:
    from scripts.harness.memory_contract import CHECKS
    from sglang_uvm_offload.cuda.build import build

    print(f"{len(CHECKS)} promises; the extension is {build(f'sm_{H200}')}")


def runner_parts() -> None:
    """Checks the plugin's hooks on SGLang's MoE functions, and the variants that are compiled ahead."""
    from inspect import signature

    if find_spec("sglang") is None:
        print("SGLang is not installed here: its MoE functions are not checked")
        return
    from sglang.kernels.ops.moe.moe_wna16_marlin import _jit_moe_wna16_marlin_module

    from benchmarks.gpu import moe_deep_gemm, moe_marlin, moe_triton
    from benchmarks.gpu.marlin_build import VARIANTS

    for variant in VARIANTS:
        signature(_jit_moe_wna16_marlin_module).bind(variant.dtype, False, variant.has_bias, True, variant.second_gemm, True)
    for module in (moe_triton, moe_marlin, moe_deep_gemm):
        module.installed_seam()
    print("the plugin's hooks are on SGLang's Triton, Marlin and DeepGEMM MoE functions")


def server_parts() -> None:
    """Prints the checkpoints' sizes, and checks every contender's flags with the installed SGLang."""
    from benchmarks.contenders import CONTENDERS, Budget, cells
    from benchmarks.gpu.server_parts import PLAN, SERVER_ARGS, add_contenders, sizes
    from scripts.harness.server import flags

    add_contenders()
    parse = sglang_parser()
    managed = {part.name: part.managed_gib for section in SECTIONS.values() for part in section.parts}
    for name, served in PLAN.items():
        model = planned_checkpoint(served.written)
        print(f"{name}: {served.written.name}, {model.total_bytes / 1e9:.1f} GB, experts {model.expert_bytes / 1e9:.1f} GB")
        slots = served.residency if any(CONTENDERS[each].slots for each in served.contenders) else 0
        assert managed[name] >= (1 + slots) * model.expert_bytes / (1 << 30), f"{name} plans too little managed memory"
        for contender, residency in cells(list(served.contenders), [served.residency]):
            own = flags(contender.flags(Budget(model, residency, sizes(served, False).warmup_tokens)))
            if parse is not None:
                parse(["--model-path", served.written.name, *SERVER_ARGS, *own])
            print(f"    {contender.name} {' '.join(own)}{'' if parse else ' (not checked: no SGLang here)'}")


def modes_parts() -> None:
    """Checks the flags of both servers of each mode with the installed SGLang."""
    from benchmarks.gpu.modes_parts import MODES, ON_GPU
    from scripts.harness.server import flags

    parse = sglang_parser()
    for name, mode in MODES.items():
        own = flags({**ON_GPU, **mode.arguments, "expert_offload_num_resident": 4})
        if parse is not None:
            parse(["--model-path", mode.family, *own])
        print(f"{name}: {mode.family} {' '.join(own)}{'' if parse else ' (not checked: no SGLang here)'}")


@functools.cache
def planned_checkpoint(written: Written) -> ModelShape:
    """Returns the shape of what ``trace_checkpoint.py`` would write, from its config alone."""
    from benchmarks.gpu.server_parts import TRACE
    from benchmarks.trace_checkpoint import MODELS, walk_for
    from benchmarks.trace_walk import STRETCH, read
    from sglang_uvm_offload.plan.engine_shape import shape_of_config

    trace = read(TRACE)
    sized = MODELS[written.shape].sized(trace, written.layers)
    return shape_of_config(written.shape, sized.configured(walk_for(sized, trace, None, STRETCH).vocabulary, written.quant))


def sglang_parser() -> Callable[[list[str]], object] | None:
    """Returns SGLang's parser of server arguments, with the plugin's flags; None if SGLang is not installed."""
    from argparse import ArgumentParser

    if find_spec("sglang") is None:
        return None
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args


CHECKS: dict[str, Callable[[], None]] = {each.__name__: each for each in (ops_parts, runner_parts, server_parts, modes_parts)}
"""The check of each module, besides its plan."""


def check(program: str) -> None:
    parts = import_module(f"benchmarks.gpu.{program}").PARTS
    check_plan(program, parts)
    print(f"== {program}: {', '.join(parts)}", flush=True)
    if program in CHECKS:
        CHECKS[program]()


def in_a_fork(work: Callable[[], None]) -> bool:
    """Whether ``work`` succeeds in a fork, which keeps this process's imports. A check hooks SGLang, so it needs its own."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 -- printed, with the exit code; a fork must not continue as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(programs: Sequence[str]) -> int:
    import torch  # noqa: F401 -- once for all forks

    if find_spec("sglang") is not None:
        import_module("sglang.srt.server_args")
    failed = [program for program in programs if not in_a_fork(lambda program=program: check(program))]
    if failed:
        print(f"dry run failed in {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
