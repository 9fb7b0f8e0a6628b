"""What ``doctor`` says of a launch that can be served, and of one that SGLang or this plugin ends."""

from __future__ import annotations

from typing import Any

import pytest
from builders.configs import served_config
from builders.launch import arguments, launch
from sglang.srt.layers.quantization import get_quantization_config

from sglang_uvm_offload.plugin import dry_launch

pytestmark = pytest.mark.sglang


def drafts(**values: str) -> list[str]:
    return dry_launch._drafts(served_config(), launch(**values)[0])


def test_only_algorithms_with_a_draft_model_have_draft_layers_in_vram() -> None:
    assert drafts() == []
    assert drafts(speculative_algorithm="NGRAM") == ["--speculative-algorithm NGRAM: no draft model is loaded"]
    (line,) = drafts(speculative_algorithm="EAGLE", speculative_draft_model_path="o/m")
    assert line == "--speculative-algorithm EAGLE with the draft layers of o/m, which stay in VRAM"


class Resolving:
    """Arguments whose resolution calls something."""

    def __init__(self, called: Any):
        self.resolve_once = called


def problems(called: Any) -> list[str]:
    checked = dry_launch.Launch.__new__(dry_launch.Launch)
    checked.args, checked.notes, checked.warned = Resolving(called), [], []
    return checked.resolve()


def test_what_sglang_raises_is_a_problem_in_its_words() -> None:
    (problem,) = problems(lambda: get_quantization_config("no-such-method"))
    assert problem.startswith("SGLang refuses: ValueError: Invalid quantization method: no-such-method")


def test_an_exception_without_a_text_is_told_by_its_line() -> None:
    (problem,) = problems(lambda: arguments(enable_eplb=True, ep_size=1).resolve_once())
    assert problem.startswith("SGLang refuses: AssertionError: ")
    assert "ep_size > 1" in problem


def test_a_bug_of_this_plugin_is_no_refusal_of_sglangs() -> None:
    with pytest.raises(IndexError):
        problems(lambda: [][0])


@pytest.mark.parametrize("values", [{"pp_size": 0}, {"nnodes": 0}])
def test_doctor_looks_at_no_gpus_where_the_arguments_describe_no_ranks(values: dict[str, Any]) -> None:
    checked = dry_launch.Launch.__new__(dry_launch.Launch)
    checked.args = arguments(**values)
    assert checked.gpus() == []
