"""``auto`` with the kinds of launch whose memory only their ranks know, in real SGLang over the stand-in driver: all ranks
serve with one number, and keep as much in VRAM as it says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from builders.drafts import eagle
from builders.plugins import IN_SCHEDULER
from builders.rooms import VRAM
from checkpoints import Checkpoints
from nursery import Nursery
from standin.auto import TOKENS, Ranks, serve_ranks
from standin.run import Standin

from scripts.harness.server import free_port
from sglang_uvm_offload.cuda.build import find_nvcc

MIB = 1 << 20
EXPERTS = 16
PAIR: dict[str, Any] = {"max_running_requests": 2, "cuda_graph_max_bs_decode": 2}
"""For ranks that share the requests of a step."""
DP_ATTENTION: dict[str, Any] = {**PAIR, "dp_size": 2, "enable_dp_attention": True}
EAGLE: dict[str, Any] = {
    **{"speculative_algorithm": "EAGLE", "speculative_num_steps": 2, "speculative_eagle_topk": 1},
    "speculative_num_draft_tokens": 3,
}
EPLB: dict[str, Any] = {
    **{"ep_size": 2, "enable_eplb": True, "ep_num_redundant_experts": 2},
    **{"eplb_rebalance_num_iterations": 4, "expert_distribution_recorder_buffer_size": 4},
}
DEEPEP: dict[str, Any] = {
    **{**PAIR, "ep_size": 2, "moe_a2a_backend": "deepep", "deepep_mode": "low_latency"},
    "moe_runner_backend": "deep_gemm",
}
WITHOUT_DEEPEP = f"{IN_SCHEDULER}    from standin import deepep\n    deepep.install()\n"
BUILT_WITHOUT_TORCH = """
import os, subprocess
from pathlib import Path
from standin.build import cuda_include
from torch.utils import cpp_extension
def load_inline(name, cpp_sources, build_directory, **kwargs):
    source, library = (Path(build_directory, f"{os.getpid()}.{kind}") for kind in ("cpp", "so"))
    source.write_text("#include <cstdio>\\n" + cpp_sources)
    command = ["g++", "-shared", "-fPIC", f"-I{cuda_include()}", str(source), "-o", str(library), "-lnccl"]
    subprocess.run(command, check=True)
    return str(library.rename(library.with_stem(name)))
cpp_extension.load_inline = load_inline
"""
"""SGLang's allocator of symmetric memory needs none of torch's headers, which take minutes to compile."""


@dataclass(frozen=True)
class Kind:
    """Arguments of SGLang, and what else a launch of it has."""

    arguments: dict[str, Any]
    family: str = "qwen3_moe"
    sizes: dict[str, int] = field(default_factory=dict)
    room: int = 165
    """MiB for the weights, the driver and the cache, beside some of the experts."""
    environment: dict[str, str] = field(default_factory=dict)
    plugin: str = ""
    said: str = ""
    """A part of the log of a server that is of this kind."""


KINDS = {
    "nodes": Kind({"nnodes": 2}),
    "context": Kind({**PAIR, "attn_cp_size": 2, "moe_dp_size": 2}),
    "decode context": Kind({"dcp_size": 2}, sizes={"kv_heads": 1}, said="DCP enabled, dcp_size=2, tp_size=2"),
    "dense": Kind({**DP_ATTENTION, "moe_dense_tp_size": 1}, family="glm4_moe", room=155),
    "rearranged": Kind(EPLB, said="[EPLBManager] rebalance end"),
    "sized after capture": Kind(
        {"tp_size": 1, "disable_prefill_cuda_graph": False, "chunked_prefill_size": 64},
        sizes={"expert_size": 512},
        environment={"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"},
        said="Post-capture KV sizing: KV cache allocated",
    ),
    "drafted": Kind({"tp_size": 1, **EAGLE}, sizes={"expert_size": 512}),
    "all to all": Kind(
        DEEPEP,
        environment={"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", "CUDA_HOME": str(find_nvcc().parents[1])},
        plugin=WITHOUT_DEEPEP,
    ),
    "symmetric": Kind(
        {"enable_symm_mem": True},
        environment={"SGLANG_SYMM_MEM_PREALLOC_GB_SIZE": "1"},
        plugin=BUILT_WITHOUT_TORCH,
        said="Pre-allocating symmetric memory pool with 1 GiB",
    ),
}
NGRAMS = Kind(
    {
        **{**DP_ATTENTION, "max_total_tokens": 256, "enable_multimodal": False, "ple_offload_embedding": False},
        **{"load_format": "dummy", "skip_tokenizer_init": True},
        **{"linear_attn_prefill_backend": "triton", "linear_attn_decode_backend": "triton"},
    },
    room=632,
    environment={"SGLANG_USE_ATTN_TP_NGRAM": "1", "SGLANG_DISABLED_MODEL_ARCHS": ""},
)
TINY_EXPERTS = 8
IN_CI = "nodes"


def of(kind: str, *rows: str, group: str = "Parallel") -> Any:
    """``rows``: of docs/support.md."""
    marks = [pytest.mark.works(group, f"{row}, auto") for row in rows]
    return pytest.param(kind, marks=[*marks, *([] if kind == IN_CI else [pytest.mark.nightly])], id=kind)


SHOWN = [
    of("nodes", "--nnodes 2"),
    of("context", "--attn-cp-size 2", "--moe-dp-size 2"),
    of("decode context", "--dcp-size 2"),
    of("dense", "--moe-dense-tp-size 1"),
    of("rearranged", "--enable-eplb with --ep-num-redundant-experts"),
    of("sized after capture", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1", group="Launch"),
    of("symmetric", "--enable-symm-mem"),
    of("all to all", "--moe-a2a-backend deepep, with a stand-in for its library"),
]


def started(kind: Kind, checkpoints: Checkpoints, standin: Standin, folder: Path) -> Ranks:
    return started_with(checkpoints(kind.family, **{"expert_size": 1024, **kind.sizes}), kind, standin, folder)


def started_with(model: Path, kind: Kind, standin: Standin, folder: Path) -> Ranks:
    arguments = {**kind.arguments, "mem_fraction_static": kind.room * MIB / VRAM}
    if "nnodes" in arguments:
        arguments["dist_init_addr"] = f"127.0.0.1:{free_port()}"
    if "speculative_algorithm" in arguments:
        arguments["speculative_draft_model_path"] = str(eagle(folder / "draft", "bfloat16"))
    return serve_ranks(standin, model, folder / "run", kind.environment, kind.plugin, **arguments)


def assert_served(ranks: Ranks, numbers: dict[tuple[int, int], int]) -> None:
    """``numbers``: by node and rank, what it serves with."""
    state = ranks.served.state
    assert ranks.numbers("correct") == numbers
    assert {str(number) for number in numbers.values()} == {ranks.served.number}
    assert ranks.in_vram() == [state["resident_bytes"]] * len(numbers)
    assert state["offloaded_bytes"] > 0
    assert state["fault"] is None
    assert [len(tokens) for tokens in ranks.served.tokens] == [TOKENS]


@pytest.mark.parametrize("kind", SHOWN)
def test_ranks_serve_with_the_number_that_they_agree_on(
    kind: str, checkpoints: Checkpoints, standin: Standin, tmp_path: Path
) -> None:
    ranks = started(KINDS[kind], checkpoints, standin, tmp_path)
    number = int(ranks.served.number)
    assert 0 < number < EXPERTS
    assert KINDS[kind].said in ranks.served.log
    node = int("nnodes" in KINDS[kind].arguments)
    assert_served(ranks, {(0, 0): number} | ({(node, 1): number} if len(ranks.calls) > 1 else {}))


@pytest.mark.nightly
@pytest.mark.works("Speculation", "--speculative-draft-model-path, auto")
def test_a_draft_model_that_takes_less_than_its_files_leaves_room_for_experts(
    checkpoints: Checkpoints, standin: Standin, tmp_path: Path
) -> None:
    """A draft of EAGLE has its embedding and its head from the target."""
    ranks = started(KINDS["drafted"], checkpoints, standin, tmp_path)
    first, number = ranks.numbers("decide")[0, 0], int(ranks.served.number)
    assert 0 < first < number < EXPERTS
    assert ranks.served.corrected() == [(number, first)]
    assert_served(ranks, {(0, 0): number})


@pytest.mark.nightly
@pytest.mark.works("Parallel", "SGLANG_USE_ATTN_TP_NGRAM=1, auto")
def test_each_attention_group_has_an_n_gram_table_of_its_own(every_model: Nursery, standin: Standin, tmp_path: Path) -> None:
    """Qwen4-Exp keeps its tables in VRAM. No weights are published, so they are random."""
    name, folder = "Qwen4ExpForConditionalGeneration", tmp_path / "models"
    folder.mkdir()
    ended = every_model.run(f"from architectures.checkpoints import main\nmain({str(folder)!r}, {name!r})")
    assert ended.code == 0, ended.err[-4000:]
    config = json.loads((folder / name / "config.json").read_text())
    config["text_config"] |= {"eos_token_id": 1, "moe_intermediate_size": 2048}
    config["text_config"] |= {"ple_layer_ids": [2], "ngram_vocab_size_base": 1000}
    (folder / name / "config.json").write_text(json.dumps(config))
    ranks = started_with(folder / name, NGRAMS, standin, tmp_path)
    number = int(ranks.served.number)
    assert 0 < number < TINY_EXPERTS
    assert_served(ranks, {(0, 0): number, (0, 1): number})
