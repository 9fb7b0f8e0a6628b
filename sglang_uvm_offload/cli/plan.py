"""The ``plan`` command: predicts whether a model fits a machine, with how many residents, and how fast."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_uvm_offload.cli.terminal import complain, say
from sglang_uvm_offload.files.kinds import mistaken
from sglang_uvm_offload.flags import FLAGS, OPTIONS, TABLES, flag_name
from sglang_uvm_offload.plan import hub, planner
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.gpus import GPUS
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.plan.kv_cache import DTYPES
from sglang_uvm_offload.plan.lookup_tables import (
    BACKENDS,
    ENGRAM_VARIABLE,
    MANAGED,
    PLE_CLASS,
    PLE_FLAG,
    REGISTERED,
    TABLES_FLAG,
    VRAM,
    default_place,
)
from sglang_uvm_offload.plan.machine import EXAMPLES, FIGURES, Machine, MachineError, describe, of_gpus, preset
from sglang_uvm_offload.plan.measured_link import with_measured_link
from sglang_uvm_offload.plan.model_files import ModelFiles
from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.plan.outcome import Plan
from sglang_uvm_offload.plan.safetensors_header import CheckpointError
from sglang_uvm_offload.residency.demand import DEFAULT_KV_TOKENS
from sglang_uvm_offload.residency.slot_split import Slots

PROG = "sglang-uvm-offload plan"
MAX_COUNT = (1 << 31) - 1
"""The upper limit of every count, beyond any machine or model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``plan``."""
    parser.add_argument(
        "model",
        help="a checkpoint folder, a config.json (or a JSON object with it under 'config'), or a Hugging Face id (only "
        "its configuration is downloaded)",
    )
    machine = parser.add_argument_group("machine", "default: this machine")
    machine.add_argument(
        "--machine",
        metavar="NAME",
        help=f"such as {', '.join(EXAMPLES)}: a number of {', '.join(GPUS)}; the flags below override parts of it",
    )
    machine.add_argument("--gpus", type=_count, help="number of GPUs")
    machine.add_argument("--vram-gb", type=_number(1e6), help="GiB of memory of one GPU, as in nvidia-smi")
    machine.add_argument("--host-gb", type=_number(1e6), help="GiB of host RAM that the server may use")
    machine.add_argument("--link-gbps", type=_number(1e6), help="GB/s of host-to-device copies over each GPU's link")
    machine.add_argument("--hbm-gbps", type=_number(1e6), help="GB/s of one GPU's memory")
    machine.add_argument("--host-gbps", type=_number(1e6), help="nominal GB/s of host memory, to compare with a CPU engine")
    machine.add_argument("--tflops", type=_number(1e6), help="dense bfloat16 TFLOPS of one GPU")
    ranks = parser.add_argument_group("parallelism (SGLang's flags of the same names)")
    ranks.add_argument("--tp-size", "--tp", type=_count, help="default: all GPUs, divided by --pp-size and replicas")
    ranks.add_argument("--ep-size", "--ep", type=_count, default=1)
    ranks.add_argument("--pp-size", "--pp", type=_count, default=1)
    ranks.add_argument("--dp-size", "--dp", type=_count, default=1)
    ranks.add_argument("--enable-dp-attention", action="store_true")
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--num-resident",
        type=_option("num_resident"),
        metavar="N",
        help="experts of each MoE layer to keep in VRAM for good, besides slots; default: all that fit, as residents or slots",
    )
    work.add_argument(
        "--slots",
        type=_option("slots"),
        metavar="auto|S",
        help="--expert-offload-slots: VRAM for this many more experts of each MoE layer, copied there as they are used; "
        "without --num-resident, it is a part of what fits; auto (default): what a launch without a profile chooses",
    )
    work.add_argument(
        "--context-length", type=_count, help=f"tokens per request; default: the model's limit, at most {DEFAULT_KV_TOKENS}"
    )
    work.add_argument("--requests", type=_count, default=1, help="concurrent requests, each with a full context (default 1)")
    work.add_argument("--max-total-tokens", type=_count, help="KV cache tokens per rank, instead of requests x context")
    work.add_argument(
        "--prompt-tokens", type=_count, default=4096, help="prompt tokens for the prefill estimate (default 4096)"
    )
    work.add_argument("--kv-cache-dtype", choices=DTYPES, default="auto")
    work.add_argument(
        "--quantization",
        metavar="METHOD",
        help="SGLang's flag: the checkpoint's method, or one that SGLang applies while loading",
    )
    work.add_argument("--speculative", action="store_true", help="load the model's draft layers (NEXTN)")
    work.add_argument(
        "--draft-num-resident",
        type=_option("draft_num_resident"),
        help=f"{flag_name('draft_num_resident')} (default: all experts of the draft layers)",
    )
    work.add_argument(
        "--speculative-num-draft-tokens", type=_count, default=4, help="draft tokens verified per step (default 4)"
    )
    kept = parser.add_argument_group("reserved memory")
    kept.add_argument("--mem-fraction-static", type=_number(1), help="default: SGLang's choice")
    kept.add_argument(
        "--headroom-gb",
        type=_option("headroom_gb"),
        default=Reserve.headroom_gb,
        help="--expert-offload-headroom-gb (default 1.0)",
    )
    kept.add_argument(
        "--stream-buffer-gb",
        type=_option("stream_buffer_gb"),
        metavar="auto|GB",
        help=f"{flag_name('stream_buffer_gb')}: GiB of stream buffers per rank, or 0; auto (default): two if they fit",
    )
    kept.add_argument(
        PLE_FLAG,
        action=argparse.BooleanOptionalAction,
        help="SGLang's flag: keep the n-gram tables of Qwen4-Exp in host RAM (default: SGLang's choice)",
    )
    kept.add_argument(
        "--ple-offload-backend",
        choices=tuple(BACKENDS),
        default="pinned",
        help=f"SGLang's flag: where {PLE_FLAG} keeps them, in pinned memory or in a file",
    )
    kept.add_argument(
        "--lookup-tables", choices=TABLES, default="vram", help=f"{TABLES_FLAG}: where to keep LongCat's n-gram tables"
    )
    kept.add_argument("--chunked-prefill-size", type=_count, help="default: SGLang's choice")
    assumed = parser.add_argument_group("assumptions")
    assumed.add_argument(
        "--hit-rate",
        type=_number(1, zero=True),
        help="share of routed tokens that residents and slots serve (0 to 1), instead of measured routing",
    )
    assumed.add_argument("--read-efficiency", type=_number(1), help="rate of zero-copy reads, as a share of --link-gbps")
    assumed.add_argument("--accepted-tokens", type=_number(1e6), help="accepted tokens per request and step with draft tokens")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    shown.add_argument(
        "--flags-only", action="store_true", help="print only the flags of the launch, on one line, quoted for a shell"
    )
    shown.add_argument("--explain", action="store_true", help="also print the formulas, assumptions and sources")


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns 0 if the model fits, 1 if it does not, 2 for invalid arguments."""
    try:
        machine = _machine(args)
        model = _model(args.model, args.quantization)
    except (CheckpointError, MachineError) as error:
        complain(f"{PROG}: error: {error}")
        return 2
    groups = args.pp_size * (1 if args.enable_dp_attention else args.dp_size)
    parallel = Parallel(
        args.tp_size or max(1, machine.gpus // groups), args.ep_size, args.pp_size, args.dp_size, args.enable_dp_attention
    )
    workload = Workload(
        context_length=args.context_length or min(model.context_length, DEFAULT_KV_TOKENS),
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        max_total_tokens=args.max_total_tokens,
        kv_cache_dtype=args.kv_cache_dtype,
        speculative=args.speculative,
        draft_num_resident=args.draft_num_resident,
        draft_tokens=args.speculative_num_draft_tokens,
    )
    reserve = Reserve(
        args.mem_fraction_static,
        args.headroom_gb,
        args.chunked_prefill_size,
        stream_gb=args.stream_buffer_gb,
    )
    assumed = Assumptions(accepted_tokens=args.accepted_tokens or min(Assumptions.accepted_tokens, workload.draft_tokens))
    if args.read_efficiency is not None:
        assumed = dataclasses.replace(assumed, read_efficiency=args.read_efficiency)
    if wrong := _table_problem(args, model):
        complain(f"{PROG}: error: {wrong}")
        return 2
    place = _tables_in(args, model)
    case = Case(
        model,
        machine,
        workload,
        parallel,
        reserve,
        assumed,
        slots=Slots(args.slots),
        tables_in=place,
        num_resident=args.num_resident,
        quantization=args.quantization,
    )
    result = planner.plan(case, args.hit_rate)
    if args.flags_only:
        return _say_flags(result)
    say(json.dumps(dataclasses.asdict(result), indent=1) if args.json else planner.render(result, args.explain))
    return 0 if result.fits else 1


def _say_flags(result: Plan) -> int:
    """Nothing but the flags on standard output, and nothing there if the model does not fit."""
    for problem in (*result.problems, *(f"enough would be: {need}" for need in result.needs)):
        complain(problem)
    if not result.fits:
        return 1
    for variable in result.environment:
        complain(f"the launch needs {variable} in its environment")
    say(" ".join(result.flags))
    return 0


def _table_problem(args: argparse.Namespace, model: ModelShape) -> str:
    """Why a launch with these flags would be refused; "" if it would not."""
    if args.ple_offload_embedding and PLE_CLASS not in model.architectures:
        return f"{PLE_FLAG}: SGLang accepts it for {PLE_CLASS} only"
    if args.lookup_tables == "host" and not any(table.is_in(MANAGED) for table in model.tables):
        return "--lookup-tables host: the model has no n-gram embedding of LongCat's kind"
    return ""


def _tables_in(args: argparse.Namespace, model: ModelShape) -> str:
    """Where a server would keep the lookup tables."""
    if args.lookup_tables == "host":
        return MANAGED
    if args.ple_offload_embedding is not None and PLE_CLASS not in model.architectures:
        return VRAM
    if args.ple_offload_embedding is None and default_place(model.tables) == VRAM:
        return REGISTERED if os.environ.get(ENGRAM_VARIABLE, "").lower() in ("1", "true") else VRAM
    return VRAM if args.ple_offload_embedding is False else BACKENDS[args.ple_offload_backend]


def _model(name: str, quantization: str | None) -> ModelShape:
    """The model at a path or with a Hugging Face id."""
    if os.path.lexists(name) or not hub.is_id(name):
        if other := mistaken(name, "plan"):
            raise CheckpointError(f"{name}: {other}")
        return shape_of(Path(name), quantization=quantization)
    return shape_of(ModelFiles(name).config, name, quantization=quantization)


def _machine(args: argparse.Namespace) -> Machine:
    if args.machine is not None:
        base: Machine | None = preset(args.machine)
    elif args.gpus is not None and args.vram_gb is not None:
        base = None
    else:
        from sglang_uvm_offload.cuda.device import integrated, visible_gpus
        from sglang_uvm_offload.cuda.kept_link import kept_link

        base = of_gpus(visible_gpus(), integrated())
        base = with_measured_link(base, kept_link(args.tp_size or base.gpus))
    machine = describe(base, {name: getattr(args, name) for name in FIGURES})
    return machine if args.read_efficiency is None else dataclasses.replace(machine, measured=None)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MAX_COUNT}{_such_as(text, MAX_COUNT)}")
    return int(text)


def _number(most: float, zero: bool = False) -> Callable[[str], float]:
    """A reader of numbers above 0, or from 0 if ``zero``, up to ``most``."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 <= float(text) <= most and (zero or float(text)):
                return float(text)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number {'from' if zero else 'above'} 0 to {most:.15g}{_such_as(text, most)}"
        )

    return read


def _such_as(text: str, most: float) -> str:
    """The number that ``text`` may stand for, such as 256 for "256GB", 32768 for "32k" and 0.96 for "96" of at most 1."""
    parts = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z%]*)", text.replace(",", ""), flags=re.IGNORECASE)
    if parts is None:
        return ""
    value, unit = float(parts[1]), parts[2].lower()
    if most == 1:
        return f" ({value / 100:g} for {value:g} %)" if 1 < value <= 100 else ""
    value *= 1024 if unit == "k" else 1
    return f" (such as {value:.15g})" if 0 < value <= most else ""


def _option(name: str) -> Callable[[str], Any]:
    """A reader of values as a launch's flag or option ``name`` takes them."""

    def read(text: str) -> Any:
        try:
            return {**FLAGS, **OPTIONS}[name].kind.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return read
