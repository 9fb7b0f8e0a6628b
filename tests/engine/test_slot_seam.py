"""SGLang's Triton MoE functions, run by Triton's interpreter, give the same bits from slots as from the experts' own rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.harness.patience import patience
from scripts.harness.server import environment

PROGRAM = Path(__file__).parents[1] / "interpreted" / "slots.py"
ROWS = {
    "plain": "BF16, FP16 and FP32 (Triton)",
    "bias": "experts with biases (Triton)",
    "fp8": "FP8 in blocks (Triton)",
    "fp8 with TMA": "FP8 in blocks (Triton)",
    "fp8 per tensor": "FP8 by tensor or channel (Triton)",
    "int8 w8a8": "W8A8 (INT8) and W8A16 (Triton)",
    "int8 w8a16": "W8A8 (INT8) and W8A16 (Triton)",
    "int4": "4 bits, moe_wna16 (Triton)",
    "int4 with zeros": "4 bits, moe_wna16 (Triton)",
}
KINDS = [
    *[("plain", dtype) for dtype in ("bfloat16", "float16", "float32")],
    *[(kind, "bfloat16") for kind in ("bias", "fp8", "fp8 with TMA", "fp8 per tensor", "int8 w8a8", "int8 w8a16")],
    *[(kind, "bfloat16") for kind in ("int4", "int4 with zeros")],
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """Triton reads TRITON_INTERPRET as kernels are defined."""
    tiles = str(tmp_path_factory.mktemp("tiles"))
    env = environment({"TRITON_INTERPRET": "1", "SGLANG_MOE_CONFIG_DIR": tiles})
    ended = subprocess.run([sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True, timeout=patience(300))
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    return {(line["kind"], line["dtype"]): line for line in lines}


BY_FORMAT = [pytest.param(*kind, marks=pytest.mark.works("Format", ROWS[kind[0]])) for kind in KINDS]


@pytest.mark.parametrize(("kind", "dtype"), BY_FORMAT)
def test_experts_computed_from_slots_give_the_same_bits(outcomes: dict[Any, Any], kind: str, dtype: str) -> None:
    outcome = outcomes[kind, dtype]
    assert all(outcome["equal"])
    assert outcome["own rows poisoned"], "the same without slots: nothing was read from them"
    assert outcome["other layers equal"]
