"""Answers prompts, one after the other, with a real SGLang engine: ``python engine.py JOB.json``, in the environment of
``build.sglang_environment``. The job has ``engine`` (SGLang's arguments), ``prompts`` (texts or token ids), ``max_new_tokens``
and ``result``. Optional are ``beside``, what to send with each prompt, and ``sleeps``, whether to release memory between
prompts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def run_engine(job: dict[str, Any], folder: Path, environment: dict[str, str], seconds: float) -> dict[str, Any]:
    """Runs the job in a separate process per node, ends everything these started, and returns ``answers`` and ``server_info``.
    ``folder`` then has the log, and ``folder/node1`` the second node's."""
    from scripts.harness.server import gathered  # not in the process that serves

    job = job | {"engine": gathered(job["engine"]), "result": str(folder / "result.json")}
    engine, log = job["engine"], folder / "log.txt"
    others = range(1, engine.get("nnodes", 1))
    started = [start(job | {"engine": engine | {"node_rank": rank}}, folder / f"node{rank}", environment) for rank in others]
    process = start(job, folder, environment)
    try:
        code = process.wait(seconds)
    finally:
        for each in [process, *started]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
    assert code == 0, "the engine's log ends:\n" + log.read_text(errors="replace")[-5000:]
    return json.loads((folder / "result.json").read_text())


def start(job: dict[str, Any], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, str(folder / "job.json")],
            stdout=log,
            stderr=log,
            env=os.environ | environment,
            start_new_session=True,
        )


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import serving_host
    from sglang import Engine

    serving_host.preload()
    serving_host.fork_children_from_here()  # so they need not import SGLang again
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = Engine(**job["engine"])
    sampling = {"temperature": 0, "max_new_tokens": job["max_new_tokens"], "ignore_eos": True}
    answers = []
    for prompt in job["prompts"]:
        if job.get("sleeps") and answers:
            while not engine.flush_cache().success:  # it answers slightly before it is idle, and sleeps only when idle
                time.sleep(0.1)
            engine.release_memory_occupation()
            engine.resume_memory_occupation()
        asked = {"prompt": [prompt]} if isinstance(prompt, str) else {"input_ids": [prompt]}
        answers += engine.generate(sampling_params=sampling, **asked, **job.get("beside", {}))
    info = engine.get_server_info()
    engine.shutdown()
    Path(job["result"]).write_text(json.dumps({"answers": answers, "server_info": info}, default=str))


if __name__ == "__main__":
    main()
