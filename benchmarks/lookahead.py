"""Measures how many misses the next layers' own routers predict, in a model that ``scripts/train_tiny.py`` trained.

    python -m scripts.train_tiny /tmp/deep --shape deep --steps 2000
    python -m benchmarks.lookahead /tmp/deep benchmarks/results/lookahead

A real server on the CPU continues held-out texts of both topics, with sampling, and records a trace with guesses. The trace is
then replayed. ``--trace`` replays an existing trace. Writes ``lookahead.md``.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sglang

from scripts.harness.patience import patience
from scripts.harness.server import Server
from scripts.train_tiny import corpus
from sglang_uvm_offload.replay.lookahead import CONTROL, foreseen
from sglang_uvm_offload.replay.policies import SHIPPED, SLOTS
from sglang_uvm_offload.replay.results import Foreseen
from sglang_uvm_offload.routing.trace import Trace

RESIDENCIES = (0.0, 0.25, 0.5, 0.78)
"""At 0 every expert is a miss, which shows how much of the next router's choice a router predicts."""
BATCHES = (1, 4)
REQUESTS, TOKENS, TOGETHER = 48, 96, 8
PROMPT = 200
"""Characters of each held-out text."""
SAMPLING = {"temperature": 1.0, "top_p": 0.95, "max_new_tokens": TOKENS, "ignore_eos": True}


def prompts() -> list[str]:
    """Returns the beginnings of held-out texts in random order, equally many per topic."""
    _, held = corpus()
    found = [text[:PROMPT] for texts in held.values() for _, text in texts[: REQUESTS // len(held)]]
    return random.Random(0).sample(found, len(found))


def record(model: Path, path: Path) -> None:
    with Server(model, expert_offload_num_resident=8, expert_offload_trace=path, max_total_tokens=8192) as server:

        def ask(prompt: str) -> None:
            server.post("/generate", {"text": prompt, "sampling_params": SAMPLING})

        with ThreadPoolExecutor(TOGETHER) as clients:
            list(clients.map(ask, prompts()))
        assert server.process is not None
        server.process.terminate()
        server.process.wait(patience(120))


def measured(trace: Trace) -> Iterator[tuple[float, int, Foreseen]]:
    for residency in RESIDENCIES:
        for batch in BATCHES:
            for policy in (SLOTS, SHIPPED) if residency else (SHIPPED,):
                for each in foreseen(trace, policy, residency, batch):
                    yield residency, batch, each


def row(residency: float, batch: int, each: Foreseen) -> str:
    cells = [f"{residency:.0%}", str(batch), each.policy if residency else "", each.predictor, str(each.distance or "")]
    cells += [f"{each.misses_per_step:.2f}", f"{each.brought_per_step:.2f}", f"{each.recall:.1%}", f"{each.precision:.1%}"]
    return f"| {' | '.join(cells)} |"


def page(model: Path, trace: Trace) -> str:
    config = json.loads((model / "config.json").read_text())
    (steps,) = re.findall(r"`scripts/train_tiny.py` \((\d+) steps\)", (model / "README.md").read_text())
    perplexity = re.findall(r"^\| (?:prose|code|topic) .*\|$", (model / "README.md").read_text(), re.M)[:3]
    assert trace.guesses is not None
    found = list(measured(trace))
    controls = [each for _, _, each in found if each.predictor == CONTROL]
    wrong = [each for each in controls if (each.recall, each.precision) != (1, 1)]
    if wrong:
        raise SystemExit(f"the control, which guesses the true experts, must have recall and precision 1: {wrong}")
    lines = [
        "# Misses that the next layers' routers foresee",
        "",
        f"Made by `python -m benchmarks.lookahead` of {trace.num_layers} MoE layers of {trace.num_experts} experts, "
        f"{trace.ids.shape[2]} for each token, hidden size {config['hidden_size']},",
        f"trained by `python -m scripts.train_tiny FOLDER --shape deep --steps {steps}` (its perplexity on held-out text is "
        "below), and served by SGLang",
        f"{sglang.__version__} on a CPU (Python {platform.python_version()}): {len(trace.ids)} decoded tokens of "
        f"{trace.num_requests} requests, the first half of which warms up. In {int(trace.guesses.folded.any(axis=1).sum())} "
        "layers the",
        "earlier router's input was scaled by the ratio of both norms. Of the layers that are guessed, as `replay` has them.",
        "`experts themselves` in place of guesses foresaw every miss, and nothing else, in every case.",
        "",
        perplexity[0],
        "| --- | --- | --- | --- |",
        *perplexity[1:],
        "",
        "| in VRAM | batch | policy | guesses | layers ahead | misses/step | brought/step | recall | precision |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(row(*each) for each in found if each[-1].predictor != CONTROL),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path, help="model folder that scripts/train_tiny.py wrote")
    parser.add_argument("out", type=Path, help="folder for lookahead.md")
    parser.add_argument("--trace", type=Path, help="trace file; recorded if missing (default: beside the model's folder)")
    args = parser.parse_args()
    path = args.trace or args.model.with_suffix(".npz")
    if not path.exists():
        record(args.model, path)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "lookahead.md").write_text(page(args.model, Trace.load(path)))
    sys.stdout.write((args.out / "lookahead.md").read_text())


if __name__ == "__main__":
    main()
