"""How many tokens to draft where experts are offloaded: the policy against fixed numbers and SGLang's adaptive drafts.

    python -m benchmarks.draft_length TRACE.npz [TRACE.npz ...]

One request at a time. A step with k drafts uses the experts of the next k + 1 tokens of a trace, and keeps as many as published
acceptance rates say: of each token one draw decides, the same for all ways to draft. The real manager chooses the residents,
and follows the trace token by token. Its steps do not depend on the way to draft, so that all ways meet the same residents. The
first half of the requests warms up manager and ways alike, and the other half is scored.

A rejected draft is another token than the trace has next, whose routing nobody recorded. It counts as that of the trace.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from benchmarks.policy.verdicts import goal, grid
from sglang_uvm_offload.policy.draft_length import DraftLength
from sglang_uvm_offload.replay.draft_steps import DraftSteps
from sglang_uvm_offload.residency.draft_lengths import DraftLengths
from sglang_uvm_offload.routing.trace import Trace
from sglang_uvm_offload.sizing.gpus import GPUS
from sglang_uvm_offload.sizing.inputs import Assumptions
from sglang_uvm_offload.sizing.rates import GIGA

RESULTS = Path(__file__).with_name("results") / "drafts"
TIERS = (0, 1, 2, 3)
RESIDENCIES = (0.25, 0.5, 0.78)
SEED = 0
TOLERANCE = 1.02
ALIKE = (0.5, 2.0)
"""Link time over the other time of a step without drafts."""
WRONG_RATE = 1.3
NONE = "none"
"""A server without speculation: no draft layer runs."""


@dataclass(frozen=True)
class Drafts:
    """``kept``: the published share of steps that keep the draft at each position, by kind of request; requests take the kinds
    by turns."""

    name: str
    kept: tuple[tuple[float, ...], ...]
    source: str


_GLM = (0.938, 0.769, 0.572)
_GPT_OSS = (0.622, 0.356, 0.203)
ACCEPTANCE = (
    Drafts("GLM-5 w4a8, MTP", (_GLM,), "one line of a server's log, https://github.com/vllm-project/vllm-ascend/issues/9803"),
    Drafts(
        "MiniMax-M3, EAGLE-3, coding",
        ((0.78, 0.60, 0.45),),
        "differences of the acceptance lengths 1.78, 2.38, 2.83, thinking on, "
        "https://github.com/SemiAnalysisAI/InferenceX/blob/main/golden_al_distribution/minimaxm3_eagle3.yaml",
    ),
    Drafts(
        "MTP of 8 layers, GSM8K",
        ((0.7617, 0.6158, 0.5125),),
        "the first three of eight positions, https://github.com/vllm-project/vllm/pull/48892",
    ),
    Drafts(
        "gpt-oss, EAGLE-3", (_GPT_OSS,), "the first three of five positions, https://github.com/vllm-project/vllm/pull/42764"
    ),
    Drafts("the first and the last by turns", (_GLM, _GPT_OSS), "both of these"),
)


@dataclass(frozen=True)
class Model:
    """Bytes of one expert, of what each step reads beside experts, and of a draft layer with its head."""

    expert_bytes: float
    dense_bytes: float
    draft_bytes: float
    layer_us: float


def _gpt_oss_20b() -> Model:
    hidden, vocabulary = 2880, 201088
    attention = 2 * hidden * (2 * 64 * 64 + 2 * 8 * 64)
    head = 2 * vocabulary * hidden
    expert = 3 * hidden * 2880 * 4.25 / 8
    return Model(expert, 24 * attention + head, attention + 2 * 3 * hidden * 2880 + head, Assumptions.layer_overhead_us)


def _deepseek_v2_lite() -> Model:
    hidden, vocabulary, heads = 2048, 102400, 16
    latent = hidden * heads * 192 + hidden * 576 + 512 * heads * 256 + heads * 128 * hidden
    head = 2 * vocabulary * hidden
    expert = 2 * 3 * hidden * 1408
    layer = 2 * latent + 2 * expert  # two shared experts
    return Model(expert, 26 * layer + 2 * (latent + 3 * hidden * 10944) + head, layer + head, Assumptions.latent_overhead_us)


MODELS = {"gpt-oss-20b": _gpt_oss_20b(), "dsv2lite": _deepseek_v2_lite()}
"""By the begin of a trace's name. Sizes by their config.json: MXFP4 experts, and bfloat16."""


@dataclass(frozen=True)
class Machine:
    """``link`` and ``vram``: bytes a second that kernels read."""

    name: str
    link: float
    vram: float


def machines() -> list[Machine]:
    found = []
    for gpu, slowest in (("A100-80GB", True), ("A100-80GB", False), ("H100", True), ("H100", False), ("GH200", False)):
        link, vram = GPUS[gpu].link, GPUS[gpu].hbm_gbps * Assumptions.hbm_efficiency
        rate = link.slowest if slowest else link.rate * Assumptions.read_efficiency
        found.append(Machine(f"{gpu}, {rate:.3g} GB/s", rate * GIGA, vram * GIGA))
    return found


def accepted(drafts: Drafts, steps: DraftSteps) -> np.ndarray:
    """``int[tokens]``: of the drafts of a step that begins there, how many are right."""
    draw = np.random.default_rng(SEED).random(len(steps.left))
    kinds = np.array(drafts.kept)[steps.request % len(drafts.kept)]
    return (draw[:, None] < kinds).sum(axis=1)


class Way(Protocol):
    """A way to draft: ``drafts`` of the next step, and what it learns from one."""

    @property
    def drafts(self) -> int: ...

    def observe(self, accepted: Sequence[int], missed_bytes: float, seconds: float) -> None: ...


class Fixed:
    def __init__(self, drafts: int):
        self.drafts = drafts

    def observe(self, accepted: Sequence[int], missed_bytes: float, seconds: float) -> None:
        pass


class ByAcceptance:
    """SGLang's own code, for one request, with its default thresholds."""

    def __init__(self, tiers: Sequence[int], start: int):
        from sglang.srt.speculative.adaptive_spec_params import DEFAULT_ADAPTIVE_CONFIG, AdaptiveStepSlot

        logging.getLogger("sglang.srt.speculative.adaptive_spec_params").setLevel(logging.WARNING)
        self._slot = AdaptiveStepSlot(start, DEFAULT_ADAPTIVE_CONFIG["1"] | {"candidate_steps": list(tiers)})
        self.drafts = self._slot.current_steps

    def observe(self, accepted: Sequence[int], missed_bytes: float, seconds: float) -> None:
        self._slot.update(list(accepted))
        self.drafts = self._slot.current_steps


class Told:
    """The policy, which is told the time of computing, in each step."""

    def __init__(self, compute_seconds: Sequence[float], rate: float):
        self._policy = DraftLength(TIERS, compute_seconds, rate, TIERS[-1])

    @property
    def drafts(self) -> int:
        return self._policy.drafts

    def observe(self, accepted: Sequence[int], missed_bytes: float, seconds: float) -> None:
        self._policy.observe(accepted, missed_bytes)


class AsServed:
    """The code of a server, for one request: it learns the time of computing, and sees the results of a step once the next one
    is launched."""

    def __init__(self, tiers: Sequence[int], rate: float):
        self._tiers = tiers
        link = SimpleNamespace(measured=SimpleNamespace(together=SimpleNamespace(scattered=rate / GIGA)))
        self._ledger = SimpleNamespace(counted=SimpleNamespace(steps=(0, 0)), decode_missed_bytes=0.0)
        self._manager = SimpleNamespace(ledger=self._ledger, link=link, steps=0, poll=lambda: None)
        self._manager.observer = SimpleNamespace(catch_up=lambda: None)
        self._now = 0.0
        manager: Any = self._manager
        self._lengths = DraftLengths(manager, lambda own: [own], lambda: self._now)
        self._launch()

    def _launch(self) -> None:
        self.drafts = self._lengths.choose(1, self._tiers, TIERS[-1])
        self._lengths.begin_step()
        self._manager.steps += 1

    def observe(self, accepted: Sequence[int], missed_bytes: float, seconds: float) -> None:
        self._now += seconds
        self._ledger.counted.steps = (0, self._manager.steps)
        self._ledger.decode_missed_bytes += missed_bytes
        self._launch()
        self._lengths.verified(accepted)


@dataclass(frozen=True)
class Cost:
    """Seconds of steps of ``model`` on ``machine``."""

    model: Model
    machine: Machine
    layers: int
    per_token: int

    def passes(self, drafts: int) -> float:
        """Of the draft layer. Without drafts SGLang runs one as well, to keep its KV cache complete."""
        each = self.model.layer_us * 1e-6 + self.model.draft_bytes / self.machine.vram
        return max(1, drafts) * each

    def compute(self, hit: Any) -> Any:
        """Where so many experts are read from VRAM; a number, or an array of them."""
        read = self.model.dense_bytes + hit * self.model.expert_bytes
        return self.layers * self.model.layer_us * 1e-6 + read / self.machine.vram

    def link(self, missed: Any) -> Any:
        return missed * self.model.expert_bytes / self.machine.link

    def known(self, drafts: int) -> float:
        """What is known at the start of a step that misses nothing."""
        weight = 1 + drafts * Assumptions.draft_token_weight
        return self.compute(self.per_token * weight) + self.passes(drafts)


def served(way: Way, steps: DraftSteps, right: np.ndarray, cost: Cost, speculates: bool = True) -> tuple[float, list[float]]:
    """Seconds for each kept token over the scored ones, and the share of steps with each number of drafts."""
    takes = (cost.compute(steps.hit) + cost.link(steps.missed)).tolist()
    misses, reaches = (steps.missed * cost.model.expert_bytes).tolist(), np.minimum(right, steps.left - 1).tolist()
    passes = [cost.passes(drafts) if speculates else 0.0 for drafts in TIERS]
    token, seconds, kept, count = 0, 0.0, 0, [0] * len(TIERS)
    while token < len(takes):
        drafts = way.drafts
        tier, good = TIERS.index(drafts), min(reaches[token], drafts)
        if token >= steps.warmup:
            seconds += takes[token][tier] + passes[tier]
            kept += good + 1
            count[tier] += 1
        way.observe([good], misses[token][tier], takes[token][tier] + passes[tier])
        token += good + 1
    return seconds / kept, [each / sum(count) for each in count]


def ways(cost: Cost) -> dict[str, Callable[[], Way]]:
    compute, rate = [cost.known(tier) for tier in TIERS], cost.machine.link
    return {
        NONE: lambda: Fixed(0),
        "0": lambda: Fixed(0),
        "1": lambda: Fixed(1),
        "2": lambda: Fixed(2),
        "3": lambda: Fixed(3),
        "by acceptance, 1 or 3": lambda: ByAcceptance((1, 3), 3),
        "by acceptance, 0 to 3": lambda: ByAcceptance(TIERS, 3),
        "policy": lambda: Told(compute, rate),
        f"policy, rate {WRONG_RATE:g} times too high": lambda: Told(compute, WRONG_RATE * rate),
        "as a server runs it, 1 to 3": lambda: AsServed(TIERS[1:], rate),
        "as a server runs it, 0 to 3": lambda: AsServed(TIERS, rate),
    }


NAMES = tuple(ways(Cost(MODELS["dsv2lite"], Machine("", 1.0, 1.0), 1, 1)))
OURS, WRONG, DRAFTING, SERVED = NAMES[-4:]


@dataclass(frozen=True)
class Case:
    """``seconds`` for each kept token, by way. ``link_share``: link time over the other time of a step without drafts.
    ``steps``: the share of the policy's steps by number of drafts."""

    trace: str
    residency: float
    machine: str
    drafts: str
    link_share: float
    seconds: dict[str, float]
    steps: list[float]

    @property
    def over_fixed(self) -> float:
        """The time of what a server runs with the numbers from one to three over that of the best fixed one."""
        return self.seconds[DRAFTING] / min(self.seconds[str(tier)] for tier in TIERS[1:])

    def over(self, way: str, none: str = NONE) -> float:
        """The time of ``way`` over that of the better of no drafts and three."""
        return self.seconds[way] / min(self.seconds[none], self.seconds["3"])

    @property
    def alike(self) -> bool:
        return ALIKE[0] <= self.link_share <= ALIKE[1]

    def __str__(self) -> str:
        return f"{self.trace}, {self.residency:.0%}, {self.machine}, {self.drafts}"


def run(name: str, trace: Trace) -> Iterator[Case]:
    (model,) = (model for begin, model in MODELS.items() if name.startswith(begin))
    for residency in RESIDENCIES:
        steps = DraftSteps.of(trace, residency, max(TIERS))
        for machine, drafts in product(machines(), ACCEPTANCE):
            cost, right = Cost(model, machine, trace.num_layers, steps.per_token), accepted(drafts, steps)
            found = {way: served(make(), steps, right, cost, way != NONE) for way, make in ways(cost).items()}
            scored = slice(steps.warmup, None)
            share = cost.link(steps.missed[scored, 0].mean()) / cost.compute(steps.hit[scored, 0].mean())
            seconds = {way: taken for way, (taken, _) in found.items()}
            yield Case(name, residency, machine.name, drafts.name, share, seconds, found[OURS][1])


def goals(cases: Sequence[Case]) -> list[dict[str, object]]:
    alike = [case for case in cases if case.alike]
    worst, least = max(cases, key=lambda case: case.over(OURS)), max(alike, key=lambda case: case.over(OURS), default=None)
    served_worst = max(cases, key=lambda case: case.over(SERVED))
    fixed_worst = max(cases, key=lambda case: case.over_fixed)
    return [
        goal(
            f"at most {TOLERANCE:g} of the better of no drafts and three",
            [case.over(OURS) <= TOLERANCE for case in cases],
            f"{worst.over(OURS):.3f}: {worst}",
        ),
        goal(
            "the same, where no drafts means a speculating server that never drafts",
            [case.over(OURS, "0") <= TOLERANCE for case in cases],
            f"{max(case.over(OURS, '0') for case in cases):.3f}",
        ),
        goal(
            f"below both where the link takes {ALIKE[0]:g} to {ALIKE[1]:g} of the other time",
            [case.over(OURS) < 1 for case in alike],
            f"{least.over(OURS):.3f}: {least}" if least else "no case",
        ),
        goal(
            f"{SERVED}: at most {TOLERANCE:g} of the better of no drafts and three",
            [case.over(SERVED) <= TOLERANCE for case in cases],
            f"{served_worst.over(SERVED):.3f}: {served_worst}",
        ),
        goal(
            f"{DRAFTING}: at most {TOLERANCE:g} of the best of one, two and three",
            [case.over_fixed <= TOLERANCE for case in cases],
            f"{fixed_worst.over_fixed:.3f}: {fixed_worst}",
        ),
    ]


def _means(cases: Sequence[Case]) -> list[str]:
    return [f"{np.mean([case.over(way) for case in cases]):.3f}" for way in NAMES]


def markdown(cases: Sequence[Case]) -> str:
    lost = [case for case in cases if case.over(OURS) > TOLERANCE or (case.alike and case.over(OURS) >= 1)]
    by = [(name, [case for case in cases if case.machine == name]) for name in dict.fromkeys(c.machine for c in cases)]
    kinds = [(name, [case for case in cases if case.drafts == name]) for name in dict.fromkeys(c.drafts for c in cases)]
    shown = [*by, *kinds, ("link and the rest alike", [c for c in cases if c.alike]), ("all", list(cases))]
    worst = [f"{max(case.over(way) for case in cases):.3f}" for way in NAMES]
    steps = [f"{100 * share:.0f}" for share in np.mean([case.steps for case in cases], axis=0)]
    shown_ways = (NONE, "0", "1", "2", "3", OURS)
    rates = [[drafts.name, "; ".join(", ".join(f"{p:g}" for p in kind) for kind in drafts.kept), drafts.source]
             for drafts in ACCEPTANCE]  # fmt: skip
    return "\n".join([
        "# How many tokens to draft where experts are offloaded\n",
        "Made by `python -m benchmarks.draft_length TRACES`, a simulation: no GPU ran. One request; residents follow the "
        "traffic (`continuous`).\nTimes are for each kept token, over the better of `none` and `3`. `none` is a server without "
        "speculation. `0` is one that never\ndrafts, but runs the draft layer once a step, as SGLang does to keep its KV cache "
        "complete; so does the policy.\n`as a server runs it` is the code behind `--expert-offload-draft-policy misses`, with "
        "the numbers that follow: it learns the time of computing\nfrom that of steps, and sees the results of a step once the "
        "next one is launched. `by acceptance` is SGLang's own code with its default\nthresholds: its default numbers for one "
        "request are "
        "1, 3, 5 and 7, here those up to 3, and those of the policy. `policy` is told the rate of the link and the\ntime of "
        "steps that miss nothing; it begins with a growth of misses "
        f"that was read off these traces. Its steps had 0, 1, 2 and 3 drafts in {', '.join(steps)} %.\n",
        grid(["goal", "met", "worst"], [[g["goal"], g["met"], g["worst"]] for g in goals(cases)]),
        grid(["mean over cases", "cases", *NAMES], [[name, len(of), *_means(of)] for name, of in shown if of]
             + [["worst of all", len(cases), *worst]]),
        "## Acceptance\n",
        "The share of steps that keep the draft at each position. Drafts of one step depend on each other as these say; steps "
        "do not.\n",
        grid(["drafts", "kept", "source"], rates),
        "## Where the policy misses a goal\n",
        grid(["trace", "resident", "machine", "drafts", "link over the rest", *(f"{way}, ms" for way in shown_ways), "over"], [
            [c.trace, f"{c.residency:.0%}", c.machine, c.drafts, f"{c.link_share:.2f}",
             *(f"{1e3 * c.seconds[way]:.2f}" for way in shown_ways), f"{c.over(OURS):.3f}"] for c in lost
        ]),
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_length", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the page")
    args = parser.parse_args(arguments)
    cases = [case for path in args.traces for case in run(path.stem, Trace.load(path))]
    args.out.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(case)) for case in cases)
    (args.out / "drafts.json").write_text(f"[\n{lines}\n]\n")
    (args.out / "drafts.md").write_text(markdown(cases))


if __name__ == "__main__":
    main()
