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


# Every format as it is used, each night with all steps streamed and with none too; and one of them with other numbers of
# residents.
CASES = [
    *(case(quant, EXPERTS // 2, SHORT) for quant in FORMATS),
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


def test_the_bytes_offloaded_are_those_of_the_format(checkpoints: Checkpoints, engines: Engines) -> None:
    """Experts of the same shape take half the bytes in 8 bits that they take in 16."""
    sizes = {"layers": 2, "hidden": 512, "experts": EXPERTS, "top_k": TOP_K, "expert_size": 128, "dense_size": 512}
    plain = engines.run(checkpoints("qwen3_moe", **sizes), ["hello"], max_new_tokens=1, expert_offload_num_resident=4)
    flags = {"expert_offload_warmup_tokens": 16, "expert_offload_stream_tokens": SHORT}  # as of fp8-4-8, above
    fp8 = engines.baseline(checkpoints("qwen3_moe", quant="fp8"), expert_offload_num_resident=4, **flags)
    assert plain.offload["offloaded_bytes"] == 2 * fp8.offload["offloaded_bytes"]
