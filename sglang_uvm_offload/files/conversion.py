"""The line of Python that makes a trace or a profile of what other tools write of routing."""

from __future__ import annotations

import base64
import binascii
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_uvm_offload.files.npz import ArrayShape

BY_HAND = (
    "`replay` reads an npz file with ids[token, layer, k] (-1: no expert), seq_len[request] and num_experts, as "
    "numpy.savez writes it"
)
COUNTED = (
    "it counts experts, so `replay` cannot use it. To make a profile of it, fill in the checkpoint's folder name, the class in "
    "its config.json, and K, the experts per token"
)
TO_FILL = "to make a trace of it, fill in E, the model's experts per layer"
DENSE = " (where the first F layers have no experts, also save ids[:, F:] for ids)"
_ROUTED = "routed_experts"
_DEPTH = 6
"""How deep in a JSON value routing is looked for."""


def _line(code: str) -> str:
    return f":\n  python -c {shlex.quote(code)}"


def _text(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def _saved(ids: str, lengths: str = "[len(ids)]", experts: str = "E") -> str:
    return f'ids = {ids}; np.savez("trace.npz", ids=ids, seq_len={lengths}, num_experts={experts})'


def of_npy(path: Path, array: ArrayShape) -> str:
    """vLLM returns the routing of a request as such an array."""
    if not array.is_ids:
        return BY_HAND
    code = "import numpy as np; " + _saved(f"np.load({_text(path)})")
    return f"{TO_FILL}{DENSE}{_line(code)}"


def of_npz(path: Path, arrays: Mapping[str, ArrayShape]) -> str:
    ids = [name for name, array in arrays.items() if array.is_ids]
    if len(ids) != 1:
        return BY_HAND
    lengths = 'z["seq_len"]' if "seq_len" in arrays else "[len(ids)]"
    experts = 'z["num_experts"]' if "num_experts" in arrays else "E"
    code = f"import numpy as np; z = np.load({_text(path)}); " + _saved(f"z[{json.dumps(ids[0])}]", lengths, experts)
    return f"{TO_FILL}{_line(code)}"


def of_pt_counts(path: Path) -> str:
    """SGLang's expert distribution recorder, in its modes that count."""
    counts = f'torch.load({_text(path)}, weights_only=True, map_location="cpu")["logical_count"]'
    return f"{COUNTED}{_line(_profile(counts, 'torch'))}"


def of_pt_records(path: Path) -> str:
    """The same recorder, by token."""
    loaded = f'torch.load({_text(path)}, weights_only=True, map_location="cpu")["records"]'
    ids = f'torch.cat([r["topk_ids_of_layer"].permute(1, 0, 2) for r in {loaded}]).numpy()'
    return f"{TO_FILL}{DENSE}{_line('import torch, numpy as np; ' + _saved(ids))}"


def of_json(path: Path, value: Any, lines: bool) -> tuple[str, str, str] | None:
    """What a JSON value (of JSON lines, the first) has of routing, as the fields of a ``FileKind``; None without any."""
    one = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
    if isinstance(one, dict) and "logical_count" in one:
        counts = f'json.load(open({_text(path)}))["logical_count"]'
        return "JSON with counts of experts", "", f"{COUNTED}{_line(_profile(counts, 'json'))}"
    found = next(_routing(one, ""), None)
    if found is None:
        return None
    where, ids = found
    opened = f"open({_text(path)})"
    records = f"[json.load({opened})]" if one is value else f"json.load({opened})"
    records = f"[json.loads(line) for line in {opened}]" if lines else records
    array, to_fill = _array(f"x{where}", ids)
    code = f"import base64, io, json, numpy as np; parts = [{array} for x in {records}]; " + _saved(
        "np.concatenate(parts)", "[len(p) for p in parts]"
    )
    return "JSON with the routing of requests", "", f"{TO_FILL}{to_fill}{DENSE}{_line(code)}"


def _array(value: str, found: Any) -> tuple[str, str]:
    """The expression for an array of ids, and what else is to be filled in."""
    if not isinstance(found, str):
        return f"np.array({value})", ""
    try:
        head = base64.b64decode(found[:8], validate=True)
    except (binascii.Error, ValueError):
        head = b""
    if head.startswith(b"\x93NUMPY"):
        return f"np.load(io.BytesIO(base64.b64decode({value})))", ""
    # SGLang: srt/state_capturer/routed_experts.py
    flat = f"np.frombuffer(base64.b64decode({value}), np.int32)"
    return f"{flat}.reshape(-1, L, K)", ", L, its layers, and K, the experts per token"


def _routing(value: Any, where: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The values named ``routed_experts``, or that are nested lists [token][layer][k], with the subscripts that lead there."""
    if depth > _DEPTH:
        return
    if isinstance(value, dict):
        for name, each in value.items():
            inside = f"{where}[{json.dumps(name)}]"
            if (name == _ROUTED and isinstance(each, str)) or _is_nested(each):
                yield inside, each
            else:
                yield from _routing(each, inside, depth + 1)
    elif _is_nested(value):
        yield where, value
    elif isinstance(value, list) and value:
        yield from _routing(value[0], f"{where}[0]", depth + 1)


def _is_nested(value: Any) -> bool:
    for _ in range(3):
        if not isinstance(value, list) or not value:
            return False
        value = value[0]
    return isinstance(value, int) and not isinstance(value, bool)


def _profile(counts: str, module: str) -> str:
    return (
        f"import {module}; from sglang_uvm_offload.routing.recorded_counts import save; "
        f'save("profile.npz", {counts}, name="MODEL", architecture="CLASS", top_k=K)'
    )
