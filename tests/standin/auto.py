"""Servers over the stand-in whose ranks decide how many experts are resident, and what each rank decided."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from builders.plugins import IN_SCHEDULER, saboteur
from standin.build import sglang_environment
from standin.engine import run_engine
from standin.run import Standin
from standin.serving import GPU, kept_links, serve_and_log

from scripts.harness.patience import patience
from scripts.harness.server import free_port
from sglang_uvm_offload.memory.layout import BLOCK_BYTES

N = "--expert-offload-num-resident"
FIRST = 9
"""Every token picks experts from this one on."""
TOKENS = 8
ONE: dict[str, Any] = {
    **{"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 1, "max_running_requests": 1},
    **{"expert_offload_headroom_gb": 0.0, "expert_offload_stream_tokens": "inf", "expert_offload_adapt": "off"},
    "expert_offload_resident_selection": "first_n",
    "expert_offload_slots": 0,
}
"""Serves one request at a time; residents never move."""
WITNESS = (
    IN_SCHEDULER
    + """
    import json
    from pathlib import Path
    from sglang.srt.runtime_context import get_parallel
    from sglang_uvm_offload.plugin.rank.residency import Residency
    def told(name):
        original = getattr(Residency, name)
        def method(residency, *args):
            result = original(residency, *args)
            group, number = residency._world, residency._division.num_resident
            decided = {"when": name, "node": get_parallel().node_rank, "rank": group.rank, "number": number}
            with Path(DECIDED).open("a") as file:
                file.write(json.dumps(decided) + "\\n")
            return result
        setattr(Residency, name, method)
    told("decide")
    told("correct")
"""
)
"""Makes each rank write what it decided, and what it corrected that to."""


class Served(NamedTuple):
    result: dict[str, Any]

    @property
    def log(self) -> str:
        return self.result["log"]

    @property
    def number(self) -> str:
        return self.result["server_info"]["expert_offload_num_resident"]

    @property
    def state(self) -> dict[str, Any]:
        return self.result["server_info"]["internal_states"][0]["expert_offload"]

    @property
    def tokens(self) -> list[list[int]]:
        return [answer["output_ids"] for answer in self.result["answers"]]

    def first_number(self) -> int:
        """The number that ``auto`` began with."""
        (found,) = re.findall(rf"{N} auto: (\d+) of \d+ experts a layer fit in VRAM: ", self.log)
        return int(found)

    def corrected(self) -> list[tuple[int, int]]:
        """Returns (residents after, residents before) of each correction."""
        told = r"(\d+) residents(?: and \d+ slots)? a layer"
        found = re.findall(rf"Expert offload: {told} instead of {told}, measured with", self.log)
        return [(int(after), int(before)) for after, before in found]


class Ranks(NamedTuple):
    """A server of several ranks."""

    served: Served
    decided: list[dict[str, Any]]
    calls: list[list[dict[str, Any]]]
    """The CUDA calls of each rank."""

    def numbers(self, when: str) -> dict[tuple[int, int], int]:
        """Returns by (node, rank) the number that it decided (``decide``), or began to serve with (``correct``)."""
        return {(each["node"], each["rank"]): each["number"] for each in self.decided if each["when"] == when}

    def in_vram(self) -> list[int]:
        """Returns each rank's bytes of experts that prefer VRAM."""
        return [sum(BLOCK_BYTES for place in _preferred(calls) if place == "device") for calls in self.calls]


def serve(standin: Standin, checkpoint: Path, folder: Path, number: object, **more: Any) -> Served:
    """Runs a server with one rank."""
    job = _job(checkpoint, number, more)
    result, calls = serve_and_log(job, FIRST, standin.library, folder)
    assert [call for call in calls if call["result"] != 0] == []
    return Served(result)


def serve_ranks(
    standin: Standin, checkpoint: Path, folder: Path, env: Mapping[str, str], plugin: str = "", **more: Any
) -> Ranks:
    """Runs a server of two ranks with ``auto``. With several nodes, each has its own launcher and one rank. ``env`` adds
    environment variables; ``plugin`` is the code of another SGLang plugin."""
    witness = WITNESS.replace("DECIDED", repr(str(folder / "decided")))
    environment = environment_of_ranks(standin, folder, plugin + witness)
    environment |= {"STANDIN_FIRST_EXPERT": str(FIRST), "STANDIN_LATE": "2", **env}
    own = {"tp_size": 2, "disable_custom_all_reduce": True, "port": free_port()}  # with DP attention, ranks use ports near it
    job = _job(checkpoint, "auto", own | more)
    result = run_engine(job, folder, environment, seconds=patience(900)) | {"log": (folder / "log.txt").read_text()}
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    assert [call for call in calls if call["result"] != 0] == []
    ranks = sorted({call["pid"] for call in calls if call["call"] == "cudaStreamBeginCapture"})
    decided = [json.loads(line) for line in (folder / "decided").read_text().splitlines()]
    return Ranks(Served(result), decided, [[call for call in calls if call["pid"] == pid] for pid in ranks])


def environment_of_ranks(standin: Standin, folder: Path, plugin: str = "") -> dict[str, str]:
    """Returns the environment of a server with two GPUs and another SGLang plugin."""
    folder.mkdir(parents=True)
    environment = sglang_environment(standin.library.parent, folder / "calls.jsonl", standin.library.parent / "caches")
    shutil.rmtree(kept_links(environment), ignore_errors=True)  # from another server
    environment |= {"STANDIN_GPUS": "2", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if plugin:
        saboteur(folder, plugin)
        environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment['PYTHONPATH']}"
    return environment


def _job(checkpoint: Path, number: object, more: dict[str, Any]) -> dict[str, Any]:
    engine = {"model_path": str(checkpoint), **GPU, **ONE, "expert_offload_num_resident": number, **more}
    prompt = [1, 2, 3] if engine.get("skip_tokenizer_init") else "hello world"
    return {"engine": engine, "prompts": [prompt], "max_new_tokens": TOKENS}


def _preferred(calls: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the preferred location of each advised block."""
    places: dict[int, str] = {}
    for call in calls:
        if call["call"] == "cudaMemAdvise" and call["advice"] == "SetPreferredLocation":
            first, last = (at // BLOCK_BYTES for at in (call["address"], call["address"] + call["nbytes"]))
            places |= dict.fromkeys(range(first, last), call["location"])
    yield from places.values()
