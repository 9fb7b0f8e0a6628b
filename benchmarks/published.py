"""Compares the planner's speed model with published figures: ``python -m benchmarks.published CONFIGS``.

CONFIGS is a folder with each model's config.json, named like ``deepseek-v3.json``. ``published.json`` holds the figures, each
with its source and the configuration that the source states. Writes ``results/published/published.md``: predicted and published
values, and the reason for each miss. A prediction that is off by more than ``MISS`` without a reason is an error. Figures that
an assumption was fitted to are marked: they test nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of, shape_of_config
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.plan.machine import preset
from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.plan.outcome import Speed
from sglang_uvm_offload.plan.routing_curves import hit_rates

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "published" / "published.md"
MISS = 0.15
"""A prediction with a larger relative error needs a reason."""
SECTIONS = {
    "decode": "Decode, every expert resident",
    "prefill": "Prefill, every expert resident",
    "offloading": "Offloading: the seed of this project",
    "CPU engines": "Engines that compute experts on the CPU",
    "own": "This project's own resident steps",
}
Figure = dict[str, Any]


@dataclass(frozen=True)
class Compared:
    """A published figure and its prediction: one number, or a range by hit rate."""

    figure: Figure
    predicted: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(value / self.figure["published"] for value in self.predicted)

    @property
    def missed(self) -> bool:
        return all(abs(ratio - 1) > MISS for ratio in self.ratios)


class Models:
    """The models that the figures name."""

    def __init__(self, folder: Path, inline: dict[str, Any]):
        self._folder, self._inline = folder, inline
        self._read: dict[str, ModelShape] = {}

    def __getitem__(self, name: str) -> ModelShape:
        if name not in self._read:
            inline = self._inline.get(name)
            self._read[name] = shape_of_config(name, inline) if inline else shape_of(self._folder / f"{name}.json")
        return self._read[name]


def speed(figure: Figure, models: Models, hit_rate: float, slow_link: bool = False) -> Speed:
    """Predicts the speed for the configuration of ``figure``, at the usual rate of its link or the worst published one."""
    model, machine = models[figure["model"]], preset(figure["machine"])
    machine = machine.slowest or machine if slow_link else machine
    machine = dataclasses.replace(machine, host_gbps=figure.get("host_gbps", 0) / figure.get("expert_bytes", 1))
    drafts, prompt = figure.get("drafts", 0), figure.get("prompt", 4096)
    work = Workload(
        figure.get("context") or prompt,
        figure.get("requests", 1),
        prompt_tokens=prompt,
        speculative=drafts > 0,
        draft_tokens=drafts + 1,
    )
    values = dataclasses.replace(Assumptions(), accepted_tokens=figure.get("accepted", 1))
    parallel = Parallel(figure.get("tp", 8))
    case = Case(model, machine, work, parallel, Reserve(), values)
    residents = figure.get("residents", 0 if figure["section"] == "CPU engines" else model.num_experts)
    return case.speed_model().predict("published", hit_rate, residents, work, work.requests, figure.get("chunk", 8192))


def value(figure: Figure, predicted: Speed) -> float:
    """Converts the prediction to the figure's unit."""
    section, unit = figure["section"], figure["unit"]
    if section == "prefill":
        rate = predicted.resident_prefill_tokens_s
        return rate if unit == "tok/s" else 1e3 * figure["prompt"] / rate
    if section == "CPU engines":
        return predicted.cpu_engine_tokens_s
    by_unit: dict[str, Callable[[], float]] = {
        "step, ms": lambda: 1e3 * predicted.decode_step_s,
        "tok/s": lambda: predicted.decode_tokens_s,
        "step / resident step": lambda: predicted.decode_step_s / predicted.resident_step_s,
    }
    return by_unit[unit]()


def compare(figure: Figure, models: Models) -> Compared:
    """Returns one number with all experts resident, else a range: from the lowest measured hit rate at the worst published link
    rate to the highest hit rate at the usual link rate."""
    model = models[figure["model"]]
    if "residents" not in figure:
        return Compared(figure, (value(figure, speed(figure, models, 1.0)),))
    found = hit_rates(model.family, figure.get("requests", 1), figure["residents"] / model.num_experts)
    ends = (speed(figure, models, found.lowest.rate, slow_link=True), speed(figure, models, found.highest.rate))
    return Compared(figure, tuple(sorted(value(figure, end) for end in ends)))


def implied_share(figure: Figure, models: Models) -> float:
    """Returns the share of the host memory's nominal rate at which a CPU engine reads experts, if the rest of the step takes as
    long as predicted."""
    predicted = speed(figure, models, 1.0)
    beside = speed(figure | {"host_gbps": 1e12}, models, 1.0).cpu_engine_step_s
    reading = predicted.cpu_engine_step_s - beside
    return Assumptions().cpu_efficiency * reading / (1 / figure["published"] - beside)


def unexplained(compared: Sequence[Compared]) -> list[str]:
    """Lists figures whose miss has no reason."""
    return [each.figure["what"] for each in compared if each.missed and "miss" not in each.figure]


# ---- output ----


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def row(each: Compared, sources: dict[str, str], models: Models) -> str:
    figure = each.figure
    engine = f"[{figure['engine']}]({sources[figure['source']]})"
    where = figure["machine"] if figure["section"] not in ("CPU engines",) else "CPU"
    remarks = [figure[key] for key in ("note", "miss") if key in figure]
    remarks += [f"second-hand: {figure['second_hand']}"] if "second_hand" in figure else []
    remarks += [f"implies {implied_share(figure, models):.2f} of the nominal rate"] if "host_gbps" in figure else []
    remarks += [f"fitted: `{figure['fitted']}`"] if "fitted" in figure else []
    predicted, ratios = (" to ".join(map(number, values)) for values in (each.predicted, each.ratios))
    cells = (
        figure["what"],
        where,
        engine,
        f"{figure['published']:,} {figure['unit']}",
        predicted,
        ratios,
        "; ".join(remarks),
    )
    return f"| {' | '.join(cells)} |"


def summary(compared: Sequence[Compared]) -> str:
    """Says how far off decode steps are that no assumption was fitted to, and how optimistic the worst prefill is."""
    judged = [each for each in compared if "fitted" not in each.figure and each.figure["section"] in ("decode", "own")]
    ratios = [each.ratios[0] for each in judged]
    near = sum(not each.missed for each in judged)
    worst = max(max(ratio, 1 / ratio) for ratio in ratios)
    prefill = [each for each in compared if each.figure["section"] == "prefill"]
    too_fast = max(each.ratios[0] if each.figure["unit"] == "tok/s" else 1 / each.ratios[0] for each in prefill)
    middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return (
        f"Of {len(judged)} decode steps that no assumption was fitted to, {near} are predicted within {MISS:.0%} and all "
        f"within a factor of {worst:.1f}; predicted / published is {middle:.2f} on (geometric) average. "
        f"Prefill is predicted up to {too_fast:.1f} times too fast."
    )


def report(compared: Sequence[Compared], sources: dict[str, str], models: Models) -> str:
    out = [
        "# Predicted and published",
        "",
        "Made by `python -m benchmarks.published CONFIGS` from `benchmarks/published.json`. Predictions are those of "
        "`sglang-uvm-offload plan`; nothing here was measured by this project but the last section. A range begins with the "
        "worst published rate of the link and the lowest measured hit rate, and ends with the usual rate and the highest.",
        "",
        summary(compared),
    ]
    for section, title in SECTIONS.items():
        out += [
            "",
            f"## {title}",
            "",
            "| figure | machine | engine | published | predicted | ratio | remarks |",
            "| --- " * 7 + "|",
        ]
        out += [row(each, sources, models) for each in compared if each.figure["section"] == section]
    return "\n".join([*out, "", *NOT_COMPARED, ""])


NOT_COMPARED = (
    "## Not compared",
    "",
    "- SGLang's paged experts: the [guide](https://github.com/sgl-project/sglang/blob/main/docs_new/docs/advanced_features/"
    "paged_experts.mdx) publishes no speed, and the table of the "
    "[pull request](https://github.com/sgl-project/sglang/pull/29971) could not be read. "
    "This project measured them beside itself ([report](../2026-11-22-nvidia-h200-2/report/report.md)).",
    "- SGLang's decode on 16 H20 with large-scale expert parallelism, and vLLM's GLM-5 with one drafted token: batch or "
    "accepted tokens are not stated.",
    "- Times a token at high concurrency with long prompts: they count waiting for others' prefill.",
    "- InferenceX's first run of R1 at 4 requests, 1k in and 1k out (22.7 ms): its own run at 8 requests is faster.",
)


def read(configs: Path) -> tuple[dict[str, Any], Models, list[Compared]]:
    """Reads ``published.json`` and its models, and predicts each of its figures."""
    content = json.loads((HERE / "published.json").read_text())
    models = Models(configs, content["models"])
    return content, models, [compare(figure, models) for figure in content["figures"]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    wanted = parser.parse_args(arguments)
    content, models, compared = read(wanted.configs)
    missing = unexplained(compared)
    if missing:
        print(f"published.py: off by more than {MISS:.0%} without a reason: {'; '.join(missing)}", file=sys.stderr)
        return 1
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    wanted.out.write_text(report(compared, content["sources"], models))
    return 0


if __name__ == "__main__":
    sys.exit(main())
