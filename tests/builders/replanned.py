"""A plan made again from the launch that a plan prints, by SGLang's parser and as a launch is judged."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from builders.pages import config_of_launch, launched
from builders.plans import run
from sglang.srt.arg_groups import cuda_graph_hook, parallel_hook, speculative_hook
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.server_args import ServerArgs

from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.machine import Machine
from sglang_uvm_offload.plan.outcome import Plan
from sglang_uvm_offload.plan.planner import plan
from sglang_uvm_offload.plugin.checks import launch_checks
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import estimate
from sglang_uvm_offload.plugin.launch.demand import demand_of
from sglang_uvm_offload.requested_config import parse


def printed(*words: object) -> tuple[int, str]:
    """The exit status of ``plan`` and its standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run(*words)
    return code, out.getvalue()


def launches(report: str) -> dict[str, list[str]]:
    """The words of each launch of a report, with its variables, by its heading."""
    parts = [part for part in report.split("\n\n") if part.startswith("To serve it")]
    return {heading: shlex.split(command.replace("\\\n", " ")) for heading, _, command in (p.partition(":\n") for p in parts)}


def replanned(words: Sequence[str], where: Machine) -> Plan:
    """What the planner makes of a launch, the words of a command, on the machine ``where``."""
    variables = dict(word.split("=", 1) for word in words[: words.index("python")])
    arguments = launched(words[len(variables) :])
    assert arguments is not None
    parsed, config = config_of_launch([*arguments, "--device", "cuda"])
    with mock.patch.dict(os.environ, variables), _on(where):
        given = ServerArgs.from_cli_args(parsed)
        experts = shape_of(Path(parsed.model_path), quantization=parsed.quantization).num_experts
        config = config or parse({"num_resident": experts, "slots": 0, "headroom_gb": 0.0, "stream_buffer_gb": 0.0})
        assert config is not None
        vars(parsed).update(launch_checks._headroom(config, resolving_view(given)))
        given = ServerArgs.from_cli_args(parsed)
        # Of SGLang's resolution, what divides a launch; the rest asks a GPU.
        parallel_hook.handle_deprecated_dp_attention(given)
        cuda_graph_hook.parse_cuda_graph_config(given)
        parallel_hook.handle_data_parallelism(given)
        speculative_hook.handle_speculative_decoding(given)
        cfg, model = resolving_view(given), model_config_of(given)
        case = estimate._case(config, cfg, model, given, demand_of(cfg, given, model))
    return plan(dataclasses.replace(case, num_resident=config.num_resident, machine=where))


@contextmanager
def _on(where: Machine) -> Iterator[None]:
    """As on ``where``; the shape of the model is taken as it is recorded."""

    def shape(path: Path, name: str, quantization: str | None, **others: Any) -> Any:
        return shape_of(path if path.exists() else Path(name), name, quantization=quantization)

    changed: dict[str, Any] = {
        "get_device_memory_capacity": lambda device: where.vram_bytes >> 20,
        "host_available": lambda: where.host_bytes,
        "has_one_memory": lambda: where.one_memory,
        "rates": lambda: (where.link_gbps, where.hbm_gbps, where.tflops),
        "measured_link": lambda cfg: None,
        "free_by_gpu": lambda of: {rank.gpu: where.vram_bytes for rank in of},
        "shape_of": shape,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(estimate, **changed))
        stack.enter_context(
            mock.patch.object(launch_checks, "get_device_memory_capacity", changed["get_device_memory_capacity"])
        )
        stack.enter_context(mock.patch.dict(QUANTIZATION_METHODS, mxfp4=Mxfp4Config))  # known only where there is a GPU
        yield


def folder_of(config: Path, folder: Path) -> Path:
    """A checkpoint folder with the configuration of a file of ``fixtures``."""
    made = folder / config.stem
    made.mkdir()
    (made / "config.json").write_text(json.dumps(json.loads(config.read_text())["config"]))
    return made
