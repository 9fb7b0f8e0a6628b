"""SGLang's own controller of adaptive speculation asks the hooks how many tokens to draft, and switches to that number."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders.launch import launch, resolved
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController
from sglang.srt.speculative.adaptive_spec_params import DEFAULT_ADAPTIVE_CONFIG, AdaptiveSpeculativeParams

from sglang_uvm_offload.plugin.launch import draft_source
from sglang_uvm_offload.plugin.rank.draft_hooks import DraftHooks
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.sglang


class Worker:
    """What SGLang's controller switches."""

    def __init__(self, drafts: int):
        self.speculative_num_steps = drafts

    def build_adaptive_runtime_state(self, speculative_num_steps: int, **shape: Any) -> Any:
        return SimpleNamespace(speculative_num_steps=speculative_num_steps)

    def apply_runtime_state(self, state: Any) -> None:
        self.speculative_num_steps = state.speculative_num_steps


class Lengths:
    """Chooses what the test says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answer = 0
        self.asked: list[Any] = []

    def choose(self, *asked: Any) -> int:
        self.asked.append(asked)
        return self.answer

    def verified(self, accepted: list[int]) -> None:
        self.asked.append(accepted)

    def leave(self) -> None:
        self.asked.append("left")


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> Lengths:
    """What the hooks ask, in SGLang's class."""
    asked = Lengths()
    hooked(monkeypatch, asked)
    return asked


def hooked(monkeypatch: pytest.MonkeyPatch, lengths: Any) -> None:
    def add(target: str, hook: Any, kind: Any) -> None:
        name = target.rpartition(".")[2]
        original = getattr(AdaptiveSpeculativeParams, name)
        monkeypatch.setattr(AdaptiveSpeculativeParams, name, lambda *args: hook(original, *args))

    DraftHooks(lambda: lengths).install(add)


def controller(drafts: int = 3) -> AdaptiveController:
    """With SGLang's default numbers, as its worker makes one."""
    worker = Worker(drafts)
    made = AdaptiveController(worker, AdaptiveSpeculativeParams(initial_steps=drafts))
    made.register(SimpleNamespace(speculative_num_steps=drafts))
    made.init_states()
    return made


def test_the_number_that_is_chosen_is_switched_to_before_the_next_step(lengths: Lengths) -> None:
    control = controller()
    for lengths.answer in (7, 1, 5):
        control.activate_step_by_batch(2)
        assert control.worker.speculative_num_steps == lengths.answer
        control.on_verify_complete([0, 0], batch_size=2)
        assert control.worker.speculative_num_steps == lengths.answer, "SGLang's own way would go down"
    assert lengths.asked == [(2, [1, 3, 5, 7], 3), [0, 0]] * 3


def test_the_numbers_of_the_batch_size_are_offered(lengths: Lengths) -> None:
    for requests, numbers in ((8, [0, 1, 3]), (32, [0, 1])):
        assert DEFAULT_ADAPTIVE_CONFIG[str(requests)]["candidate_steps"] == numbers
        for lengths.answer in numbers[:2]:
            control = controller(numbers[-1])
            control.activate_step_by_batch(requests)
            assert control.worker.speculative_num_steps == lengths.answer
            assert lengths.asked[-1] == (requests, numbers, numbers[-1])
    controller(5).activate_step_by_batch(8)
    assert lengths.asked[-1] == (8, [0, 1, 3], 1), "SGLang begins with one of its own"


def test_where_sglang_has_one_number_it_is_left_alone(lengths: Lengths) -> None:
    assert DEFAULT_ADAPTIVE_CONFIG["64"]["candidate_steps"] == [0]
    control = controller(1)
    control.activate_step_by_batch(64)
    assert control.on_verify_complete([0] * 64, batch_size=64) is None
    assert control.worker.speculative_num_steps == 0
    assert lengths.asked == ["left"]


def test_sglang_chooses_until_the_server_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked(monkeypatch, None)
    control = controller()
    for _ in range(30):
        control.activate_step_by_batch(1)
        control.on_verify_complete([0], batch_size=1)
    assert control.worker.speculative_num_steps == 1


def problems(policy: str = "misses", **fields: Any) -> list[str]:
    return refused(policy, launch(**fields)[0])


def refused(policy: str, cfg: Any) -> list[str]:
    config = parse({"num_resident": 4, "draft_policy": policy})
    assert config is not None
    return draft_source.policy_problems(config, cfg)


def test_a_policy_without_anything_to_choose_is_refused(tmp_path: Path) -> None:
    (problem,) = problems()
    assert problem.startswith("--expert-offload-draft-policy misses: needs --speculative-adaptive, ")
    assert problems("acceptance") == []
    assert problems(speculative_adaptive=True) == []
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps({"1": {"candidate_steps": [3]}, "8": {"candidate_steps": [1]}}))
    two.write_text(json.dumps({"1": {"candidate_steps": [3]}, "8": {"candidate_steps": [0, 1]}}))
    (problem,) = problems(speculative_adaptive=True, speculative_adaptive_config=str(one))
    assert f"--speculative-adaptive-config {one} lists one number of draft tokens for each batch size" in problem
    assert problems(speculative_adaptive=True, speculative_adaptive_config=str(two)) == []


@pytest.mark.parametrize("branches", [1, 2])
def test_it_is_refused_where_sglang_turns_adaptive_speculation_off(branches: int) -> None:
    drafting = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
    cfg = resolved(device="cpu", **drafting, speculative_eagle_topk=branches, speculative_adaptive=True)
    assert bool(refused("misses", cfg)) == (branches > 1)
