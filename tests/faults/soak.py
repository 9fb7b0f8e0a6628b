"""Mixed traffic for minutes: see scripts/soak.sh."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reliability
from checkpoints import unserved_models
from faults.servers import FLAGS, Servers, session_of
from harness.server import Server, offload_state

SETTLED = 1 / 3
"""The share of the time that is no part of the judgement: caches fill."""
GROWTH = {"rss": 0.05, "handles": 0.02, "threads": 0.02}
"""How much of its median each may grow from the first half of the judged time to the second."""
DOMAINS = ("the weather in the north", "def f(x):\n    return x", "once upon a time in a far country", "1 2 3 4 5 6 7 8")
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})


def requests() -> list[tuple[str, str, dict[str, Any]]]:
    """(kind, path, body), the same each time."""
    made: list[tuple[str, str, dict[str, Any]]] = []
    for domain in DOMAINS:
        long = (domain + " ") * 12
        made += [
            ("short", "/generate", {"text": domain, "sampling_params": GREEDY}),
            ("long", "/generate", {"text": long, "sampling_params": GREEDY}),
            ("n", "/generate", {"text": domain, "sampling_params": {**GREEDY, "n": 2}}),
            ("logprobs", "/generate", {"text": domain, "sampling_params": GREEDY, "return_logprob": True}),
            ("regex", "/generate", {"text": domain, "sampling_params": {**GREEDY, "regex": "[a-c]{8}"}}),
            ("json_schema", "/generate", {"text": domain, "sampling_params": {**GREEDY, "json_schema": SCHEMA}}),
            ("completions", "/v1/completions", {"model": "m", "prompt": domain, "temperature": 0, "max_tokens": 8}),
            ("chat", "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": domain}], **GREEDY}),
            ("aborted", "/generate", {"text": long, "sampling_params": {**GREEDY, "max_new_tokens": 200}}),
        ]
    return made


def answer(server: Server, kind: str, path: str, body: dict[str, Any]) -> Any:
    """What is compared: texts and log-probabilities. An aborted request has no answer."""
    if kind == "aborted":
        events = server.stream(path, body)
        for _ in range(3):
            next(events)
        events.close()  # type: ignore[attr-defined]
        return None
    got = server.post(path, body)
    if "choices" in got:
        return [choice.get("text") or choice.get("message") for choice in got["choices"]]
    return [
        [each["text"], each["meta_info"].get("output_token_logprobs")] for each in (got if isinstance(got, list) else [got])
    ]


def sample(pid: int) -> dict[str, int]:
    """Of all processes of the session: bytes of memory, open handles, threads."""
    total = {"rss": 0, "handles": 0, "threads": 0}
    for process in session_of(pid):
        with contextlib.suppress(OSError):
            total["rss"] += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            total["handles"] += len(list((process / "fd").iterdir()))
            total["threads"] += len(list((process / "task").iterdir()))
    return total


def grown(samples: Sequence[dict[str, int]]) -> dict[str, float]:
    """By how much of its median each grew between the halves of the time after warm-up."""
    judged = samples[int(SETTLED * len(samples)) :]
    half = len(judged) // 2
    found = {}
    for name in GROWTH:
        first, second = ([each[name] for each in part] for part in (judged[:half], judged[half:]))
        found[name] = statistics.median(second) / max(statistics.median(first), 1) - 1 if first and second else 0.0
    return found


def soak(folder: Path, minutes: float) -> dict[str, Any]:
    servers = Servers(folder)
    saved = folder / "saved"
    saved.mkdir()
    try:
        wanted, expected = [], []
        with servers.server({}) as server:
            for request in requests():
                try:
                    expected.append(answer(server, *request))
                    wanted.append(request)
                except OSError as error:
                    print(f"the reference server refuses {request[0]}: {error}", file=sys.stderr)
        flags = {"expert_offload_save_profile": saved / "profile.npz", "expert_offload_trace": saved / "trace.npz"}
        wrong: list[str] = []
        answered: Counter[str] = Counter()
        samples = []
        with servers.server({}, **FLAGS, **flags) as server:
            assert server.process is not None
            until, draw = time.monotonic() + 60 * minutes, random.Random(0)
            while time.monotonic() < until:
                number = draw.randrange(len(wanted))
                if answer(server, *wanted[number]) != expected[number]:
                    wrong.append(str(wanted[number])[:200])
                answered[wanted[number][0]] += 1
                samples.append(sample(server.process.pid))
            fault = offload_state(server.get("/server_info"))["fault"]
        return {"minutes": minutes, "answers": dict(answered), "wrong": wrong, "fault": fault, "grown": grown(samples)}
    finally:
        servers.close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--out", type=Path, default=reliability.RESULTS.with_name("soak.json"))
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(unserved_models())
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        found = soak(folder, options.minutes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    flat = all(found["grown"][name] <= most for name, most in GROWTH.items())
    return 0 if flat and not found["wrong"] and found["fault"] is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
