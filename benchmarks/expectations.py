"""What to expect where, by the planner: the tables of ``docs/tuning.md`` and the short one of README."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Parallel, Reserve, Workload
from sglang_uvm_offload.plan.machine import GIB, preset
from sglang_uvm_offload.plan.outcome import Plan, Speed
from sglang_uvm_offload.plan.plan_report import ROWS as LEGEND
from sglang_uvm_offload.plan.plan_report import between
from sglang_uvm_offload.plan.planner import plan, render
from sglang_uvm_offload.plan.verdict import slower_than_a_cpu, useless_on_a_slow_link
from sglang_uvm_offload.residency.slot_split import NO_SLOTS, Slots

PARTS = ("It fits", "predicted")
"""How the parts of a plan begin that a page shows."""
CONTEXT = 32768
"""Tokens of a request in every plan that a page shows."""

PLANS = {
    "8xH20": ("glm-5-fp8", 4),
    "2x4090": ("glm-4.5-air-awq", 1),
    "1xH200": ("glm-4.5-air", 1),
    "1xGH200": ("glm-4.5-air", 1),
}
"""The model and the concurrent requests that ``docs/tuning.md`` plans for on each machine."""

CHOICES: dict[str, dict[str, Any]] = {
    "(SGLang's defaults)": {},
    "`--mem-fraction-static 0.9`": {"reserve": Reserve(mem_fraction_static=0.9)},
    "`--chunked-prefill-size 2048`": {"reserve": Reserve(chunked_prefill_size=2048)},
    "`--expert-offload-slots 0`": {"slots": NO_SLOTS},
    "`--speculative-algorithm NEXTN`": {"speculative": True},
}
"""What else a launch may ask for, as arguments of ``planned``."""
CHOOSING = ("8xH20", "2x4090", "1xH200")
"""The machines of ``PLANS`` that ``docs/tuning.md`` compares ``CHOICES`` on."""

_AUTO = Slots(None)

NAMES = {
    "glm-5-fp8": "GLM-5, FP8",
    "deepseek-v3": "DeepSeek-V3, FP8",
    "kimi-k2": "Kimi-K2, FP8",
    "glm-4.5-air": "GLM-4.5-Air, BF16",
    "glm-4.5-air-awq": "GLM-4.5-Air, AWQ 4 bits",
    "qwen3-235b-a22b": "Qwen3-235B-A22B, BF16",
    "gpt-oss-120b": "gpt-oss-120b, MXFP4",
}
"""Models and the format of their experts, by the name of their config file."""

CASES = (
    ("glm-5-fp8", "8xH20"),
    ("kimi-k2", "8xH20"),
    ("deepseek-v3", "8xH100"),
    ("deepseek-v3", "4xGH200"),
    ("deepseek-v3", "1xH200"),
    ("glm-4.5-air", "1xGH200"),
    ("glm-4.5-air", "1xH100"),
    ("glm-4.5-air", "4x4090"),
    ("glm-4.5-air-awq", "4x4090"),
    ("glm-4.5-air-awq", "2x4090"),
    ("qwen3-235b-a22b", "1xH200"),
    ("qwen3-235b-a22b", "4x4090"),
    ("gpt-oss-120b", "4x4090"),
    ("gpt-oss-120b", "1x5090"),
    ("gpt-oss-120b", "1x4090"),
)
"""Winners and losers."""
FITS = (
    ("glm-5-fp8", "8xH20"),
    ("deepseek-v3", "8xH100"),
    ("gpt-oss-120b", "1x5090"),
    ("gpt-oss-120b", "4x4090"),
    ("glm-4.5-air-awq", "4x4090"),
    ("glm-4.5-air-awq", "2x4090"),
    ("qwen3-235b-a22b", "4x4090"),
    ("deepseek-v3", "1xH200"),
)
"""Those that README.md shows."""

PREDICTED = ("residents of a layer", "decode, predicted", "of resident", "prefill, of resident")


def planned(
    config: Path,
    machine: str,
    requests: int = 1,
    slots: Slots = _AUTO,
    speculative: bool = False,
    reserve: Reserve | None = None,
) -> Plan:
    """By the command's defaults: tensor parallelism over all GPUs."""
    where = preset(machine)
    work = Workload(CONTEXT, requests=requests, speculative=speculative)
    return plan(Case(_model(config), where, work, Parallel(tp=where.gpus), reserve or Reserve(), slots=slots))


_model = cache(shape_of)


def shown(result: Plan) -> str:
    """``PARTS`` of the rendered plan, as an indented block."""
    kept = [part for part in render(result).split("\n\n") if part.startswith(PARTS)]
    return "\n\n".join("\n".join(f"    {line}" for line in part.splitlines()) for part in kept)


def expectations(configs: Path) -> str:
    """A Markdown table of ``CASES``: one request, from the least to the most of the predicted hit rates."""
    rows: list[tuple[str, ...]] = [("model", "machine", "host RAM", *PREDICTED, "the planner's verdict")]
    for model, machine in CASES:
        result = planned(_config(configs, model), machine)
        host = f"{result.machine.host_bytes // GIB} GiB"
        rows.append((NAMES[model], machine, host, *_cells(result), _verdict(result)))
    return _table(rows)


def fits(configs: Path) -> str:
    """A short table of ``FITS``: what each engine decodes, and which to use."""
    rows: list[tuple[str, ...]] = [
        ("model", "machine", "plain SGLang", "this plugin", "experts in VRAM", "an engine on the CPU", "use")
    ]
    for model, machine in FITS:
        result = planned(_config(configs, model), machine)
        rows.append((NAMES[model], machine, *_engines(result), _use(result)))
    return _table(rows)


def _engines(result: Plan) -> tuple[str, ...]:
    """The decode speeds of plain SGLang and of this plugin, the share of experts in VRAM, and that of an engine on the CPU."""
    plain = result.plain
    whole = f"{plain.decode_tokens_s:.0f} tok/s" if plain else "does not fit"
    if not result.fits:
        short = {"host RAM" if "host RAM" in problem else "VRAM" for problem in result.problems}
        return whole, f"{' and '.join(sorted(short))} too small", "-", "-"
    slower, faster = _range(result)
    rates = between(slower.decode_tokens_s, faster.decode_tokens_s, ".0f" if slower.decode_tokens_s >= 10 else ".1f")
    share = f"{result.rows / result.num_experts:.0%}"
    cpu = f"{result.cpu_engine_tokens_s:.0f} tok/s" if result.cpu_engine_tokens_s else "-"
    return whole, f"{rates} tok/s", share, cpu


def _use(result: Plan) -> str:
    if result.plain:
        return f"plain SGLang, `--mem-fraction-static {result.plain.mem_fraction_static:g}`"
    if not result.fits:
        return "more memory, or fewer bits"
    if slower_than_a_cpu(result):
        return "the CPU engine"
    return "fewer bits, or more VRAM" if result.useless else "**this plugin**"


def choices(configs: Path) -> str:
    """A Markdown table of ``CHOICES`` on ``CHOOSING``, with one request."""
    rows: list[tuple[str, ...]] = [("machine, model", "with", *PREDICTED)]
    for machine in CHOOSING:
        model, _ = PLANS[machine]
        for words, options in CHOICES.items():
            result = planned(_config(configs, model), machine, **options)
            if result.fits:  # a model without draft layers has no such plan
                rows.append((f"{machine}, {NAMES[model]}", words, *_cells(result)))
    return _table(rows)


def blocks(configs: Path) -> dict[str, str]:
    """Every block by the name in its markers."""
    made = {"expectations": expectations(configs), "fits": fits(configs), "choices": choices(configs)}
    for machine, (model, requests) in PLANS.items():
        lines = shown(planned(_config(configs, model), machine, requests)).splitlines()
        # The page says once what the rows are.
        made[f"plan:{machine}"] = "\n".join(line for line in lines if line.strip() not in LEGEND)
    return made


def _config(configs: Path, model: str) -> Path:
    return configs / f"{model}.json"


def _cells(result: Plan) -> tuple[str, ...]:
    """Under ``PREDICTED``."""
    if not result.fits:
        return ("-",) * len(PREDICTED)
    least, most = _range(result)
    slots = f", {result.slots} slots" if result.slots else ""
    return (
        f"{result.num_resident} of {result.num_experts}{slots}",
        f"{between(least.decode_tokens_s, most.decode_tokens_s, '.1f')} tok/s",
        between(least.decode_ratio, most.decode_ratio, ".0%"),
        between(least.prefill_ratio, most.prefill_ratio, ".0%"),
    )


def _range(result: Plan) -> tuple[Speed, Speed]:
    """The slowest and the fastest prediction."""
    fastest = max(result.speeds, key=lambda speed: speed.decode_tokens_s)
    return min((speed.least for speed in result.speeds), key=lambda speed: speed.decode_tokens_s), fastest


def _verdict(result: Plan) -> str:
    """The reasons without their figures."""
    if not result.fits:
        short = {"host RAM" if "host RAM" in problem else "VRAM" for problem in result.problems}
        return f"does not fit: {', '.join(sorted(short, reverse=True))}"
    if result.useless:
        return f"useless: {'; '.join(reason.split(':')[0] for reason in result.useless)}"
    return "useful, but for a slow link" if useless_on_a_slow_link(result) else "useful"


def _table(rows: list[tuple[str, ...]]) -> str:
    rows.insert(1, ("---",) * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
