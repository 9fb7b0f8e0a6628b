"""Plans: they satisfy their own constraints, agree with SGLang's rules, and say what is missing."""

import argparse
import dataclasses
import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from builders.true_shape import config_folder

from sglang_uvm_offload.cli import plan as planner_cli
from sglang_uvm_offload.flags import config_flag
from sglang_uvm_offload.memory.host_ram import host_margin
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.plan import planner, sglang_memory
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.gpus import GPUS
from sglang_uvm_offload.plan.inputs import MEASURED, Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.plan.kv_cache import KvShape
from sglang_uvm_offload.plan.machine import GIB, Machine, MachineError, describe, of_gpus, preset
from sglang_uvm_offload.plan.rates import read_rate
from sglang_uvm_offload.plan.routing_curves import hit_rates
from sglang_uvm_offload.plan.speed import distinct, predict
from sglang_uvm_offload.plan.stage_cost import StageCost
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.residency.budget import ONE_MEMORY, Division
from sglang_uvm_offload.residency.slot_split import NO_SLOTS, Slots

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
TOKENS = re.compile(r"give --max-total-tokens (\d+) or fewer")
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
MACHINES = ["1x5090", "1xGH200", "1xH200", "1xSPARK", "4x4090", "4xGB200", "8xH20"]


@cache
def model(name):
    return shape_of(MODELS / f"{name}.json")


def parallel_for(name, gpus):
    """All GPUs in one tensor-parallel group; experts whole where a block of scales would be cut."""
    shape = model(name)
    cuts = shape.quantization != "mxfp4" and shape.expert_size % (gpus * shape.scale_block)
    return Parallel(tp=gpus, ep=gpus if cuts else 1)


def ask(name, machine, workload=None, parallel=None, reserve=None, **options):
    machine = preset(machine) if isinstance(machine, str) else machine
    work = workload or Workload(8192, requests=2)
    return planner.plan(model(name), machine, work, parallel or parallel_for(name, machine.gpus), reserve, **options)


def case_of(plan, name):
    """With the plan's own stream buffers."""
    reserve = Reserve(headroom_gb=plan.headroom_gb, stream_gb=plan.ranks[0].stream_bytes / GIB)
    return Case(model(name), plan.machine, plan.workload, plan.parallel, reserve, plan.assumptions)


def roomy(machine):
    """``machine`` with host RAM beyond any model's."""
    return dataclasses.replace(preset(machine), host_bytes=4096 * GIB)


# What fits


@pytest.mark.slow
@pytest.mark.parametrize("stream_gb", [None, 0])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_satisfies_its_own_constraints(name, machine, stream_gb):
    plan = ask(name, machine, reserve=Reserve(stream_gb=stream_gb))
    assert plan.fits == (not plan.problems)
    if not plan.fits:
        assert plan.needs or plan.problems
        assert not plan.flags
        assert not plan.speeds
        return
    case = case_of(plan, name)
    assert case.division == Division(plan.num_resident, 0, plan.stream_buffers)
    assert 0 <= plan.num_resident <= plan.num_experts
    for rank in plan.ranks:
        assert 0 <= rank.used_bytes <= rank.budget_bytes < plan.machine.vram_bytes
        placed = rank.resident_bytes + rank.stream_bytes
        assert rank.used_bytes == rank.plain_weights + placed + rank.kv_bytes + rank.driver_bytes
    assert plan.host_needed <= plan.machine.host_bytes
    if plan.num_resident < plan.num_experts:
        assert not dataclasses.replace(case, num_resident=plan.num_resident + 1).fits
        assert f"--expert-offload-num-resident {plan.num_resident}" in plan.flags
    for speed in plan.speeds:
        assert 0 < speed.decode_ratio <= 1
        assert 0 < speed.prefill_tokens_s <= speed.resident_prefill_tokens_s


@pytest.mark.parametrize("stream_gb", [0, 4])
@pytest.mark.parametrize("name", NAMES)
def test_more_vram_never_means_fewer_residents(name, stream_gb):
    sizes = (24, 32, 48, 80, 96, 141, 192, 288)
    found = []
    for vram in sizes:
        gpus = 8 if model(name).total_bytes > 200e9 else 1
        machine = dataclasses.replace(roomy("8xH20"), gpus=gpus, vram_bytes=vram * GIB)
        reserve = Reserve(mem_fraction_static=0.85, stream_gb=stream_gb)
        plan = ask(name, machine, reserve=reserve)
        found.append(-1 if plan.num_resident is None else plan.num_resident)
    assert found == sorted(found)
    assert found[-1] == model(name).num_experts
    assert found[0] < found[-1]


def test_more_context_requests_or_headroom_never_mean_more_residents():
    machine = roomy("8xH20")
    base = ask("glm-5-fp8", machine).num_resident
    longer = ask("glm-5-fp8", machine, Workload(65536, requests=2)).num_resident
    more = ask("glm-5-fp8", machine, Workload(8192, requests=64)).num_resident
    spacious = ask("glm-5-fp8", machine, reserve=Reserve(headroom_gb=8)).num_resident
    drafting = ask("glm-5-fp8", machine, Workload(8192, requests=2, speculative=True)).num_resident
    smaller_keys = ask("glm-5-fp8", machine, Workload(65536, requests=2, kv_cache_dtype="fp8_e4m3")).num_resident
    assert max(longer, more, spacious, drafting) < base
    assert longer < smaller_keys < base


def test_the_bytes_of_deepseek_v3_by_hand():
    """8 ranks: an expert's three matrices of 7168 x 2048 in FP8, cut in 8; 58 layers; each tensor whole 2 MiB blocks."""
    plan = ask("deepseek-v3", roomy("8xH20"), Workload(8192))
    rank = plan.ranks[0]
    experts = plan.num_resident * 58 * 3 * 7168 * 2048 // 8
    assert experts <= rank.resident_bytes <= experts + 58 * 2 * BLOCK_BYTES
    rest = (256 - plan.num_resident) * 58 * 3 * 7168 * 2048 // 8
    assert abs(rank.host_bytes - rest) < 58 * 2 * BLOCK_BYTES
    slots = 8192 * 61 * (512 + 64) * 2
    assert rank.kv_bytes == slots + 8192 * 4, "and 4 bytes a token for the table of slots"
    layers = model("deepseek-v3").layers
    divided = sum(layer.attention + layer.feed_forward for layer in layers) + 2 * 129280 * 7168 * 2
    scales = 58 * 256 * 3 * (7168 // 128) * (2048 // 128) * 4
    whole = sum(layer.replicated for layer in layers) + 7168 * 2
    assert rank.plain_weights == pytest.approx((divided + scales) / 8 + whole, abs=8 * 61)
    # SGLang: 10 GiB or more stay free on a GPU of this size, and one for the headroom.
    assert rank.budget_bytes < plan.machine.vram_bytes - 11 * GIB


def test_weights_beside_experts_by_hand():
    """Qwen3-235B on 8 ranks: 4 key-value heads cannot be cut in 8, routers and norms are whole on each."""
    rank = ask("qwen3-235b-a22b", roomy("8xH20")).ranks[0]
    attention, keys_values = 2 * 64 * 128 * 4096 * 2, 2 * 4 * 128 * 4096 * 2
    whole = (128 * 4096 + 2 * 4096 + 2 * 128) * 2
    vocabulary = 2 * 151936 * 4096 * 2
    assert rank.plain_weights == 94 * (attention // 8 + keys_values // 4 + whole) + vocabulary // 8 + 4096 * 2


def test_drafting_layers_are_whole_in_vram_and_keep_a_cache_of_their_own():
    plain, drafting = (ask("deepseek-v3", roomy("8xH20"), Workload(8192, speculative=on)) for on in (False, True))
    assert plain.kv_token_bytes == 61 * 576 * 2
    assert drafting.kv_token_bytes == 62 * 576 * 2
    expert = 3 * 7168 * 2048
    joining = 7168 * 2 * 7168 * 2  # a matrix that is whole on every rank
    more = drafting.ranks[0].plain_weights - plain.ranks[0].plain_weights
    assert more == pytest.approx(256 * expert / 8 + joining, rel=0.05)


def test_host_ram_is_that_of_all_ranks_their_processes_and_the_margin():
    plan = ask("qwen3-235b-a22b", roomy("8xH20"), parallel=Parallel(tp=4, dp=2))
    experts = plan.ranks[0].host_bytes * 8
    assert plan.host_needed == experts + 8 * 4 * GIB + host_margin(experts)


def test_expert_parallel_ranks_hold_whole_experts_and_share_n():
    cut = ask("qwen3-235b-a22b", roomy("8xH20"), parallel=Parallel(tp=8))
    whole = ask("qwen3-235b-a22b", roomy("8xH20"), parallel=Parallel(tp=8, ep=8))
    assert abs(cut.num_resident - whole.num_resident) <= 8
    assert whole.ranks[0].resident_experts == math.ceil(whole.num_resident / 8) * 94
    assert cut.ranks[0].resident_experts == cut.num_resident * 94


def test_biases_of_outputs_are_whole_on_every_rank():
    case = case_of(ask("gpt-oss-120b", roomy("4x4090"), parallel=Parallel(tp=4)), "gpt-oss-120b")
    names = [part.name for part in model("gpt-oss-120b").layers[0].experts]
    sizes = dict(zip(names, (nbytes for nbytes, _ in case.expert_tensors(model("gpt-oss-120b").layers[0])), strict=True))
    assert sizes["w2.weight_bias"] == 2880 * 2
    assert sizes["w13.weight_bias"] == 2 * 2880 * 2 // 4


def test_pipeline_stages_hold_their_own_layers_and_the_tightest_decides():
    plan = ask("qwen3-235b-a22b", roomy("8xH20"), parallel=Parallel(tp=2, pp=4))
    assert [rank.layers for rank in plan.ranks] == [23, 23, 24, 24]
    assert plan.ranks[2].resident_bytes > plan.ranks[1].resident_bytes
    assert plan.ranks[0].plain_weights > plan.ranks[1].plain_weights, "the first stage has the embedding"
    assert min(rank.spare_bytes for rank in plan.ranks) >= 0


def test_attention_in_groups_keeps_less_cache_on_a_rank_and_more_weights():
    tensor = ask("deepseek-v3", roomy("8xH20"), Workload(8192, requests=64))
    grouped = ask("deepseek-v3", roomy("8xH20"), Workload(8192, requests=64), Parallel(tp=8, dp=8, dp_attention=True))
    assert grouped.kv_tokens == tensor.kv_tokens // 8
    assert grouped.ranks[0].plain_weights > tensor.ranks[0].plain_weights + 10 * GIB


def test_a_model_that_fits_whole_needs_no_offloading():
    plan = ask("gpt-oss-120b", "1xH200")
    assert plan.num_resident == 128
    assert any("not needed" in note for note in plan.notes)
    assert not any("expert-offload" in flag for flag in plan.flags)
    assert all(speed.decode_ratio == 1 and not speed.missed_bytes for speed in plan.speeds)


def test_padding_of_mxfp4_at_load_is_in():
    plan = ask("gpt-oss-120b", "1x5090")
    blocks = 36 * 3 * 2880 * 2880 * 17 // 32
    # 2880 hidden units become 2944, the hidden size 3072.
    padded = blocks * 2944 * 3072 / (2880 * 2880)
    # Whole blocks, less than one more than that in each of the layer's tensors.
    assert 0 <= plan.ranks[0].resident_bytes - plan.num_resident * padded < 36 * 4 * BLOCK_BYTES


# Blocks


def test_residents_take_whole_blocks_and_the_rest_is_in_host_ram():
    plan = ask("glm-5-fp8", roomy("8xH20"), parallel=Parallel(tp=8))
    case, half = case_of(plan, "glm-5-fp8"), 3 * 2**19
    layers = [layer for layer in case.decoder_layers(0) if layer.experts]
    tensors = Counter(nbytes for layer in layers for nbytes, placed in case.expert_tensors(layer) if placed)
    assert {n for n in tensors if n >= 2**20} == {half, 2 * half}
    sizes = case.sizes(0, 0)
    for n in (0, 1, 101, 255, 256):
        rest = [count * (-(-256 * b // BLOCK_BYTES) - -(-n * b // BLOCK_BYTES)) for b, count in tensors.items()]
        assert sizes.resident[n] == sum(count * -(-n * b // BLOCK_BYTES) for b, count in tensors.items()) * BLOCK_BYTES
        assert sizes.offloaded[n] == sum(rest) * BLOCK_BYTES


# SGLang's own rules


@pytest.mark.sglang
@pytest.mark.parametrize("gpu_mib", [16384, 24564, 32607, 49140, 81559, 97871, 143771, 183359])
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "latent", "requests", "chunk", "graphs"),
    [
        (1, 1, 1, False, None, None, True),
        (8, 1, 1, True, None, None, True),
        (8, 1, 8, True, 64, None, True),
        (8, 1, 8, True, None, None, True),
        (4, 2, 1, False, 3, 1024, True),
        (2, 1, 1, True, None, 16384, False),
    ],
)
def test_sglang_chooses_what_the_plan_says(monkeypatch, gpu_mib, tp, pp, dp, latent, requests, chunk, graphs):
    from builders.launch import resolved
    from sglang.srt.arg_groups import memory_hook

    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda _: gpu_mib)
    cfg = resolved(
        model_path=str(config_folder("deepseek-ai/DeepSeek-V3" if latent else "Qwen/Qwen3-30B-A3B")),
        **{"tp_size": tp, "pp_size": pp, "dp_size": dp, "enable_dp_attention": dp > 1, "attention_backend": "fa3"},
        **{"max_running_requests": requests, "chunked_prefill_size": chunk},
        **dict.fromkeys(("cuda_graph_backend_decode", "cuda_graph_backend_prefill"), "full" if graphs else "disabled"),
    )
    ours = sglang_memory.defaults(
        gpu_mib << 20,
        tp=tp,
        pp=pp,
        dp_attention=dp,
        latent_attention=latent,
        max_running_requests=requests,
        chunked_prefill_size=chunk,
        cuda_graphs=graphs,
    )
    assert ours.chunked_prefill_size == cfg.chunked_prefill_size * dp, "the flag's, which groups share"
    assert ours.mem_fraction_static == cfg.mem_fraction_static
    assert ours.decode_graph_batch == cfg.cuda_graph_config.decode.max_bs


def test_prefill_graphs_are_counted_at_once():
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 4097, 256)]
    sizes += range(4608, 20000, 512)
    counts = [sglang_memory._prefill_graphs(most) for most in range(10000)]
    assert counts == [sum(size <= most for size in sizes) for most in range(10000)]
    assert sglang_memory._prefill_graphs(1 << 50) == 50 - 8 + (1 << 50) // 512, "without a loop, which would not end"


@pytest.mark.sglang
@pytest.mark.parametrize(("layers", "pp"), [(61, 1), (61, 2), (61, 4), (94, 4), (7, 7)])
def test_pipeline_stages_are_sglangs(layers, pp):
    from sglang.srt.distributed.utils import get_pp_indices

    theirs = [get_pp_indices(layers, rank, pp) for rank in range(pp)]
    assert [(stage.start, stage.stop) for stage in sglang_memory.pipeline_stages(layers, pp)] == theirs


@pytest.mark.parametrize(
    ("name", "attn_tp", "itemsize", "nbytes"),
    [
        ("qwen3-235b-a22b", 1, 2, 192_512),  # 2 x 94 layers x 4 heads x 128 x 2 bytes
        ("qwen3-235b-a22b", 8, 2, 48_128),  # a head each, kept twice
        ("deepseek-v3", 1, 2, 70_272),  # 61 x (512 + 64) x 2
        ("deepseek-v3", 8, 2, 70_272),  # latent: whole on every rank
        ("deepseek-v3", 1, 1, 35_136),
        ("glm-5-fp8", 1, 2, 78 * (1152 + 132)),  # index keys beside the latent
        ("glm-5-fp8", 1, 1, 78 * (656 + 132)),  # the layout of sparse attention over FP8
        ("gpt-oss-120b", 1, 2, 2048 * (18 + 0.8 * 18)),  # half of the layers have a window
    ],
)
def test_bytes_of_the_cache_for_one_token(name, attn_tp, itemsize, nbytes):
    shape = model(name)
    assert shape.kv.pool_bytes(range(shape.num_layers), attn_tp, itemsize) == pytest.approx(nbytes)


def test_a_window_bounds_what_is_read_and_sparse_attention_too():
    windowed = KvShape(1, 8, 8, window_layers=frozenset({1}), window=16)
    assert windowed.read_bytes(range(2), 1, 2, 1000) == 32 * (1000 + 16)
    sparse = KvShape(1, 0, 0, latent=128, rope=64, index_dim=128, index_topk=100)
    assert sparse.read_bytes(range(1), 1, 2, 1000) == 132 * 1000 + 384 * 100


# Too small


def test_too_little_host_ram_is_said_and_each_remedy_would_do():
    plan = ask("deepseek-v3", "8xH20", Workload(163840, requests=4), Parallel(tp=8), Reserve(stream_gb=0))
    short = dataclasses.replace(plan.machine, host_bytes=64 * GIB)
    refused = ask("deepseek-v3", short, plan.workload, plan.parallel)
    assert not refused.fits
    assert "host RAM" in refused.problems[0]
    assert refused.ranks[0].plain_weights == plan.ranks[0].plain_weights, "what VRAM holds is shown all the same"
    host, vram, ranks = refused.needs
    amount = float(host.split()[3])
    assert ask("deepseek-v3", dataclasses.replace(short, host_bytes=int((amount + 0.01) * GIB)), plan.workload).fits
    assert not ask("deepseek-v3", dataclasses.replace(short, host_bytes=int((amount - 1) * GIB)), plan.workload).fits
    each = int(vram.split()[2])
    assert ask("deepseek-v3", dataclasses.replace(short, vram_bytes=each * GIB), plan.workload).fits
    assert not ask("deepseek-v3", dataclasses.replace(short, vram_bytes=(each - 8) * GIB), plan.workload).fits
    gpus, more_host = int(ranks.split()[0]), float(ranks.split()[-5])
    wider = dataclasses.replace(short, gpus=gpus, host_bytes=int((more_host + 0.01) * GIB))
    assert ask("deepseek-v3", wider, plan.workload, Parallel(tp=gpus)).fits


def test_too_little_vram_is_said_and_each_remedy_would_do():
    refused = ask("qwen3-235b-a22b", roomy("1x5090"), Workload(40960, requests=8))
    assert not refused.fits
    assert "with no expert resident a rank needs" in refused.problems[0]
    (tokens,) = map(int, TOKENS.findall(refused.problems[0]))
    fewer = dataclasses.replace(refused.workload, max_total_tokens=tokens)
    assert ask("qwen3-235b-a22b", refused.machine, fewer).fits
    assert not ask("qwen3-235b-a22b", refused.machine, dataclasses.replace(fewer, max_total_tokens=int(tokens * 1.1))).fits
    each = int(refused.needs[0].split()[2])
    assert ask("qwen3-235b-a22b", dataclasses.replace(refused.machine, vram_bytes=each * GIB), refused.workload).fits


def test_a_gpu_below_its_own_reserve_is_told_so_and_what_would_do():
    tiny = dataclasses.replace(roomy("1x5090"), vram_bytes=2 * GIB)
    for reserve in (Reserve(), Reserve(mem_fraction_static=0.5)):
        refused = ask("gpt-oss-120b", tiny, reserve=reserve)
        assert "and 0.0 MiB are left of what --mem-fraction-static and --expert-offload-headroom-gb" in refused.problems[0]
        assert refused.problems[0].endswith("use more or larger GPUs")
        each = int(refused.needs[0].split()[2])
        assert ask("gpt-oss-120b", dataclasses.replace(tiny, vram_bytes=each * GIB), reserve=reserve).fits


def test_a_gpu_with_less_than_nothing_to_grant_grants_nothing():
    """Both what is free and the share of it are below 0 here: their product is not."""
    tiny = dataclasses.replace(roomy("1x5090"), vram_bytes=1 << 20)
    assert not ask("qwen3-235b-a22b", tiny).fits


@pytest.mark.slow
def test_a_cache_of_as_many_tokens_as_a_remedy_names_fits():
    rng, followed = np.random.default_rng(3), 0
    for _ in range(100):
        name, tp, pp = str(rng.choice(NAMES)), int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 2]))
        machine = dataclasses.replace(roomy("8xH20"), gpus=tp * pp, vram_bytes=int(rng.integers(8, 64)) * GIB)
        work = Workload(
            context_length=int(rng.integers(1, model(name).context_length + 1)),
            requests=int(rng.integers(1, 300)),
            kv_cache_dtype=str(rng.choice(["bf16", "fp8_e4m3"])),
            speculative=bool(model(name).draft_layers and rng.integers(2)),
        )
        refused = ask(name, machine, work, Parallel(tp=tp, ep=tp, pp=pp))
        for tokens in (int(number) for problem in refused.problems for number in TOKENS.findall(problem)):
            followed += 1
            assert ask(name, machine, dataclasses.replace(work, max_total_tokens=tokens), refused.parallel).fits
    assert followed > 10


@pytest.mark.parametrize(
    ("name", "parallel", "reason"),
    [
        ("deepseek-v3", Parallel(tp=16), "need 16 GPUs, and the machine has 8"),
        ("deepseek-v3", Parallel(tp=8, ep=3), "--ep-size 3: must divide --tp-size 8"),
        ("deepseek-v3", Parallel(tp=8, dp=3, dp_attention=True), "must divide --tp-size 8"),
        ("deepseek-v3", Parallel(tp=0), "must be 1 or more"),
        ("deepseek-v3", Parallel(dp=0), "must be 1 or more"),
        ("glm-4.5", Parallel(tp=5), "do not divide the model's 96 heads"),
        ("glm-4.5", Parallel(tp=7, ep=7), "does not divide the model's 160 experts"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(name, parallel, reason):
    plan = ask(name, "8xH20", parallel=parallel)
    assert any(reason in problem for problem in plan.problems)
    assert plan.num_resident is None
    assert reason in planner.render(plan)


def test_blocks_of_scales_are_not_cut():
    """2048 hidden units in blocks of 128 go on 16 ranks, and not on 32."""
    many = dataclasses.replace(roomy("8xH20"), gpus=32)
    assert ask("deepseek-v3", many, parallel=Parallel(tp=16)).fits
    assert "blocks of 128 that share a scale" in ask("deepseek-v3", many, parallel=Parallel(tp=32)).problems[0]
    assert ask("deepseek-v3", many, parallel=Parallel(tp=32, ep=32)).fits


def test_a_context_beyond_the_models_is_refused():
    plan = ask("qwen3-235b-a22b", roomy("8xH20"), Workload(50000))
    assert plan.problems == ("--context-length 50000: the model allows 40960",)


def test_drafting_layers_that_a_model_does_not_have_are_not_planned():
    plan = ask("qwen3-235b-a22b", roomy("8xH20"), Workload(8192, speculative=True))
    assert plan.problems == ("the checkpoint has no draft layers of its own to count",)


def test_a_step_yields_no_more_tokens_than_it_verifies():
    def problems(accepted, **work):
        assumed = dataclasses.replace(Assumptions(), accepted_tokens=accepted)
        return ask("deepseek-v3", roomy("8xH20"), Workload(8192, **work), assumed=assumed).problems

    refused = ("--accepted-tokens 4.1: a step with --speculative-num-draft-tokens 4 yields 1 to 4 tokens",)
    assert problems(4.1, speculative=True) == refused
    assert not problems(4, speculative=True), "the last of them is not a draft, but the one that the model adds"
    assert problems(0.9, speculative=True)
    assert not problems(4.1)


# Speed


def simulate(experts, resident, top_k, hit_rate, tokens, rng):
    """Distinct offloaded experts of one step, with choices drawn one by one."""
    hit = np.zeros(experts, dtype=bool)
    chance = np.r_[np.full(resident, hit_rate / resident), np.full(experts - resident, (1 - hit_rate) / (experts - resident))]
    for _ in range(tokens):
        hit[rng.choice(experts, top_k, replace=False, p=chance)] = True
    return hit[resident:].sum()


@pytest.mark.slow
@pytest.mark.parametrize(("hit_rate", "tokens"), [(0.5, 1), (0.5, 8), (0.8, 8), (0.5, 64)])
def test_distinct_experts_are_those_of_a_simulation(hit_rate, tokens):
    rng, experts, resident, top_k = np.random.default_rng(2), 64, 32, 4
    mean = np.mean([simulate(experts, resident, top_k, hit_rate, tokens, rng) for _ in range(400)])
    # Drawing without replacement favours rare experts a little: the formula leaves that out.
    assert distinct(experts - resident, top_k * (1 - hit_rate), tokens) == pytest.approx(mean, rel=0.08)


def test_distinct_experts_at_the_edges():
    assert distinct(0, 4, 10) == 0
    assert distinct(8, 8, 1) == 8
    assert distinct(8, 20, 5) == 8
    assert distinct(8, 0, 5) == 0
    assert distinct(256, 8, 1) == pytest.approx(8)
    for choices in (0, 20):
        assert distinct(8, choices, 5, 0.5) == distinct(8, choices, 5)


def test_uneven_choices_activate_as_a_beta_distribution_has_it():
    rng, skew, experts, choices = np.random.default_rng(0), 0.4, 100, 4.0
    likely = rng.beta(1 / skew, (experts / choices - 1) / skew, 200_000)
    for tokens in (1, 4, 16, 64):
        simulated = experts * (1 - (1 - likely) ** tokens).mean()
        assert distinct(experts, choices, tokens, skew) == pytest.approx(simulated, rel=5e-3)
    assert distinct(experts, choices, 1, skew) == pytest.approx(choices), "whatever the skew"
    assert distinct(experts, choices, 64, skew) < 0.92 * distinct(experts, choices, 64)
    assert distinct(experts, choices, 64, 1e-4) == pytest.approx(distinct(experts, choices, 64), rel=1e-3)


STAGE = StageCost(10, 10**9, 2e9, (10**7,) * 10, 2e7, 10**6)


def speed(resident=32, hit_rate=0.5, requests=1, machine="1xH200", parallel=None, assumed=None, chunk=4096, **work):
    workload = Workload(4096, **work)
    machine = preset(machine) if isinstance(machine, str) else machine
    rest = (machine, workload, parallel or Parallel(), requests, chunk, assumed or Assumptions())
    return predict("test", hit_rate, resident, 64, 4, [STAGE], *rest)


def test_one_request_misses_its_uncovered_choices_in_every_layer():
    one = speed()
    assert one.missed_experts == pytest.approx(10 * 4 * 0.5)
    assert one.missed_bytes == pytest.approx(20 * 10**7)
    rate = 55e9 * Assumptions().read_efficiency
    assert one.decode_step_s - one.resident_step_s == pytest.approx(20 * 10**7 / rate - 20 * 10**7 / (4800e9 * 0.7), rel=1e-6)


def test_a_step_reads_every_weight_beside_experts_but_the_embedding_and_draft_experts():
    qwen = ask("qwen3-235b-a22b", roomy("8xH20"))
    cost = case_of(qwen, "qwen3-235b-a22b").costs[0]
    assert cost.dense_bytes == qwen.ranks[0].plain_weights - 151936 * 4096 * 2 // 8
    assert cost.expert_layers == (3 * 4096 * 1536 * 2 // 8,) * 94
    assert cost.expert_flops == 2 * 3 * 4096 * 1536 / 8
    drafting = ask("deepseek-v3", roomy("8xH20"), Workload(8192, speculative=True))
    experts = 256 * 3 * 7168 * 2048 // 8
    case = case_of(drafting, "deepseek-v3")
    cost = case.costs[0]
    (draft,) = model("deepseek-v3").draft_layers
    beside = (draft.attention + draft.feed_forward) // 8 + draft.replicated
    assert cost.dense_bytes == drafting.ranks[0].plain_weights - 129280 * 7168 * 2 // 8 - experts - beside
    assert cost.draft_bytes == beside + 129280 * 7168 * 2 // 8, "the draft layer, and the head for each drafted token"
    assert (cost.draft_layers, cost.draft_expert_bytes) == (1, sum(n for n, _ in case.expert_tensors(draft)))


def test_reading_the_machine_the_other_way_round_changes_the_step():
    fast = dataclasses.replace(preset("1xH200"), link_gbps=110)
    assert speed(machine=fast).decode_step_s < speed().decode_step_s
    slow_hbm = dataclasses.replace(preset("1xH200"), hbm_gbps=1000)
    assert speed(machine=slow_hbm).resident_step_s > speed().resident_step_s
    slow_cores = dataclasses.replace(preset("1xH200"), tflops=10)
    assert speed(machine=slow_cores).resident_prefill_tokens_s < speed().resident_prefill_tokens_s


def test_more_residents_or_hit_rate_never_decode_slower():
    steps = [speed(resident=n, hit_rate=n / 64).decode_step_s for n in range(65)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == speed(resident=64).resident_step_s
    steps = [speed(hit_rate=c).decode_step_s for c in np.linspace(0, 1, 11)]
    assert steps == sorted(steps, reverse=True)


def test_residents_cannot_serve_more_choices_than_there_are_of_them():
    assert speed(resident=2, hit_rate=0.9).hit_rate == 0.5
    assert speed(resident=0, hit_rate=0.9).hit_rate == 0


def test_more_requests_share_the_experts_that_they_read():
    one, eight = speed(requests=1), speed(requests=8)
    assert one.missed_bytes < eight.missed_bytes < 8 * one.missed_bytes
    assert eight.decode_tokens_s > one.decode_tokens_s


def test_ranks_of_experts_read_their_own_share():
    assert speed(parallel=Parallel(tp=4, ep=4)).missed_bytes == pytest.approx(speed().missed_bytes / 4)
    assert speed(parallel=Parallel(tp=4, ep=4)).resident_step_s < speed(parallel=Parallel(tp=4)).resident_step_s


def test_verifying_drafts_activates_more_experts_and_yields_more_tokens():
    plain, drafted = speed(), speed(speculative=True, draft_tokens=4)
    assert drafted.decode_tokens_s == pytest.approx(2.5 / drafted.decode_step_s)
    assumed = Assumptions()
    independent = 10 * distinct(32, 4 * 0.5, 1 + 3 * assumed.draft_token_weight, assumed.expert_skew)
    assert drafted.missed_experts == pytest.approx(independent)
    assert drafted.missed_experts > plain.missed_experts
    assert drafted.missed_experts < speed(requests=4).missed_experts, "tokens of one request share experts"


def test_each_drafted_token_takes_a_pass_of_the_draft_layers():
    stage = dataclasses.replace(STAGE, draft_layers=1, draft_bytes=10**8, draft_expert_bytes=10**7)

    def step(drafts, of=stage):
        work = Workload(4096, speculative=drafts > 0, draft_tokens=drafts + 1)
        assumed = dataclasses.replace(Assumptions(), draft_token_weight=0.0)
        return predict("test", 1.0, 64, 64, 4, [of], preset("1xH200"), work, Parallel(), 1, 4096, assumed).decode_step_s

    one = (10**8 + 4 * 10**7) / (4800e9 * 0.7) + Assumptions().layer_overhead_us * 1e-6
    assert step(3) - step(0) == pytest.approx(3 * one)
    assert step(3, STAGE) == pytest.approx(step(0)), "without draft layers, only more rows are computed"


def test_drafted_tokens_read_what_is_offloaded_of_draft_layers():
    stage = dataclasses.replace(STAGE, draft_layers=1, draft_bytes=10**8, draft_expert_bytes=10**7)
    work, assumed = Workload(4096, speculative=True), Assumptions()
    some = dataclasses.replace(stage, draft_residents=32, draft_hit_rate=0.75)
    whole, part = (
        predict("test", 1.0, 64, 64, 4, [of], preset("1xH200"), work, Parallel(), 1, 4096, assumed) for of in (stage, some)
    )
    assert part.missed_bytes - whole.missed_bytes == pytest.approx(3 * 10**7, rel=0.02), "a fourth of the four, three times"
    assert part.decode_step_s > whole.decode_step_s
    assert part.resident_step_s == whole.resident_step_s


def test_offloaded_experts_of_draft_layers_leave_vram_and_take_host_ram():
    machine = roomy("8xH20")
    whole, half = (ask("deepseek-v3", machine, Workload(8192, speculative=True, draft_num_resident=n)) for n in (None, 128))
    at = Division(100, 0, 0)
    cases = [case_of(plan, "deepseek-v3") for plan in (whole, half)]
    more, less = (case.rank(0, at).plain_weights for case in cases)
    assert more - less == 128 * 3 * 7168 * 2048 // 8
    for moves, times in ((False, 1), (True, 2)):
        all_resident, offloaded = (case.host_need(at, moves).experts for case in cases)
        assert offloaded - all_resident == times * 8 * (more - less)
    small = dataclasses.replace(preset("8xH20"), vram_bytes=80 * GIB)
    chosen = [ask("deepseek-v3", small, Workload(8192, speculative=True, draft_num_resident=n)).num_resident for n in (None, 0)]
    assert chosen[1] > chosen[0]


@pytest.mark.parametrize(
    ("given", "told"), [(None, "is not needed"), (256, "is not needed"), (100, "is needed for draft layers")]
)
def test_a_launch_that_offloads_draft_layers_alone_says_so(given, told):
    """Without N, its experts would stay in VRAM, which the plan has not room for."""
    plan = ask("deepseek-v3", preset("8xB200"), Workload(8192, speculative=True, draft_num_resident=given))
    assert plan.num_resident == 256
    assert any(f"offloading {told}" in note for note in plan.notes)
    flags = [flag for flag in plan.flags if "num-resident" in flag or "num_resident" in flag]
    drafts = config_flag(draft_num_resident=100)
    assert flags == (["--expert-offload-num-resident 256", drafts] if given == 100 else [])


def test_residents_of_draft_layers_that_no_model_has_are_refused():
    def problems(number, speculative=True):
        return ask("deepseek-v3", roomy("8xH20"), Workload(8192, speculative=speculative, draft_num_resident=number)).problems

    assert problems(256) == ()
    assert problems(257) == ("--draft-num-resident 257: the model has 256 experts a layer; give at most as many",)
    assert problems(1, speculative=False) == ("--draft-num-resident 1: has no effect without --speculative",)


def test_latent_attention_has_an_overhead_of_its_own_and_fp8_computes_twice_as_fast():
    deepseek = case_of(ask("deepseek-v3", roomy("8xH20")), "deepseek-v3").costs[0]
    qwen = case_of(ask("qwen3-235b-a22b", roomy("8xH20")), "qwen3-235b-a22b").costs[0]
    assert (deepseek.latent_attention, deepseek.gemm_rate) == (True, 2.0)
    assert (qwen.latent_attention, qwen.gemm_rate) == (False, 1.0)
    more = (Assumptions().latent_overhead_us - Assumptions().layer_overhead_us) * 1e-6
    rest = (preset("1xH200"), Workload(4096), Parallel(), 1, 4096, Assumptions())
    plain, latent, fast = (
        predict("test", 1.0, 64, 64, 4, [dataclasses.replace(STAGE, **other)], *rest)
        for other in ({}, {"latent_attention": True}, {"gemm_rate": 2.0})
    )
    assert latent.decode_step_s - plain.decode_step_s == pytest.approx(10 * more)
    computing = 4096 * (2e9 + 4 * 10 * 2e7) / (989e12 * Assumptions().compute_efficiency)
    assert plain.prefill_chunk_s - fast.prefill_chunk_s == pytest.approx(computing / 2)


def test_a_cpu_engine_reads_the_active_experts_of_all_ranks_from_host_memory():
    machine = dataclasses.replace(preset("1xH200"), host_gbps=600)
    one = speed(machine=machine)
    rate = 600e9 * Assumptions().cpu_efficiency
    beside = (10**9 + 10**6) / (4800e9 * 0.7) + 10 * Assumptions().layer_overhead_us * 1e-6
    assert one.cpu_engine_step_s == pytest.approx(beside + 4 * 10 * 10**7 / rate)
    assert one.cpu_engine_tokens_s == pytest.approx(1 / one.cpu_engine_step_s)
    cut = speed(machine=machine, parallel=Parallel(tp=4))
    overhead = 10 * 2 * Assumptions().collective_us * 1e-6
    assert cut.cpu_engine_step_s - overhead - beside == pytest.approx(4 * 4 * 10 * 10**7 / rate), "four slices of each expert"
    assert speed(machine=dataclasses.replace(machine, host_gbps=0)).cpu_engine_step_s == 0


def test_prefill_reads_every_offloaded_expert_once_for_each_block_of_rows_in_each_chunk():
    once = speed(prompt_tokens=512)
    assert once.reread == 1, "32 rows are less than one block"
    more = speed(prompt_tokens=2048)
    assert more.reread == 1.5, "32 offloaded experts share half of 2048 x 4 uses: 128 rows each, and half a block"
    link = 32 * 10 * 10**7 / (55e9 * Assumptions().read_efficiency)
    assert more.prefill_chunk_s > 1.5 * link
    most = speed(prompt_tokens=4096)
    assert most.reread == 2.5
    assert most.prefill_chunk_s - more.prefill_chunk_s == pytest.approx(link, rel=0.3)
    halved = speed(prompt_tokens=4096, chunk=2048)
    assert 4096 / halved.prefill_tokens_s == pytest.approx(2 * more.prefill_chunk_s)
    tall = speed(prompt_tokens=4096, assumed=dataclasses.replace(Assumptions(), rows_per_read=256))
    assert tall.reread == 1.5
    assert speed(prompt_tokens=4096, hit_rate=0.75).reread == 1.5, "residents take more of the rows"


def test_a_short_prompt_takes_as_long_as_its_launches_which_hide_reads_over_the_link():
    launching = 10 * Assumptions().prefill_layer_ms * 1e-3
    resident = speed(resident=64, hit_rate=1.0, prompt_tokens=64)
    assert resident.prefill_chunk_s == pytest.approx(launching)
    latent = dataclasses.replace(STAGE, latent_attention=True)
    rest = (preset("1xH200"), Workload(4096, prompt_tokens=64), Parallel(), 1, 4096, Assumptions())
    slower = predict("test", 1.0, 64, 64, 4, [latent], *rest)
    assert slower.prefill_chunk_s == pytest.approx(10 * Assumptions().latent_prefill_layer_ms * 1e-3)
    few = speed(resident=63, hit_rate=63 / 64, prompt_tokens=64)
    assert few.missed_bytes > 0
    assert few.prefill_chunk_s == pytest.approx(launching), "reading one expert a layer ends before the launches do"
    many = speed(resident=0, hit_rate=0.0, prompt_tokens=64)
    assert many.prefill_chunk_s > 10 * 60 * 10**7 / (55e9 * Assumptions().read_efficiency), "the link takes longer"


@pytest.mark.slow
def test_every_assumption_changes_some_figure():
    """An assumption that nothing reads would be shown to people for nothing."""
    for field in dataclasses.fields(Assumptions):
        latent = field.name not in ("layer_overhead_us", "prefill_layer_ms")
        name = "deepseek-v3" if latent else "glm-4.5"
        prompt = 512 if field.name.startswith(("prefill", "latent_prefill")) else 1024 if "copy_eff" in field.name else 4096
        workload = Workload(8192, requests=2, prompt_tokens=prompt, speculative=True, draft_tokens=10)
        reserve = Reserve(stream_gb=0) if field.name == "rows_per_read" else None
        slots = Slots(None) if "slot" in field.name else NO_SLOTS
        residents = {"copy_efficiency": 100, "vram_copy_gbps": 235, "copy_slows": 235, "vram_copy_slows": 235}.get(field.name)
        options = {"reserve": reserve, "slots": slots, "num_resident": residents}
        base = ask(name, roomy("8xH20"), workload, **options)
        value = getattr(Assumptions(), field.name)
        changed = dataclasses.replace(Assumptions(), **{field.name: type(value)(value * 1.25 if value < 1 else value * 4)})
        if field.name == "rows_per_read":
            changed = dataclasses.replace(Assumptions(), rows_per_read=16)
        if field.name == "host_efficiency":  # more is more than the link brings
            changed = dataclasses.replace(Assumptions(), host_efficiency=0.3)
        other = ask(name, roomy("8xH20"), workload, **options, assumed=changed)
        assert (other.ranks, other.host_needed, other.speeds) != (base.ranks, base.host_needed, base.speeds), field.name


# Reading and pasting


def test_the_report_says_what_it_rests_on():
    plan = ask("glm-5-fp8", "8xH20")
    text = planner.render(plan)
    assert f"It fits: {plan.num_resident} of 256 experts a layer resident" in text
    for flag in plan.flags:
        assert flag in text
    assert "read rate 55 GB/s x 0.94, and at most a rank's share of host memory's 614.4 x 0.7: 51.7 GB/s" in text
    assert "worst published read rate 35 GB/s: kernels on each GPU of a machine with eight H100" in text
    (measured,) = [line for line in text.splitlines() if line.startswith("measured on an H200")]
    (assumed,) = [line for line in text.splitlines() if line.startswith("assumed, not measured")]
    for field in dataclasses.fields(Assumptions):
        there = measured if field.name in MEASURED else assumed
        assert f"{field.name} {getattr(plan.assumptions, field.name)}" in there


def test_the_report_has_a_column_for_each_kind_of_stage():
    text = planner.render(ask("qwen3-235b-a22b", roomy("8xH20"), parallel=Parallel(tp=2, pp=4)))
    assert [column in text for column in ("stage 0 ", "stage 1 ", "stage 2 ", "stage 3")] == [True] * 4


def test_the_report_of_what_does_not_fit_has_every_problem_and_need():
    plan = ask("kimi-k2", "1x5090")
    text = planner.render(plan)
    for line in (*plan.problems, *plan.needs):
        assert line in text
    assert "launch_server" not in text


def test_flags_to_paste_are_well_formed():
    plan = ask("glm-4.5", "8xH20", Workload(16384, requests=3, speculative=True), Parallel(tp=8))
    words = dict(flag.split(" ", 1) for flag in plan.flags)
    assert words["--max-running-requests"] == "3"
    prefix = "--expert-offload-"
    ours = {name.removeprefix(prefix).replace("-", "_"): value for name, value in words.items() if name.startswith(prefix)}
    ours["headroom_gb"] = float(ours["headroom_gb"])
    assert parse(ours).num_resident == plan.num_resident


# A machine


def test_a_preset_is_a_count_and_a_gpu():
    assert preset("2xh20").gpus == 2
    assert preset("8xH20").source.count("http") == 1
    for wrong in ("8xA0", "H20", "0xH20", "x", "8x"):
        with pytest.raises(MachineError) as refused:
            preset(wrong)
        assert all(known in str(refused.value) for known in (repr(wrong), *GPUS, "--vram-gb", "--tflops"))


@pytest.mark.parametrize(
    ("name", "gpu", "mib"),
    [
        *(("2x" + name, name, None) for name in sorted(GPUS)),
        *(("1xa100", "A100-80GB", 81920), ("4xA100-40gb", "A100-40GB", 40960), ("8xh20-141GB", "H20-141GB", 143771)),
        *(("4xrtx4090", "4090", 24564), ("2xRTX-A6000", "A6000", 49140), ("1xspark", "GB10", 113878)),
    ],
)
def test_every_known_gpu_is_a_machine_in_any_number_and_case(name, gpu, mib):
    machine = preset(name)
    assert machine == preset(name.lower()) == preset(name.upper())
    assert machine.name == f"{name[0]}x{gpu}"
    assert machine.vram_bytes == (mib or GPUS[gpu].memory_mib) << 20
    assert min(machine.host_bytes, machine.link_gbps, machine.hbm_gbps, machine.tflops, machine.host_gbps) > 0
    assert "http" in machine.source
    assert "assumed" in machine.source


@pytest.mark.parametrize("name", GPUS)
def test_no_link_is_planned_as_if_it_were_better_than_published(name):
    """Each rate with an address; where none is published, the source says that ours is nominal."""
    link = preset(f"1x{name}").link
    assert link == GPUS[name].link
    assert 0 <= link.slowest < link.rate
    assert ("http" in link.slowest_source) == bool(link.slowest)
    assert link.slowest or "nominal" in link.source


def test_predictions_range_from_the_worst_published_rate_of_such_a_link():
    plan = ask("glm-5-fp8", "8xH20")
    machine = preset("8xH20")
    worst = ask("glm-5-fp8", dataclasses.replace(machine, read_gbps=machine.link.slowest, link=None))
    assert worst.num_resident == plan.num_resident
    for speed, least in zip(plan.speeds, worst.speeds, strict=True):
        assert speed.slowest == speed.least == dataclasses.replace(least, measured_on=None)
        assert least.slowest is None
        assert least.decode_tokens_s < speed.decode_tokens_s
        assert least.prefill_ratio < speed.prefill_ratio
        shown = f"{least.decode_tokens_s:.1f} to {speed.decode_tokens_s:.1f} tok/s"
        assert shown in planner.render(plan)
    assert plan.slowest_hiding_chunk == worst.hiding_chunk > plan.hiding_chunk
    assert "ranges: from the worst published rate of such a link, 35 GB/s" in planner.render(plan)
    other = plan.alternatives or (plan,)
    assert all(speed.slowest for each in other for speed in each.speeds)


def test_where_host_memory_is_the_limit_no_range_is_told():
    """Eight GPUs over PCIe 5 read less together than the worst published rate of one."""
    plan = ask("gpt-oss-120b", "8x5090", num_resident=96)
    assert all(speed.slowest == dataclasses.replace(speed, slowest=None, measured_on=None) for speed in plan.speeds)
    text = planner.render(plan)
    assert "ranges:" not in text
    assert "a rank's share of host memory's 307.2 x 0.7: 26.9 GB/s" in text
    unknown = dataclasses.replace(preset("8x5090"), host_gbps=0)
    assert "read rate 55 GB/s x 0.94: 51.7 GB/s" in planner.render(ask("gpt-oss-120b", unknown, num_resident=96))


def test_a_rate_that_was_given_is_this_machines_own_and_no_range():
    figures = dict.fromkeys(("gpus", "vram_gb", "host_gb", "hbm_gbps", "tflops"))
    machine = describe(preset("8xH20"), link_gbps=40.0, **figures)
    assert machine.slowest is None
    plan = ask("glm-5-fp8", machine)
    assert all(speed.slowest is None and speed.least is speed for speed in plan.speeds)
    assert "ranges:" not in planner.render(plan)
    assert describe(preset("8xH20"), link_gbps=None, **{**figures, "host_gb": 900.0}).slowest is not None


@pytest.mark.parametrize(
    ("name", "ranks", "rate"),
    [
        *(("1xGH200", 1, 546 * 0.7), ("2xGB200", 2, 273 * 0.7), ("2x5090", 2, 89.6 * 0.7 / 2), ("8x5090", 8, 307.2 * 0.7 / 8)),
        *(("1x5090", 1, 55 * 0.94), ("8xH20", 8, 55 * 0.94), ("8x5090", 2, 55 * 0.94)),
    ],
)
def test_all_ranks_together_read_no_faster_than_the_hosts_memory(name, ranks, rate):
    assert read_rate(preset(name), Parallel(ranks), Assumptions()) == pytest.approx(rate * 1e9)
    unknown = dataclasses.replace(preset(name), host_gbps=0)
    assert read_rate(unknown, Parallel(ranks), Assumptions()) == pytest.approx(unknown.link_gbps * 0.94e9)


def test_host_ram_is_that_of_a_desktop_a_server_or_the_superchip():
    ram = {name: preset(name).host_bytes // GIB for name in ("1x4090", "4x4090", "2xH100", "2xGH200", "2xGB10", "8xh20")}
    assert ram == {"1x4090": 192, "4x4090": 512, "2xH100": 256, "2xGH200": 960, "2xGB10": 16, "8xh20": 1500}
    rates = {name: preset(name).host_gbps for name in ("2x3090", "8x4090", "2xH100")}
    assert rates == pytest.approx({"2x3090": 89.6, "8x4090": 307.2, "2xH100": 614.4})


@pytest.mark.parametrize(
    ("name", "gib", "gbps"),
    [
        *(("NVIDIA A100-SXM4-40GB", 40, 1555), ("NVIDIA A100 80GB PCIe", 80, 2039), ("NVIDIA H100 80GB HBM3", 80, 3350)),
        *(("NVIDIA RTX A6000", 48, 768), ("NVIDIA GeForce RTX 3090", 24, 936), ("NVIDIA GH200 480GB", 96, 4000)),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives_it(name, gib, gbps):
    assert of_gpus([(name, gib * GIB)]).hbm_gbps == gbps


def test_of_two_sizes_of_a_gpu_the_nearest_is_meant():
    sources = [of_gpus([("NVIDIA H20", mib << 20)]).source for mib in (97871, 143771)]
    assert ["VRAM as of an H200" in source for source in sources] == [False, True]


@pytest.mark.parametrize(("name", "link", "host"), [("1xGH200", 450, 546), ("4xGB200", 225, 1092), ("1xGB10", 273, 273)])
def test_coherent_machines_have_the_rate_of_their_own_link(name, link, host):
    machine = preset(name)
    assert (machine.link_gbps, machine.host_gbps) == (link, host)
    assert "NVLink-C2C" in machine.source
    assert machine.one_memory == (name == "1xGB10")
    seen = of_gpus([("NVIDIA " + name[2:] + " 480GB", machine.vram_bytes)] * machine.gpus)
    assert (seen.link_gbps, seen.host_gbps, seen.one_memory) == (link, host, machine.one_memory)


def test_a_host_is_as_fast_as_it_is_said_to_be(capsys):
    assert preset("8xH20").host_gbps == pytest.approx(614.4)
    assert "host RAM of 1500 GiB at 614 GB/s assumed" in preset("8xH20").source
    assert preset("1x5090").host_gbps == pytest.approx(89.6)
    assert run(MODELS / "glm-5-fp8.json", "--machine", "8xH20", "--host-gbps", 100, "--json") == 0
    assert json.loads(capsys.readouterr().out)["machine"]["host_gbps"] == 100


def test_figures_adjust_a_preset_or_describe_a_machine():
    figures = dict.fromkeys(("gpus", "vram_gb", "host_gb", "link_gbps", "hbm_gbps", "tflops"))
    adjusted = describe(preset("8xH20"), **figures | {"host_gb": 64.0})
    assert (adjusted.host_bytes, adjusted.vram_bytes) == (64 * GIB, preset("8xH20").vram_bytes)
    with pytest.raises(MachineError, match="--host-gb, --link-gbps, --hbm-gbps, --tflops: not known"):
        describe(None, **figures | {"gpus": 2, "vram_gb": 24.0})


# The command


def run(*words):
    parser = argparse.ArgumentParser()
    planner_cli.add_arguments(parser)
    return planner_cli.run(parser.parse_args([str(word) for word in words]))


def test_the_command_prints_a_plan_as_text_or_json(capsys):
    assert run(MODELS / "glm-4.5-air.json", "--machine", "4x4090", "--requests", 2) == 0
    assert "It fits" in capsys.readouterr().out
    assert run(MODELS / "glm-4.5-air.json", "--machine", "4x4090", "--requests", 2, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_resident"] == ask("glm-4.5-air", "4x4090", Workload(32768, requests=2), slots=Slots(None)).num_resident
    assert plan["ranks"][0]["resident_bytes"] > 0
    assert plan["parallel"]["tp"] == 4


def test_the_command_takes_a_machine_by_its_figures(capsys):
    figures = ("--gpus", 8, "--vram-gb", 96, "--host-gb", 1500, "--link-gbps", 55, "--hbm-gbps", 4000, "--tflops", 148)
    assert run(MODELS / "glm-5-fp8.json", *figures) == 0
    assert "8 GPUs of 96.00 GiB" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(capsys, tmp_path):
    assert run(MODELS / "kimi-k2.json", "--machine", "1x5090") == 1
    assert run(tmp_path, "--machine", "1x5090") == 2
    assert run(MODELS / "kimi-k2.json", "--machine", "3xNOPE") == 2
    assert run(MODELS / "kimi-k2.json", "--gpus", 1, "--vram-gb", 80) == 2
    errors = capsys.readouterr().err
    assert "cannot read" in errors
    assert "--machine '3xNOPE'" in errors
    assert "--host-gb, --link-gbps" in errors


@pytest.mark.parametrize(
    "words",
    [
        ("--requests", "0"),
        ("--requests", "many"),
        ("--vram-gb", "nan"),
        ("--vram-gb", "-1"),
        ("--headroom-gb", "inf"),
        ("--hit-rate", "1.5"),
        ("--read-efficiency", "0"),
        ("--num-resident", "-1"),
        ("--host-gbps", "0"),
        ("--mem-fraction-static", "0"),
        ("--stream-buffer-gb", "-1"),
        ("--stream-buffer-gb", "two"),
    ],
)
def test_the_command_refuses_numbers_that_mean_nothing(capsys, words):
    with pytest.raises(SystemExit):
        run(MODELS / "kimi-k2.json", "--machine", "8xH20", *words)
    assert words[0] in capsys.readouterr().err


def test_a_measured_hit_rate_takes_the_place_of_measured_routing():
    plan = ask("glm-5-fp8", "8xH20", hit_rate=0.97)
    assert {speed.hit_rate for speed in plan.speeds} == {0.97}
    assert "measured routing" not in planner.render(plan)


def test_hit_rates_are_shown_as_a_range_with_their_source():
    plan = ask("glm-5-fp8", "8xH20")
    residency = plan.num_resident / 256
    for requests in (1, 2):
        other, lowest, highest = (speed for speed in plan.speeds if speed.requests == requests)
        found = hit_rates("glm_moe_dsa", requests, residency)
        assert (other.hit_rate, lowest.hit_rate, highest.hit_rate) == (found.other.rate, found.lowest.rate, found.highest.rate)
        assert residency < other.hit_rate < lowest.hit_rate < highest.hit_rate < 1
    text = planner.render(plan)
    assert "lowest measured, 2 requests: residents chosen in a warm-up, 1 at once: dsv2lite-summary" in text
    assert "from dsv2lite-summary (DeepSeek-V2-Lite, 6 of 64 experts a token; deepseek-ai/ESFT" in text
    assert "gpt-oss" not in text, "another kind of model"


# A given number of residents


def test_a_given_number_of_residents_is_planned_with():
    most = ask("deepseek-v3", roomy("8xH20"))
    fewer = ask("deepseek-v3", roomy("8xH20"), num_resident=100)
    assert (fewer.num_resident, fewer.fits) == (100, True)
    assert (
        fewer.ranks[0].resident_bytes == case_of(fewer, "deepseek-v3").sizes(0, 0).resident[100] < most.ranks[0].resident_bytes
    )
    assert fewer.speeds[0].hit_rate < most.speeds[0].hit_rate
    assert "--expert-offload-num-resident 100" in fewer.flags


def test_a_given_number_that_does_not_fit_is_refused_with_the_most_that_does():
    most = ask("deepseek-v3", roomy("8xH20"), reserve=Reserve(stream_gb=0)).num_resident
    vram = ask("deepseek-v3", roomy("8xH20"), num_resident=most + 1)
    (problem,) = vram.problems
    assert problem.endswith(f"(for 2 requests of 8192 tokens); at most {most} residents do")
    (problem,) = ask("deepseek-v3", roomy("8xH20"), num_resident=256).problems
    assert problem.startswith("--expert-offload-num-resident 256: ")
    assert not vram.flags
    host = ask("deepseek-v3", dataclasses.replace(preset("8xH20"), host_bytes=300 * GIB), num_resident=100)
    assert not host.fits
    least = int(re.search(r"; (\d+) residents would do", host.problems[0])[1])
    for residents, fits in ((least, True), (least - 1, False)):
        assert ask("deepseek-v3", host.machine, num_resident=residents).fits == fits
    beyond = ask("deepseek-v3", roomy("8xH20"), num_resident=257)
    assert beyond.problems == ("--num-resident 257: the model has 256 experts a layer",)
    slots = ask("deepseek-v3", roomy("8xH20"), num_resident=250, slots=Slots(10))
    assert len(slots.problems) == 1
    assert not beyond.needs, "no other ranks help"
    assert not slots.needs


def test_residents_may_be_none_and_the_refusal_of_fewer_says_so():
    assert planner_cli._whole("0") == 0
    with pytest.raises(argparse.ArgumentTypeError, match="'-1' is not a whole number from 0 to"):
        planner_cli._whole("-1")


def test_the_flags_name_the_model_as_a_launch_takes_it(tmp_path):
    """Of a config.json its folder, and not where its writer had it; as one word of the shell."""
    folder = tmp_path / "my models"
    folder.mkdir()
    config = json.loads((config_folder("Qwen/Qwen3-30B-A3B") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": "/home/author/step_9000"}))
    plan = planner.plan(shape_of(folder / "config.json"), preset("1x4090"), Workload(8192), Parallel())
    assert plan.flags[0] == f"--model-path '{folder}'"
    assert planner.render(plan).splitlines()[0].startswith(f"model     {folder}: ")


# Plans of no use


def test_a_useless_plan_is_called_useless():
    none = ask("deepseek-v3", roomy("8xH20"), num_resident=0)
    few = ask("deepseek-v3", roomy("8xH20"), num_resident=15)
    enough = ask("deepseek-v3", roomy("8xH20"), num_resident=16)
    assert none.useless[0] == "no expert is resident: every step reads each expert that it uses over the link"
    assert few.useless[0].startswith("15 residents are fewer than twice the 8 experts that a token uses")
    assert enough.useless == ()
    text = planner.render(none)
    assert "It fits: 0 of 256 experts a layer resident (0%).\nBut this plan is useless:\n  - no expert is resident" in text
    assert "useless" not in planner.render(enough)


def test_a_plan_that_a_cpu_engine_beats_on_a_slow_link_only_says_so():
    machine = preset("4x4090")
    plan = ask("glm-4.5-air", machine, Workload(32768), Parallel(4))
    (note,) = [each for each in plan.notes if "worst published rate" in each]
    best = max(plan.speeds, key=lambda speed: speed.decode_tokens_s)
    figures = f"{best.least.cpu_engine_tokens_s:.1f} tok/s against {best.least.decode_tokens_s:.1f}"
    assert note.startswith(
        "at the worst published rate of such a link, an engine that computes the experts on the CPU would be"
    )
    assert figures in note
    assert plan.useless == ()
    assert not any(
        "worst published" in each
        for each in ask("glm-4.5-air", dataclasses.replace(machine, link=None), Workload(32768), Parallel(4)).notes
    )
    assert not any("worst published" in each for each in ask("gpt-oss-120b", machine, Workload(32768), Parallel(4)).notes)


def test_a_plan_slower_than_a_cpu_engine_is_useless():
    fast_host = dataclasses.replace(roomy("1x5090"), host_gbps=2000)
    slower = ask("gpt-oss-120b", fast_host, num_resident=16)
    (reason,) = slower.useless
    best = max(speed.decode_tokens_s for speed in slower.speeds if speed.requests == 2)
    assert f"{slower.speeds[-1].cpu_engine_tokens_s:.1f} tok/s against {best:.1f} at the best hit rate (2 at once)" in reason
    assert ask("gpt-oss-120b", roomy("1x5090"), num_resident=16).useless == (), "a desktop's memory is slower"
    unknown = dataclasses.replace(fast_host, host_gbps=0)
    assert ask("gpt-oss-120b", unknown, num_resident=16).useless == ()
    assert "CPU engine, for comparison" not in planner.render(ask("gpt-oss-120b", unknown, num_resident=16))
    assert "2000 GB/s x 0.5" in planner.render(slower)


def test_one_memory_gains_nothing_from_offloading():
    refused = ask("glm-4.5-air", "1xSPARK")
    assert refused.problems[0].endswith(f"headroom-gb allow; {ONE_MEMORY}")
    assert not refused.needs
    forced = ask("gpt-oss-120b", dataclasses.replace(preset("1xSPARK"), host_bytes=64 * GIB), num_resident=64)
    assert forced.useless[0].startswith("GPU and CPU share one memory")
    assert ask("gpt-oss-120b", "1xSPARK").useless == (), "it fits whole"


def test_an_integrated_gpu_has_what_is_available_of_the_hosts_memory(monkeypatch):
    monkeypatch.setattr("sglang_uvm_offload.plan.machine.host_available", lambda: 106 * GIB)
    seen = of_gpus([("NVIDIA Thing", 119 * GIB)], integrated=True)
    assert (seen.one_memory, seen.pool_bytes, of_gpus([("NVIDIA Thing", 119 * GIB)]).one_memory) == (True, 106 * GIB, False)
    machine = dataclasses.replace(seen, link_gbps=100, hbm_gbps=100, tflops=100)
    assert ask("gpt-oss-120b", machine).num_resident == 128, "it fits whole"
    assert ask("gpt-oss-120b", machine, num_resident=64).fits, "and once if a part is offloaded"
    for residents in (0, 48):
        refused = ask("glm-4.5-air", machine, num_resident=residents)
        assert not refused.fits
        assert refused.problems[0].endswith(ONE_MEMORY)


# The number of residents that a budget holds


@pytest.mark.parametrize("wanted", [0, 4, 8, 12, 16])
def test_a_plan_keeps_exactly_as_many_as_the_budget_holds(checkpoints, wanted):
    """Experts of 512 KiB and 256 KiB in two tensors a layer: a block of 2 MiB holds 4 of one and 8 of the other. The budget is
    made to hold so many blocks, and then a byte less."""
    shape = shape_of(checkpoints("qwen3_moe", expert_size=512))
    blocks = 3 * (math.ceil(wanted / 4) + math.ceil(wanted / 8))
    cache = 1024 * 3 * 2 * 2 * 64 * 2 + 1024 * 4
    room = shape.total_bytes - shape.expert_bytes + cache + blocks * BLOCK_BYTES + (128 << 20)
    free, machine = 23 * GIB, Machine("one", 1, 24 * GIB, 64 * GIB, 0, 0, 0, source="")
    context = int(Assumptions().context_gib * GIB)

    def kept(fraction: float) -> int | None:
        reserve = Reserve(fraction, 1.0, free_vram_bytes=free + context, stream_gb=0)
        return planner.plan(shape, machine, Workload(1024), Parallel(), reserve).num_resident

    fraction = room / free + 1 / 24
    assert kept(fraction + 1e-6) == wanted
    fewer = kept(fraction - 1e-6)
    assert fewer is None if wanted == 0 else fewer is not None and fewer < wanted


def test_fewer_drafts_than_are_usually_accepted_need_no_second_flag(capsys):
    drafting = ["--speculative", "--speculative-num-draft-tokens", 2]
    assert run(MODELS / "deepseek-v3.json", "--machine", "8xH200", *drafting) == 0
    assert "accepted_tokens 2," in capsys.readouterr().out
