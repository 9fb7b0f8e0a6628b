"""Plans of known models, by default DeepSeek-V3 on eight H20 with more host RAM than any model needs."""

from __future__ import annotations

import argparse
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

from sglang_uvm_offload.cli import plan as command
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Parallel, Reserve, Workload
from sglang_uvm_offload.plan.machine import GIB, Machine, preset
from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.plan.outcome import Plan
from sglang_uvm_offload.plan.planner import plan

MODELS = Path(__file__).parents[1] / "fixtures" / "models"


@cache
def model(name: str = "deepseek-v3") -> ModelShape:
    return shape_of(MODELS / f"{name}.json")


def machine(name: str = "8xH20", host_gib: int = 4096, **changes: Any) -> Machine:
    return dataclasses.replace(preset(name), host_bytes=host_gib * GIB, **changes)


def case(
    name: str = "deepseek-v3", on: str | Machine = "8xH20", parallel: Parallel | None = None, given: Any = None, **work: Any
) -> Case:
    """Makes a case. ``on`` is a machine, or the name of one, which then has plenty of host RAM. ``given`` has more fields of
    the case or of its reserve. ``work`` has fields of its workload, by default two requests of 8192 tokens."""
    where, given = machine(on) if isinstance(on, str) else on, given or {}
    fields = {field.name for field in dataclasses.fields(Reserve)}
    reserve = Reserve(**{key: value for key, value in given.items() if key in fields})
    return Case(
        *(model(name), where, Workload(**{"context_length": 8192, "requests": 2} | work), parallel or Parallel(tp=where.gpus)),
        reserve=reserve,
        **{key: value for key, value in given.items() if key not in fields},
    )


def planned(*args: Any, hit_rate: float | None = None, **changes: Any) -> Plan:
    """Plans a case. The arguments are those of ``case``."""
    return plan(case(*args, **changes), hit_rate)


def run(*words: object) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(word) for word in words]))
