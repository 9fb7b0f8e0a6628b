"""Slots beside the experts that nothing fills: every tensor has them, and they change no token."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import Engines, assert_offloaded, assert_same_answers, assert_streamed

# The format, the residents, and from how many tokens on steps stream.
CASES: list[tuple[str | None, int, int | str]] = [(None, 8, "inf"), (None, 8, 0), ("fp8", 4, "inf")]


@pytest.mark.parametrize(("quant", "resident", "tokens"), CASES)
def test_slots_change_no_answer(
    quant: str | None, resident: int, tokens: int | str, checkpoints: Checkpoints, engines: Engines
) -> None:
    checkpoint = checkpoints("qwen3_moe", **({"quant": quant} if quant else {}))
    off = engines.baseline(checkpoint)
    flags: dict[str, Any] = {"expert_offload_num_resident": resident, "expert_offload_warmup_tokens": 16}
    flags |= {"expert_offload_stream_tokens": tokens}
    plain, on = (engines.run(checkpoint, **flags, **slots) for slots in ({}, {"expert_offload_slots": 3}))
    assert_offloaded(on.server_info)
    assert_streamed(on, some=tokens == 0)
    assert on.offload["moves"] > 0
    assert (plain.offload["slot_bytes"], plain.offload["slots_missing"]) == (0, None)
    assert (on.offload["slot_bytes"] > 0, on.offload["slots_missing"]) == (True, None)
    assert on.offload["plain_bytes"] == plain.offload["plain_bytes"]
    assert_same_answers(on, off)
