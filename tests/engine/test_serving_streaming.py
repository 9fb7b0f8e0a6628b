"""Steps that stream, where SGLang makes few or odd ones of them. ``test_serving_http`` has chunks in every run."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import PROMPTS, Engines, assert_same_answers, assert_streamed

OFFLOAD: dict[str, Any] = {
    **{"expert_offload_num_resident": 6, "expert_offload_warmup_tokens": 16, "expert_offload_stream_tokens": 16}
}
CASES: dict[str, dict[str, Any]] = {
    "one request at a time": {"max_running_requests": 1, "together": True},
    "chunks below the threshold": {"chunked_prefill_size": 8},
    "chunks above the threshold": {"chunked_prefill_size": 32},
    "residents follow the traffic": {"expert_offload_adapt": "continuous"},
}


@pytest.mark.nightly
@pytest.mark.works("Launch", "long prompts in chunks")
@pytest.mark.parametrize("case", CASES)
def test_answers_stay_the_same(case: str, checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint, changes = checkpoints("qwen3_moe", dtype="float32"), CASES[case]
    prompts = [*PROMPTS, PROMPTS[1] * 5, PROMPTS[1] * 5 + "again"]
    common = {"prompts": prompts, "dtype": "float32"}
    plain = {name: value for name, value in changes.items() if not name.startswith("expert_offload")}
    off = engines.baseline(checkpoint, **common, **plain)
    on = engines.run(checkpoint, **common, **changes, **OFFLOAD)
    if case == "chunks below the threshold":
        assert on.offload["streamed_bytes"] == 0
    else:
        assert_streamed(on)
    assert on.offload["zero_copy_bytes"] > 0
    assert_same_answers(on, off)
