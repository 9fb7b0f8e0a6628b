#!/usr/bin/env python3
"""Show that a checkpoint of ``trace_checkpoint.py`` replays its trace when it is served.

    python benchmarks/trace_checkpoint_check.py CHECKPOINT --trace TRACE.npz --png OUT.png
    python benchmarks/trace_checkpoint_check.py CHECKPOINT --url http://127.0.0.1:30000

One request for each stretch of the walk is answered, all at once. SGLang records where each token was routed, and that is
compared with the walk, token by token and layer by layer; a difference ends in exit status 1. The picture has the hit rate
curve and the overlap from token to token: measured in the trace, in the walk that was taken from it, and as served. Without
``--url`` a server is started on this machine's CPU, which is for the tiny checkpoints; a server at a URL must run with
``--enable-return-routed-experts``.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE), str(HERE.parent), str(HERE.parent / "scripts")]

import numpy as np  # noqa: E402
import requests  # noqa: E402
from routing_overlay import layers_followed  # noqa: E402
from trace_walk import Walk, WalkError, read  # noqa: E402

from sglang_uvm_offload.routing.trace import Trace, TraceError  # noqa: E402

PROMPT = 4
LAGS = (1, 2, 4, 8, 16, 32, 64)
SHARES = (0.25, 0.5, 0.78)
SECONDS = 600


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request: the tokens that were routed (all but the last one generated), and their experts."""

    tokens: np.ndarray
    experts: np.ndarray
    """``[token, MoE layer, k]``, in increasing order."""


def serve(url: str, walk: Walk, prompts: list[list[int]], new_tokens: list[int]) -> list[Answer]:
    """Greedy answers to ``prompts``, all at once, with SGLang's own recording of their routing."""
    sampling = [{"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for count in new_tokens]
    body = {"input_ids": prompts, "sampling_params": sampling, "return_routed_experts": True}
    reply = requests.post(f"{url}/generate", json=body, timeout=SECONDS)
    if not reply.ok:
        raise SystemExit(f"{url} answers {reply.status_code}: {reply.text[:500]}")
    return [answer(walk, prompt, response) for prompt, response in zip(prompts, reply.json(), strict=True)]


def answer(walk: Walk, prompt: list[int], response: dict[str, Any]) -> Answer:
    recorded = response["meta_info"].get("routed_experts")
    if recorded is None:
        raise SystemExit("the server did not record routing: start it with --enable-return-routed-experts")
    tokens = np.array([*prompt, *response["output_ids"]])[:-1]
    layers, top_k = walk.routing.ids.shape[1:]
    experts = np.frombuffer(base64.b64decode(recorded), np.int32).reshape(len(tokens), -1, top_k)
    return Answer(tokens, np.sort(experts[:, -layers:], axis=-1))  # dense layers, if any, come first


def walked(url: str, walk: Walk) -> list[Answer]:
    """Every stretch of the walk from its first to its last position."""
    stretches = range(len(walk.starts))
    lengths = [int(length) + 1 for length in walk.routing.seq_len]  # the last token generated is not routed
    return serve(url, walk, [walk.prompt_ids(stretch, PROMPT) for stretch in stretches], lengths)


def differences(walk: Walk, answers: list[Answer]) -> list[str]:
    """Where the answers leave the walk; none where they are as they should be."""
    found = []
    for request, served in enumerate(answers):
        positions = walk.position_of(served.tokens)
        lost = np.flatnonzero(positions[1:] != (positions[:-1] + 1) % walk.positions)
        if lost.size:
            found.append(f"request {request}: position {positions[lost[0]]} is followed by {positions[lost[0] + 1]}")
        wrong = (served.experts != np.sort(walk.experts_of(served.tokens), axis=-1)).any(-1)
        if wrong.any():
            token, layer = np.argwhere(wrong)[0]
            found.append(
                f"request {request}: {wrong.sum()} of {wrong.size} routings differ, the first at token {token} (position "
                f"{positions[token]}) in MoE layer {layer}: {served.experts[token, layer].tolist()} "
                f"and not {sorted(walk.experts_of(served.tokens)[token, layer].tolist())}"
            )
    return found


def as_trace(answers: list[Answer], num_experts: int) -> Trace:
    """What was routed while decoding."""
    decoded = [served.experts[PROMPT:] for served in answers]
    return Trace(np.concatenate(decoded), np.array([len(ids) for ids in decoded]), num_experts)


def hit_rate(trace: Trace) -> np.ndarray:
    """``[n]`` for n = 0..experts: the share of activations that go to a layer's n most used experts, mean over the layers."""
    layers = [np.bincount(ids.ravel(), minlength=trace.num_experts) for ids in trace.ids.swapaxes(0, 1)]
    ordered = -np.sort(-np.stack(layers), axis=1) / trace.ids[:, 0].size
    return np.concatenate([[0.0], ordered.cumsum(axis=1).mean(axis=0)])


def overlap(trace: Trace, lag: int) -> float:
    """The share of a token's experts that the token ``lag`` before it in its request used too, mean over tokens and layers."""
    request = np.repeat(np.arange(trace.num_requests), trace.seq_len)
    later = lag + np.flatnonzero(request[lag:] == request[:-lag])
    now, then = trace.ids[later], trace.ids[later - lag]
    return float((now[..., :, None] == then[..., None, :]).any(-1).mean()) if later.size else float("nan")


def lift(trace: Trace, lag: int) -> float:
    """``overlap``, over what it would be by chance."""
    return overlap(trace, lag) * trace.num_experts / trace.ids.shape[2]


def summary(traces: dict[str, Trace]) -> str:
    """A table: what the best experts cover, and the overlap of neighbours."""
    lines = [f"{'':12}{'tokens':>8}" + "".join(f"{f'best {share:.0%}':>10}" for share in SHARES) + "   overlap, over chance"]
    for name, trace in traces.items():
        curve = hit_rate(trace)
        cells = [f"{curve[round(share * trace.num_experts)]:10.3f}" for share in SHARES]
        lines.append(f"{name:12}{len(trace.ids):8}" + "".join(cells) + f"{overlap(trace, 1):10.3f}{lift(trace, 1):13.2f}")
    return "\n".join(lines)


def draw(traces: dict[str, Trace], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    styles = {
        "measured": {"color": "0.6", "linewidth": 4},
        "walked": {"color": "tab:blue", "linewidth": 2},
        "served": {"color": "tab:orange", "linestyle": "--"},
    }
    for name, trace in traces.items():
        curve = hit_rate(trace)
        left.plot(np.linspace(0, 1, len(curve)), curve, label=f"{name}, {len(trace.ids)} tokens", **styles[name])
        right.plot(LAGS, [lift(trace, lag) for lag in LAGS], **styles[name])
    right.axhline(1, color="black", linewidth=0.8, linestyle=":")
    left.set(xlabel="share of a layer's experts, most used first", ylabel="share of activations", xlim=(0, 1), ylim=(0, 1.02))
    right.set(xlabel="tokens back", ylabel="share of experts in common, times chance", xscale="log", ylim=(0, None))
    right.set_xticks(LAGS, [str(lag) for lag in LAGS])
    right.minorticks_off()
    left.legend(loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def compared(walk: Walk, answers: list[Answer], measured: Trace | None) -> dict[str, Trace]:
    """The traces to compare: the measured one where it is known, in the layers that the walk follows; the walk; the served."""
    layers, experts = walk.routing.num_layers, walk.routing.num_experts
    traces = {"walked": walk.routing, "served": as_trace(answers, experts)}
    if measured is None:
        return traces
    followed = layers_followed(measured.num_layers, measured.num_experts, layers, experts)
    return {"measured": Trace(measured.ids[:, :followed], measured.seq_len, measured.num_experts)} | traces


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--url", help="a running server (default: start one on this machine's CPU)")
    parser.add_argument("--trace", type=Path, metavar="TRACE.npz", help="the trace that the checkpoint was made from")
    parser.add_argument("--png", type=Path, help="draw what was compared")
    args = parser.parse_args()
    try:
        walk = Walk.load(args.checkpoint)
        measured = read(args.trace) if args.trace else None
        answers = walked(args.url, walk) if args.url else walked_on_cpu(args.checkpoint, walk)
        traces = compared(walk, answers, measured)
    except (TraceError, WalkError, OSError) as problem:
        parser.error(str(problem))
    print(summary(traces))
    if args.png:
        draw(traces, f"{args.checkpoint.name}: routing measured and served", args.png)
    problems = differences(walk, answers)
    tokens = sum(len(served.tokens) for served in answers)
    print("\n".join(problems) if problems else f"all {tokens} tokens were routed as recorded, in every layer")
    sys.exit(bool(problems))


def walked_on_cpu(checkpoint: Path, walk: Walk) -> list[Answer]:
    from harness.server import Server

    recorder = [sys.executable, str(HERE.parent / "scripts" / "harness" / "recording_server.py")]
    with Server(checkpoint, command=recorder, enable_return_routed_experts=True) as server:
        return walked(server.url, walk)


if __name__ == "__main__":
    main()
