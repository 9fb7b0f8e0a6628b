"""Each remedy that a refused launch names helps: the launch with it is served, in real SGLang over the stand-in driver."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from builders import true_shape
from builders.rooms import fraction
from checkpoints import Checkpoints
from launches import launched
from nursery import Nurseries

N, SLOTS, DRAFTS = "--expert-offload-num-resident", "--expert-offload-slots", "--expert-offload-draft-num-resident"
BUFFER = "--expert-offload-stream-buffer-gb"
Remedy = Callable[[str], list[str]]
"""The flag to change, by what the refusal says, and its value: without one, it is left out."""


def given(flag: str, value: str | None) -> Remedy:
    return lambda said: [flag] if value is None else [flag, value]


def told(flag: str, words: str) -> Remedy:
    """The value that stands in the refusal, where ``words`` has a group."""

    def remedy(said: str) -> list[str]:
        found = re.search(words, said)
        assert found, said
        return [flag, found.group(1)]

    return remedy


def changed(argv: list[str], change: list[str]) -> list[str]:
    """``argv`` with the flag of ``change`` replaced or left out."""
    flag, *value = change
    at = argv.index(flag) if flag in argv else len(argv)
    rest = argv[at + 1 :]
    return [*argv[:at], *rest[1 if rest and not rest[0].startswith("--") else 0 :], *([flag, *value] if value else [])]


@pytest.fixture(scope="module")
def cases(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], str, Remedy]]:
    """The launch that is refused, what its refusal says, and the remedy."""
    folder = tmp_path_factory.mktemp("remedies")
    model, drafting = checkpoints("qwen3_moe", expert_size=512), checkpoints("glm4_moe", expert_size=512)
    cut = true_shape.checkpoint("Qwen/Qwen3-30B-A3B", folder / "cut")
    next(cut.glob("model-00002-*")).unlink()
    gpu = ["--device", "cuda", "--attention-backend", "triton", "--moe-runner-backend", "triton"]
    gpu += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-prefill-cuda-graph"]
    gpu += ["--expert-offload-headroom-gb", "0"]
    fits = ["--mem-fraction-static", str(fraction(model, 8, 4096)), "--max-total-tokens", "4096"]
    large = str(true_shape.checkpoint("Qwen/Qwen3-30B-A3B", folder / "large"))
    everything = ["--model-path", large, *gpu, "--max-total-tokens", "4096", N, "128"]
    plain = ["--model-path", str(model), *gpu]
    auto, eight = [*plain, *fits, N, "auto"], [*plain, *fits, N, "8"]
    nextn = ["--model-path", str(drafting), *gpu, N, "4", "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2"]
    nextn += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"]
    number = given(N, "2")
    uncounted = {
        "dense TP": ["--moe-dense-tp-size", "1"],
        "symmetric memory": ["--enable-symm-mem"],
        "redundant": ["--ep-num-redundant-experts", "2"],
        "overrides": ["--json-model-override-args", '{"num_hidden_layers": 2}'],
    }
    return {
        **{name: ([*auto, *flags], "; give a number", number) for name, flags in uncounted.items()},
        "CPU": (["--model-path", str(model), "--device", "cpu", N, "auto"], "; give a number", number),
        "slots beside auto": ([*auto, SLOTS, "9"], "give at most as many", told(SLOTS, r"(\d+) rows a layer fit in VRAM")),
        "slots beside auto, auto": ([*auto, SLOTS, "9"], ", or auto", given(SLOTS, "auto")),
        "slots auto": ([*eight, SLOTS, "auto"], "give a number or auto for both", given(SLOTS, "1")),
        "too many residents": (everything, "give at most ", told(N, r"give at most (\d+)")),
        "too many residents, auto": (everything, ", or auto", given(N, "auto")),
        "more than the model": ([*plain, N, "17"], "the model has 16", told(N, r"the model has (\d+)")),
        "draft, none": ([*eight, DRAFTS, "2"], "leave it out", given(DRAFTS, None)),
        "draft, more": ([*nextn, DRAFTS, "99"], "give at most as many", told(DRAFTS, r"has (\d+) routed experts")),
        "buffer": ([*eight, BUFFER, "0.001"], "give that, auto, or 0", given(BUFFER, "auto")),
        "incomplete": (["--model-path", str(cut), *gpu, N, "auto"], "the download is not complete", number),
        "buffer, none": ([*eight, BUFFER, "0.001"], "give that, auto, or 0", given(BUFFER, "0")),
    }


@pytest.fixture(scope="module")
def ends(cases: dict[str, tuple[list[str], str, Remedy]], sglang_on_standin: Nurseries) -> dict[str, Any]:
    refused = launched({name: {"argv": argv, "resolve": True} for name, (argv, _, _) in cases.items()}, sglang_on_standin)
    cured = {
        f"{name}, cured": {"argv": changed(argv, remedy(refused[name]["error"])), "resolve": True}
        for name, (argv, words, remedy) in cases.items()
        if words in refused[name]["error"]
    }
    return refused | launched(cured, sglang_on_standin)


CASES = [
    *(
        "dense TP",
        "symmetric memory",
        "redundant",
        "overrides",
        "CPU",
        "slots beside auto",
        "slots beside auto, auto",
    ),
    *("slots auto", "too many residents", "too many residents, auto", "more than the model", "draft, none", "draft, more"),
    *("buffer", "buffer, none"),
]


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_a_launch_with_the_remedy_is_served(cases, ends, case):
    assert ends[case]["exit"] == 2, ends[case]["error"]
    assert cases[case][1] in ends[case]["error"]
    assert ends[f"{case}, cured"]["exit"] is None, ends[f"{case}, cured"]["error"]


@pytest.mark.nightly
def test_an_incomplete_download_is_refused_with_a_number_too_and_no_number_is_asked_for(ends):
    for case in ("incomplete", "incomplete, cured"):
        assert ends[case]["exit"] == 2, ends[case]["error"]
        (line,) = [line for line in ends[case]["error"].splitlines() if "not complete" in line]
        assert "give a number" not in line
