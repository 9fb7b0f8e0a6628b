"""Quantised experts: whatever a format calls its tensors, offloading them changes no token."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import Engines, assert_offloaded, assert_same_answers, assert_streamed

EXPERTS, TOP_K = 8, 2
FORMATS = {"fp8": {}, "int8": {}, "gptq": {"quantization": "moe_wna16"}}
ROWS = {"fp8": "FP8 in blocks", "int8": "W8A8 (INT8)", "gptq": "GPTQ, by --quantization moe_wna16"}
SHORT = 8
"""Steps of fewer tokens read in place: all that decode. Prompts stream."""


def case(quant: str, resident: int, tokens: int | str, *marks: pytest.MarkDecorator) -> Any:
    marked = [pytest.mark.works("Format", ROWS[quant]), *marks]
    return pytest.param(quant, resident, tokens, marks=marked, id=f"{quant}-{resident}-{tokens}")


# Formats as they are used, each night INT8 too, and with all steps streamed and with none; and one of them with other numbers
# of residents. Their bytes are in test_planner_serving.
CASES = [
    *(case(quant, EXPERTS // 2, SHORT, *([pytest.mark.nightly] if quant == "int8" else ())) for quant in FORMATS),
    *(case(quant, EXPERTS // 2, tokens, pytest.mark.nightly) for quant in FORMATS for tokens in (0, "inf")),
    *(case("fp8", resident, 0, pytest.mark.nightly) for resident in (TOP_K, EXPERTS)),
]


@pytest.mark.parametrize(("quant", "resident", "tokens"), CASES)
def test_offloaded_quantised_experts_give_the_same_tokens_and_logprobs(
    quant: str, resident: int, tokens: int | str, checkpoints: Checkpoints, engines: Engines
) -> None:
    checkpoint = checkpoints("qwen3_moe", quant=quant)
    off = engines.baseline(checkpoint, **FORMATS[quant])
    flags = {"expert_offload_warmup_tokens": 16, "expert_offload_stream_tokens": tokens}
    on = engines.baseline(checkpoint, expert_offload_num_resident=resident, **flags, **FORMATS[quant])
    assert_offloaded(on.server_info, everything_resident=resident == EXPERTS)
    assert_streamed(on, some=tokens != "inf" and resident < EXPERTS)
    assert_same_answers(on, off)
