"""What ``doctor`` says of a launch that can be served."""

import pytest
from builders.configs import served_config
from builders.launch import launch

from sglang_uvm_offload.plugin import doctor

pytestmark = pytest.mark.sglang


def drafts(**values: str) -> list[str]:
    return doctor._drafts(served_config(), launch(**values)[0])


def test_only_algorithms_with_a_draft_model_have_draft_layers_in_vram() -> None:
    assert drafts() == []
    assert drafts(speculative_algorithm="NGRAM") == ["--speculative-algorithm NGRAM: no draft model is loaded"]
    (line,) = drafts(speculative_algorithm="EAGLE", speculative_draft_model_path="o/m")
    assert line == "--speculative-algorithm EAGLE with the draft layers of o/m, which stay in VRAM"
