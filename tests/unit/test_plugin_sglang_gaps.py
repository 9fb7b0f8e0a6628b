"""What SGLang would answer wrongly, or end for only once all weights are loaded, is refused by its flag."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.launch import arguments, launch, resolved
from builders.true_shape import config_folder
from sglang.srt.arg_groups.overrides import declare_resolution

from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plugin.checks import launch_checks, sglang_gaps
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.sglang

PLACE = "physical_to_logical_map"
LAYERS, EXPERTS = 48, 128
ROW = list(range(EXPERTS))
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "o/m"}
STORAGE = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}


def problems(**fields: Any) -> list[str]:
    return sglang_gaps.problems(*launch(**fields))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"tp_size": 0}, "--tp-size 0: must be 1 or more"),
        ({"max_total_tokens": -5}, "--max-total-tokens -5: must be 1 or more"),
        ({"ep_num_redundant_experts": -1}, "--ep-num-redundant-experts -1: must be 0 or more"),
        (
            {"mem_fraction_static": float("nan")},
            "--mem-fraction-static nan (SGLang's choice if not given): must be above 0 and",
        ),
    ],
)
def test_a_number_with_which_no_server_works_is_the_launchs_only_problem(values: dict[str, Any], problem: str) -> None:
    requested = parse({"num_resident": "auto"})
    assert requested is not None
    with pytest.raises(FlagError) as refused:
        launch_checks.check(requested, arguments(**values))
    assert len(refused.value.problems) == 1
    assert refused.value.problems[0].startswith(problem)


def test_a_share_that_sglang_itself_makes_negative_is_refused() -> None:
    args = arguments(chunked_prefill_size=-1)
    declare_resolution(args, "test", mem_fraction_static=-0.036)
    (problem,) = sglang_gaps.bad_numbers(resolving_view(args))
    assert problem.startswith("--mem-fraction-static -0.036 (SGLang's choice")


def test_what_sglang_chooses_and_the_limits_are_accepted() -> None:
    assert sglang_gaps.bad_numbers(resolved(device="cpu")) == []
    assert sglang_gaps.bad_numbers(launch(mem_fraction_static=1.0, context_length=1, max_running_requests=0)[0]) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({PLACE: [ROW[::-1]] * LAYERS}, None),
        ({PLACE: [ROW] * (LAYERS - 1)}, "has 47 layers of 128 experts, but SGLang needs 48 of 128"),
        ({PLACE: [ROW * 2] * LAYERS}, "has 48 layers of 256 experts, but SGLang needs 48 of 128"),
        ({PLACE: [[1, *ROW[1:]]] * LAYERS}, "SGLang needs 48 of 128, with every logical expert present"),
        ({"logical_count": [[1] * EXPERTS] * LAYERS}, None),
        ({"logical_count": [[[1] * EXPERTS] * LAYERS] * 2}, None),
        ({"logical_count": [[1] * (EXPERTS - 1)] * LAYERS}, "has 48 layers of 127 experts"),
    ],
)
def test_a_map_that_misplaces_experts_is_refused(content: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "map.pt")
    (tmp_path / "map.json").write_text(json.dumps(content))
    for given in (str(tmp_path / "map.pt"), str(tmp_path / "map.json"), json.dumps(content)):
        found = problems(init_expert_location=given)
        assert len(found) == (words is not None)
        assert all(problem.startswith("--init-expert-location ") and str(words) in problem for problem in found)


def test_redundant_experts_have_places_too() -> None:
    more = {PLACE: [[*ROW, 0, 1]] * LAYERS}
    assert problems(init_expert_location=json.dumps(more), ep_num_redundant_experts=2) == []
    (problem,) = problems(init_expert_location=json.dumps({PLACE: [ROW] * LAYERS}), ep_num_redundant_experts=2)
    assert "SGLang needs 48 of 130" in problem


@pytest.mark.parametrize(
    "given", ["/nowhere.json", "/nowhere.pt", "somewhere", "[1]", "{}", json.dumps({PLACE: [[0, 1], [0]]})]
)
def test_a_map_that_sglangs_ranks_cannot_read_is_left_to_them(given: str) -> None:
    assert problems(init_expert_location=given) == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("openai/gpt-oss-20b", "GptOssForCausalLM in checkpoint order and would generate wrong tokens; remove it"),
        ("mistralai/Mixtral-8x7B-v0.1", "MixtralForCausalLM and fails at the first token; remove it"),
    ],
)
def test_a_model_that_takes_no_map_is_refused_with_one(model: str, words: str) -> None:
    folder = str(config_folder(model))
    (problem,) = problems(model_path=folder, init_expert_location=json.dumps({PLACE: [ROW] * LAYERS}))
    assert words in problem
    assert problems(model_path=folder) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**EAGLE, "speculative_token_map": "/nowhere/map.pt"}, "--speculative-token-map /nowhere/map.pt: no such file"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_ngram_external_corpus_path": "nowhere.jsonl"},
            "--speculative-ngram-external-corpus-path nowhere.jsonl: no such file",
        ),
        (
            {**STORAGE, "hicache_storage_backend_extra_config": "@/nowhere.yaml"},
            "--hicache-storage-backend-extra-config /nowhere.yaml: no such file",
        ),
        ({"tokenizer_worker_num": 2, "chat_template": "nowhere.jinja"}, "--chat-template nowhere.jinja: no such file"),
        ({"lora_paths": ["a=/nowhere"]}, "--lora-paths /nowhere: no such folder"),
        ({"lora_paths": {"a": "/nowhere"}}, "--lora-paths /nowhere: no such folder"),
        ({"lora_paths": [{"lora_name": "a", "lora_path": "/nowhere"}]}, "--lora-paths /nowhere: no such folder"),
        ({"lora_paths": ["/"]}, "--lora-paths /adapter_config.json: no such file"),
    ],
)
def test_a_file_that_sglang_opens_once_weights_are_loaded_must_be_there(fields: dict[str, Any], words: str) -> None:
    (problem,) = problems(**fields)
    assert problem.startswith(words)


@pytest.mark.parametrize(
    "fields",
    [
        {**EAGLE, "speculative_token_map": "owner/name/map.pt"},
        {**STORAGE, "hicache_storage_backend_extra_config": "{}"},
        {"lora_paths": ["a=owner/name"]},
        {"tokenizer_worker_num": 2, "chat_template": "chatml"},
        {"chat_template": "nowhere.jinja"},
        {"hicache_storage_backend_extra_config": "@/nowhere.yaml"},
    ],
)
def test_what_is_on_the_hub_or_without_effect_is_accepted(fields: dict[str, Any]) -> None:
    assert problems(**fields) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_is_taken_is_warned_of(host: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        cfg = launch(host=host, port=port)[0]
        (warning,) = sglang_gaps.warnings(cfg)
        assert warning.startswith(f"--port {port} on {host}: Address already in use")
        assert list(sglang_gaps.warnings(launch(host=host, port=port, nnodes=2, node_rank=1)[0])) == []
    assert list(sglang_gaps.warnings(cfg)) == []
