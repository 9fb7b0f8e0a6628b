"""Recorded model shapes from SGLang's classes, so that tests of the planner are fast and need no SGLang.

``RECORD_SHAPES=1 python -m pytest ...`` records the shapes that the tests request from SGLang."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from sglang_uvm_offload.plan import engine_shape
from sglang_uvm_offload.plan.safetensors_header import CheckpointError

RECORDED = Path(__file__).parents[1] / "fixtures" / "shapes.json"
SGLANG = "0.5.23"
"""The version that the shapes were recorded with."""
_kept, _keep, _version = engine_shape._kept, engine_shape._keep, engine_shape._version


def _read() -> dict[str, Any]:
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


_shapes = _read()


def use_recorded() -> None:
    """Uses recorded shapes in this process from now on."""
    engine_shape._kept, engine_shape._keep = _recorded, _record
    engine_shape._version = lambda: _version() or SGLANG


@contextmanager
def asking_sglang() -> Iterator[None]:
    """Asks SGLang for shapes, as outside tests."""
    with mock.patch.multiple(engine_shape, _kept=_kept, _keep=_keep, _version=_version):
        yield


def recorded(key: str) -> bytes | None:
    shape = _shapes.get(key)
    return None if shape is None else json.dumps(_expanded(shape)).encode()


def _recorded(key: str) -> bytes | None:
    return recorded(key) or _kept(key)


def _record(key: str, line: bytes) -> None:
    if not os.environ.get("RECORD_SHAPES"):
        return _keep(key, line)
    _shapes[key] = _compact(json.loads(line))
    lines = ",\n".join(f"{json.dumps(each)}: {json.dumps(_shapes[each])}" for each in sorted(_shapes))
    RECORDED.write_text(f"{{\n{lines}\n}}\n")


def _compact(shape: dict[str, Any]) -> dict[str, Any]:
    """Keeps each kind of layer once."""
    kinds: list[dict[str, Any]] = []
    out = dict(shape)
    for part in ("layers", "draft_layers"):
        out[part] = []
        for layer in shape[part]:
            kind = {name: value for name, value in layer.items() if name != "index"}
            if kind not in kinds:
                kinds.append(kind)
            out[part].append(kinds.index(kind))
    return out | {"kinds": kinds}


def _expanded(shape: dict[str, Any]) -> dict[str, Any]:
    kinds, first = shape["kinds"], len(shape["layers"])
    layers = [{"index": index, **kinds[kind]} for index, kind in enumerate(shape["layers"])]
    drafts = [{"index": index, **kinds[kind]} for index, kind in enumerate(shape["draft_layers"], first)]
    return {name: value for name, value in shape.items() if name != "kinds"} | {"layers": layers, "draft_layers": drafts}


def ask_at_once(asked: Iterable[tuple[Path, Mapping[str, str]]]) -> None:
    """Has SGLang build these models, each with its arguments, in one process, which takes seconds to start. Tests that read one
    of these shapes then find it cached."""
    with contextlib.suppress(CheckpointError):  # raised again when a test reads that shape
        engine_shape._printed([{**engine_shape._files(path), "arguments.json": json.dumps(given)} for path, given in asked])
