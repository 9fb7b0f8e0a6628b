"""Plans: they satisfy their own constraints, agree with SGLang's rules, and say what is missing."""

import dataclasses
import json
import re

import pytest
from builders.plans import MODELS, case, machine, model, planned, run
from builders.true_shape import config_folder

from sglang_uvm_offload.flags import config_flag
from sglang_uvm_offload.memory.host_ram import host_margin
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.plan import sglang_memory
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Parallel, Reserve, Workload
from sglang_uvm_offload.plan.kv_cache import KvShape
from sglang_uvm_offload.plan.machine import GIB, describe, preset
from sglang_uvm_offload.plan.planner import plan, render
from sglang_uvm_offload.plan.routing_curves import hit_rates
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.residency.budget import ONE_MEMORY, Division
from sglang_uvm_offload.residency.slot_split import Slots

NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
TP8 = Parallel(tp=8)
QWEN = "qwen3-235b-a22b"


# What fits


@pytest.mark.slow
@pytest.mark.parametrize("where", ["1x5090", "1xSPARK", "4x4090", "8xH20"])
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_satisfies_its_own_constraints(name, where):
    asked = case(name, preset(where))
    found = plan(asked)
    assert found.fits == (not found.problems)
    if not found.fits:
        assert not found.flags
        assert not found.speeds
        return
    assert asked.division == Division(found.num_resident, 0, found.stream_buffers)
    for rank in found.ranks:
        assert 0 <= rank.used_bytes <= rank.budget_bytes < found.machine.vram_bytes
    assert found.host_needed <= found.machine.host_bytes
    if found.num_resident < found.num_experts:
        reserve = Reserve(stream_gb=found.ranks[0].stream_bytes / GIB)
        assert not dataclasses.replace(asked, reserve=reserve, num_resident=found.num_resident + 1).fits
        assert f"--expert-offload-num-resident {found.num_resident}" in found.flags
    for speed in found.speeds:
        assert 0 < speed.decode_ratio <= 1
        assert 0 < speed.prefill_tokens_s <= speed.resident_prefill_tokens_s


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b", QWEN])
def test_more_vram_never_means_fewer_residents(name):
    found = []
    for vram in (24, 48, 96, 192, 288):
        gpus = 1 if name == "gpt-oss-120b" else 8
        where = machine(gpus=gpus, vram_bytes=vram * GIB)
        residents = planned(name, where, given={"mem_fraction_static": 0.85}).num_resident
        found.append(-1 if residents is None else residents)
    assert found == sorted(found)
    assert found[0] < found[-1] == model(name).num_experts


def test_more_context_requests_or_headroom_never_mean_more_residents():
    base = planned("glm-5-fp8").num_resident
    longer = planned("glm-5-fp8", context_length=65536).num_resident
    more = planned("glm-5-fp8", requests=64).num_resident
    spacious = planned("glm-5-fp8", given={"headroom_gb": 8}).num_resident
    drafting = planned("glm-5-fp8", speculative=True).num_resident
    smaller_keys = planned("glm-5-fp8", context_length=65536, kv_cache_dtype="fp8_e4m3").num_resident
    assert max(longer, more, spacious, drafting) < base
    assert longer < smaller_keys < base


def test_the_bytes_of_deepseek_v3_by_hand():
    """8 ranks: an expert's three matrices of 7168 x 2048 in FP8, cut in 8; 58 layers; each tensor whole 2 MiB blocks."""
    found = planned(requests=1)
    (rank,) = found.ranks
    experts = found.num_resident * 58 * 3 * 7168 * 2048 // 8
    assert experts <= rank.resident_bytes <= experts + 58 * 2 * BLOCK_BYTES
    rest = (256 - found.num_resident) * 58 * 3 * 7168 * 2048 // 8
    assert abs(rank.host_bytes - rest) < 58 * 2 * BLOCK_BYTES
    slots = 8192 * 61 * (512 + 64) * 2
    assert rank.kv_bytes == slots + 8192 * 4, "and 4 bytes a token for the table of slots"
    layers = model().layers
    divided = sum(layer.attention + layer.feed_forward for layer in layers) + 2 * 129280 * 7168 * 2
    scales = 58 * 256 * 3 * (7168 // 128) * (2048 // 128) * 4
    whole = sum(layer.replicated for layer in layers) + 7168 * 2
    assert rank.plain_weights == pytest.approx((divided + scales) / 8 + whole, abs=8 * 61)
    # SGLang: 10 GiB or more stay free on a GPU of this size, and one for the headroom.
    assert rank.budget_bytes < found.machine.vram_bytes - 11 * GIB


def test_weights_beside_experts_by_hand():
    """Qwen3-235B on 8 ranks: 4 key-value heads cannot be cut in 8, routers and norms are whole on each."""
    attention, keys_values = 2 * 64 * 128 * 4096 * 2, 2 * 4 * 128 * 4096 * 2
    whole, vocabulary = (128 * 4096 + 2 * 4096 + 2 * 128) * 2, 2 * 151936 * 4096 * 2
    by_hand = 94 * (attention // 8 + keys_values // 4 + whole) + vocabulary // 8 + 4096 * 2
    assert planned(QWEN).ranks[0].plain_weights == by_hand


def test_drafting_layers_keep_a_cache_of_their_own_and_their_experts_in_vram_or_host_ram():
    at = Division(100, 0, 0)
    plain = case()
    whole, half = (case(speculative=True, draft_num_resident=number) for number in (None, 128))
    assert [each.kv_token_bytes(0) for each in (plain, whole)] == [61 * 576 * 2, 62 * 576 * 2]
    joining, expert = 7168 * 2 * 7168 * 2, 3 * 7168 * 2048 // 8  # the first is whole on every rank
    assert whole.plain_bytes[0] - plain.plain_bytes[0] == pytest.approx(256 * expert + joining, rel=0.05)
    assert whole.plain_bytes[0] - half.plain_bytes[0] == 128 * expert
    for moves, offloaded in ((False, 128), (True, 256)):
        assert half.host_need(at, moves).experts - whole.host_need(at, moves).experts == 8 * offloaded * expert


def test_host_ram_is_that_of_all_ranks_their_processes_and_the_margin():
    found = planned(QWEN, parallel=Parallel(tp=4, dp=2))
    experts = found.ranks[0].host_bytes * 8
    assert found.host_needed == experts + 8 * 4 * GIB + host_margin(experts)


def test_parts_that_ranks_hold_whole():
    """Biases of outputs, and shared experts with DeepEP. Kernels of MXFP4 round 720 hidden units up to 768 and a hidden size
    of 3072."""
    oss = case("gpt-oss-120b", "4x4090")
    layer = model("gpt-oss-120b").layers[0]
    sizes = dict(zip((part.name for part in layer.experts), (nbytes for nbytes, _ in oss.expert_tensors(layer)), strict=True))
    assert sizes["w2.weight"] == 768 * 3072 // 2
    assert sizes["w2.weight_bias"] == 2880 * 2
    assert sizes["w13.weight_bias"] == 2 * 2880 * 2 // 4
    shared = [layer.feed_forward for layer in model().layers if layer.experts]
    split, whole = (case(parallel=Parallel(tp=8, ep=8, shared_whole=on)).plain_bytes[0] for on in (False, True))
    assert whole - split == sum(shared) - sum(-(-nbytes // 8) for nbytes in shared)


def test_pipeline_stages_hold_their_own_layers_and_the_tightest_decides():
    found = planned(QWEN, parallel=Parallel(tp=2, pp=4))
    assert found.ranks[2].resident_bytes > found.ranks[1].resident_bytes
    assert found.ranks[0].plain_weights > found.ranks[1].plain_weights, "the first stage has the embedding"
    assert min(rank.spare_bytes for rank in found.ranks) >= 0
    text = render(found, explain=True)
    assert [column in text for column in ("stage 0 ", "stage 1 ", "stage 2 ", "stage 3")] == [True] * 4


def test_attention_in_groups_keeps_less_cache_on_a_rank_and_more_weights():
    groups = Parallel(tp=8, dp=8, dp_attention=True)
    own_heads = dataclasses.replace(groups, dp_lm_head=True)
    tensor, grouped, headed = (planned(requests=64, parallel=each) for each in (TP8, groups, own_heads))
    assert grouped.kv_tokens == tensor.kv_tokens // 8
    assert grouped.ranks[0].plain_weights > tensor.ranks[0].plain_weights + 10 * GIB
    assert headed.ranks[0].plain_weights - grouped.ranks[0].plain_weights == model().head - model().head // 8


def test_a_model_that_fits_whole_needs_no_offloading():
    found = planned("gpt-oss-120b", "1xH200")
    assert (found.num_resident, found.stream_buffers) == (128, 0)
    assert any("not needed" in note for note in found.notes)
    assert not any("expert-offload" in flag for flag in found.flags)
    assert all(speed.decode_ratio == 1 and not speed.missed_bytes for speed in found.speeds)
    assert "stream buffer," not in render(found)


def test_the_parts_of_the_memory_table_sum_up_to_the_gpu():
    for where in ("4x4090", "1x5090"):
        found = planned("glm-4.5-air", where)
        parts = dataclasses.astuple(found.vram)
        assert sum(parts) == found.machine.vram_bytes
        assert min(parts) >= 0
        assert found.vram.granted == found.ranks[0].budget_bytes
    vram = case("glm-4.5-air", "4x4090", given={"mem_fraction_static": 0.8, "free_vram_bytes": 20 * GIB}).vram
    assert vram.in_use == preset("4x4090").vram_bytes - 20 * GIB
    assert vram.sglang == pytest.approx(0.2 * (20 * GIB - vram.runtime), abs=1)


@pytest.mark.parametrize("cache", [{"hicache_bytes": GIB}, {"hicache_ratio": 2.0}])
def test_a_hierarchical_cache_takes_host_ram_and_what_sglang_leaves_free_beside_it(cache):
    none, found = (case(parallel=Parallel(tp=4, dp=2), given=given) for given in ({}, cache))
    more = found.host_need(Division(10, 0, 0)).total - none.host_need(Division(10, 0, 0)).total
    assert more == 8 * (GIB if "hicache_bytes" in cache else 2 * found.kv_bytes(0)) + 10 * GIB


# SGLang's own rules

SIZES = (16384, 24564, 32607, 49140, 81559, 97871, 143771, 183359)


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("gpu_mib", "tp", "pp", "dp", "latent", "requests", "chunk"),
    [
        *((size, 1, 1, 1, False, None, None) for size in SIZES),
        *((size, 8, 1, 8, True, 64 if size > 90000 else None, None) for size in SIZES),
        *((size, 4, 2, 1, False, 3, 1024) for size in (24564, 81559)),
        *((size, 2, 1, 1, True, None, 16384) for size in (32607, 97871)),
    ],
)
def test_sglang_chooses_what_the_plan_says(monkeypatch, gpu_mib, tp, pp, dp, latent, requests, chunk):
    from builders.launch import resolved
    from sglang.srt.arg_groups import memory_hook

    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda _: gpu_mib)
    cfg = resolved(
        model_path=str(config_folder("deepseek-ai/DeepSeek-V3" if latent else "Qwen/Qwen3-30B-A3B")),
        **{"tp_size": tp, "pp_size": pp, "dp_size": dp, "enable_dp_attention": dp > 1, "attention_backend": "fa3"},
        **{"max_running_requests": requests, "chunked_prefill_size": chunk},
        **dict.fromkeys(("cuda_graph_backend_decode", "cuda_graph_backend_prefill"), "full"),
    )
    ours = sglang_memory.defaults(
        gpu_mib << 20,
        tp=tp,
        pp=pp,
        dp_attention=dp,
        latent_attention=latent,
        max_running_requests=requests,
        chunked_prefill_size=chunk,
    )
    assert ours.chunked_prefill_size == cfg.chunked_prefill_size * dp, "the flag's, which groups share"
    assert ours.mem_fraction_static == cfg.mem_fraction_static


@pytest.mark.sglang
@pytest.mark.parametrize(("layers", "pp"), [(61, 1), (61, 4), (7, 7)])
def test_pipeline_stages_are_sglangs(layers, pp):
    from sglang.srt.distributed.utils import get_pp_indices

    theirs = [get_pp_indices(layers, rank, pp) for rank in range(pp)]
    assert [(stage.start, stage.stop) for stage in sglang_memory.pipeline_stages(layers, pp)] == theirs


@pytest.mark.parametrize(
    ("name", "attn_tp", "itemsize", "nbytes"),
    [
        (QWEN, 1, 2, 192_512),  # 2 x 94 layers x 4 heads x 128 x 2 bytes
        (QWEN, 8, 2, 48_128),  # a head each, kept twice
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


# What cannot be


def test_a_gpu_below_its_own_reserve_is_told_so():
    """One of 1 MiB has less than nothing free, and a share of it below 0: their product is not."""
    for vram in (2 * GIB, 1 << 20):
        refused = planned("gpt-oss-120b", machine("1x5090", vram_bytes=vram))
        assert "and 0.0 MiB are left of what --mem-fraction-static and --expert-offload-headroom-gb" in refused.problems[0]
        assert refused.problems[0].endswith("use more or larger GPUs")
        assert refused.needs


@pytest.mark.parametrize(
    ("name", "parallel", "work", "reason"),
    [
        ("deepseek-v3", Parallel(tp=16), {}, "need 16 GPUs, and the machine has 8"),
        ("deepseek-v3", Parallel(tp=8, ep=3), {}, "--ep-size 3: must divide --tp-size 8"),
        ("deepseek-v3", Parallel(tp=8, dp=3, dp_attention=True), {}, "must divide --tp-size 8"),
        ("deepseek-v3", Parallel(tp=0), {}, "must be 1 or more"),
        ("glm-4.5", Parallel(tp=5), {}, "do not divide the model's 96 heads"),
        ("glm-4.5", Parallel(tp=7, ep=7), {}, "does not divide the model's 160 experts"),
        (QWEN, TP8, {"context_length": 50000}, "--context-length 50000: the model allows 40960"),
        (QWEN, TP8, {"speculative": True}, "the checkpoint has no draft layers of its own to count"),
        ("deepseek-v3", TP8, {"speculative": True, "draft_num_resident": 257}, "--draft-num-resident 257: the model has 256"),
        ("deepseek-v3", TP8, {"draft_num_resident": 1}, "--draft-num-resident 1: has no effect without --speculative"),
        ("deepseek-v3", TP8, {"speculative": True, "draft_tokens": 1}, "--speculative-num-draft-tokens 1: drafts nothing"),
        ("deepseek-v3", TP8, {"speculative": True, "draft_tokens": 2}, "--accepted-tokens 2.5: a step with --speculative-num"),
    ],
)
def test_what_no_memory_would_mend_is_refused(name, parallel, work, reason):
    found = planned(name, parallel=parallel, **work)
    assert any(reason in problem for problem in found.problems)
    assert found.num_resident is None
    assert reason in render(found)


def test_blocks_of_scales_are_not_cut():
    """2048 hidden units in blocks of 128 go on 16 ranks, and not on 32."""
    many = machine(gpus=32)
    assert planned(on=many, parallel=Parallel(tp=16)).fits
    assert "blocks of 128 that share a scale" in planned(on=many, parallel=Parallel(tp=32)).problems[0]
    assert planned(on=many, parallel=Parallel(tp=32, ep=32)).fits


# A given number of residents


def test_a_given_number_that_does_not_fit_is_refused_with_the_most_that_does():
    most = planned(given={"stream_gb": 0}).num_resident
    fewer, refused = (planned(given={"num_resident": number}) for number in (100, most + 1))
    assert (fewer.num_resident, fewer.fits) == (100, True)
    assert "--expert-offload-num-resident 100" in fewer.flags
    (problem,) = refused.problems
    assert problem.startswith(f"--expert-offload-num-resident {most + 1}: ")
    assert problem.endswith(f"(for 2 requests of 8192 tokens); at most {most} residents fit")
    assert not refused.flags
    beyond = planned(given={"num_resident": 257})
    assert beyond.problems == ("--num-resident 257: the model has 256 experts a layer",)
    slots = planned(given={"num_resident": 250, "slots": Slots(10)})
    assert len(slots.problems) == 1
    assert not beyond.needs, "no other ranks help"
    assert not slots.needs


# What is shown


def test_the_report_says_what_it_rests_on():
    found = planned("glm-5-fp8", preset("8xH20"))
    text = render(found, explain=True)
    assert f"It fits: {found.num_resident} of 256 experts a layer resident" in text
    assert all(flag in text for flag in found.flags)
    assert "read rate 55 GB/s x 0.94, and at most a rank's share of host memory's 614.4 x 0.7: 51.7 GB/s" in text
    assert "slowest published read rate 35 GB/s: kernels on each GPU of a machine with eight H100" in text
    (assumed,) = [line for line in text.splitlines() if line.startswith("assumed: ")]
    assert all(f"{name} {value}" in assumed for name, value in dataclasses.asdict(found.assumptions).items())


def test_flags_to_paste_are_well_formed():
    found = planned("glm-4.5", context_length=16384, requests=3, speculative=True)
    words = dict(flag.split(" ", 1) for flag in found.flags)
    assert words["--max-running-requests"] == "3"
    prefix = "--expert-offload-"
    ours = {name.removeprefix(prefix).replace("-", "_"): value for name, value in words.items() if name.startswith(prefix)}
    ours["headroom_gb"] = float(ours["headroom_gb"])
    assert parse(ours).num_resident == found.num_resident


@pytest.mark.parametrize(
    ("given", "told"), [(None, "is not needed"), (256, "is not needed"), (100, "is needed for draft layers")]
)
def test_a_launch_that_offloads_draft_layers_alone_says_so(given, told):
    """Without N, its experts would stay in VRAM, which the plan has not room for."""
    found = planned(on="8xB200", speculative=True, draft_num_resident=given)
    assert found.num_resident == 256
    assert any(f"offloading {told}" in note for note in found.notes)
    flags = [flag for flag in found.flags if "num-resident" in flag or "num_resident" in flag]
    drafts = config_flag(draft_num_resident=100)
    assert flags == (["--expert-offload-num-resident 256", drafts] if given == 100 else [])


def test_the_flags_name_the_model_as_a_launch_takes_it(tmp_path):
    """A config.json is named by its folder, not by where its author had it, and quoted for the shell."""
    folder = tmp_path / "my models"
    folder.mkdir()
    config = json.loads((config_folder("Qwen/Qwen3-30B-A3B") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": "/home/author/step_9000"}))
    found = plan(Case(shape_of(folder / "config.json"), preset("1x4090"), Workload(8192), Parallel()))
    assert found.flags[0] == f"--model-path '{folder}'"
    assert f"\nmodel     {folder}: " in render(found)


def test_hit_rates_are_shown_as_a_range_with_their_source():
    found = planned("glm-5-fp8", preset("8xH20"))
    residency = found.num_resident / 256
    for requests in (1, 2):
        other, lowest, highest = (speed for speed in found.speeds if speed.requests == requests)
        rates = hit_rates("glm_moe_dsa", requests, residency)
        assert (other.hit_rate, lowest.hit_rate, highest.hit_rate) == (rates.other.rate, rates.lowest.rate, rates.highest.rate)
        assert residency < other.hit_rate < lowest.hit_rate < highest.hit_rate < 1
    text = render(found, explain=True)
    assert "lowest measured, 2 requests: residents chosen in a warm-up, 1 at once: dsv2lite-summary" in text
    assert "from dsv2lite-summary (DeepSeek-V2-Lite, 6 of 64 experts a token; deepseek-ai/ESFT" in text
    assert "gpt-oss" not in text, "another kind of model"
    given = planned("glm-5-fp8", hit_rate=0.97)
    assert {speed.hit_rate for speed in given.speeds} == {0.97}
    assert "measured routing" not in render(given, explain=True)


# The decision


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ("glm-5-fp8", "8xH20", {}),
            "Use this plan.\nThe model does not fit in VRAM with plain SGLang, even with --mem-fraction-static 0.9",
        ),
        (("gpt-oss-120b", "4x4090", {}), "Use plain SGLang with --mem-fraction-static 0.8.\nPlain SGLang holds it whole with "),
        ((QWEN, "8xH20", {}), "Use plain SGLang: every expert fits in VRAM.\nPlain SGLang holds it whole with "),
        (
            ("glm-4.5-air", "2x4090", {}),
            "Do not use this plan, too few experts fit: use a smaller quantisation, more VRAM, or ",
        ),
        (("glm-4.5-air", "4x4090", {}), "Use this plan"),
        (("kimi-k2", "1x5090", {}), "It does not fit. Any one of the changes below is enough."),
        (("glm-4.5-air", "1xSPARK", {}), "It does not fit.\n"),
        (("deepseek-v3", "8xH20", {"num_resident": 257}), "It does not fit.\n\n"),
    ],
)
def test_a_report_opens_with_what_to_do(asked, said):
    name, where, given = asked
    found = planned(name, preset(where), given={"slots": Slots(None), **given}, context_length=32768, requests=1)
    assert render(found).startswith(said)


def test_a_faster_cpu_engine_is_advised_and_on_a_slow_link_alone_as_well():
    fast_host = machine("1x5090", host_gbps=2000)
    slower = planned("gpt-oss-120b", fast_host, given={"num_resident": 16, "mem_fraction_static": 0.5})
    assert render(slower).startswith("Use llama.cpp or KTransformers, which compute the experts on the CPU.\n")
    where = preset("4x4090")
    found = planned("glm-4.5-air", where, context_length=32768, requests=1)
    assert render(found).startswith("Use this plan if your link is a fast one of its kind; over a slow one use llama.cpp or ")
    unknown = planned("glm-4.5-air", dataclasses.replace(where, link=None), context_length=32768, requests=1)
    assert render(unknown).startswith("Use this plan.\n")


def test_the_decision_compares_plain_sglang_offloading_and_a_cpu_engine():
    found = planned("gpt-oss-120b", preset("4x4090"), context_length=32768, requests=4)
    same = [speed for speed in found.speeds if speed.requests == 4]
    low, high = min(speed.least.decode_tokens_s for speed in same), max(speed.decode_tokens_s for speed in same)
    assert render(found).splitlines()[1] == (
        f"Plain SGLang holds it whole with --mem-fraction-static {found.plain.mem_fraction_static:g}: "
        f"{found.plain.decode_tokens_s:.0f} tok/s. Offloaded with --mem-fraction-static {found.mem_fraction_static:g}: "
        f"{low:.0f} to {high:.0f} tok/s. An engine on the CPU with as many experts in VRAM: about "
        f"{found.cpu_engine_tokens_s:.0f} tok/s. Predicted decoding with 4 requests."
    )
    assert low < high < found.plain.decode_tokens_s > found.cpu_engine_tokens_s


def test_an_fp8_kv_cache_is_named_where_only_that_makes_plain_sglang_fit():
    work = {"context_length": 32768, "requests": 4}
    found = planned("glm-4.5-air-awq", preset("4x4090"), **work)
    alone = planned("glm-4.5-air-awq", preset("4x4090"), **work, kv_cache_dtype="fp8_e4m3")
    smaller = found.plain_fp8
    assert found.plain is None
    assert smaller == alone.plain
    assert alone.plain_fp8 is None
    said = (
        f" Or plain SGLang with --kv-cache-dtype fp8_e4m3 --mem-fraction-static {smaller.mem_fraction_static:g}: "
        f"{smaller.decode_tokens_s:.0f} tok/s. Predicted decoding with 4 requests."
    )
    assert said in render(found)
    assert "fp8" not in render(planned("glm-4.5-air", preset("4x4090"), **work)), "half of the cache is not enough"


def test_the_explanation_says_what_the_cpu_engine_holds_and_reads():
    found = planned("gpt-oss-120b", preset("4x4090"), context_length=32768, requests=1)
    (line,) = (line for line in render(found, explain=True).splitlines() if line.startswith("CPU engine, for comparison"))
    assert f"with {found.rows} of 128 experts a layer in VRAM, if it reads the other active ones at " in line
    assert f"{found.machine.host_gbps:g} GB/s x {found.assumptions.cpu_efficiency}" in line


def test_the_report_says_how_many_experts_fit_and_how():
    def said(residents, slots):
        found = planned("deepseek-v3", preset("8xH20"), given={"num_resident": residents, "slots": Slots(slots)})
        (line,) = (line for line in render(found).splitlines() if line.startswith("It fits"))
        return line

    assert said(0, 64) == "It fits: VRAM for 64 of 256 experts a layer (25%), all as slots."
    assert said(32, 32) == "It fits: VRAM for 64 of 256 experts a layer (25%), 32 resident and 32 as slots."
    assert said(64, 0) == "It fits: 64 of 256 experts a layer resident (25%)."


def test_the_report_says_which_rate_of_host_ram_is_assumed():
    where = machine("4x4090", 256)
    shown = f"host RAM 256.00 GiB at {where.host_gbps:.0f} GB/s"
    assert f"{shown} (assumed; --host-gbps); tp 4" in render(planned("gpt-oss-120b", where))
    assert "host RAM 256.00 GiB at 90 GB/s; tp 4" in render(planned("gpt-oss-120b", describe(where, {"host_gbps": 90})))
    unknown = dataclasses.replace(where, host_gbps=0.0)
    assert "host RAM 256.00 GiB, its rate unknown (--host-gbps); tp 4" in render(planned("gpt-oss-120b", unknown))
    assert "GB/s; tp 1" in render(planned("glm-4.5-air", preset("1xGH200"))), "published"


def test_prefill_is_given_to_two_digits():
    text = render(planned("glm-4.5-air", preset("1xGH200"), context_length=32768, requests=1))
    assert re.search(r"  (\d\d0+ to )?\d\d0+ tok/s  \d+%", text), text


def test_plain_sglang_is_planned_as_it_would_be_launched():
    """At the smallest fraction that holds every expert, in hundredths; at the given one where that is enough."""
    asked = {"context_length": 32768, "requests": 1}
    found = planned("gpt-oss-120b", preset("4x4090"), **asked)
    whole = {"num_resident": 128, "headroom_gb": 0.0, "stream_gb": 0.0}
    least = round(found.plain.mem_fraction_static, 2)
    again, less = (
        planned("gpt-oss-120b", preset("4x4090"), given={**whole, "mem_fraction_static": share}, **asked)
        for share in (least, least - 0.01)
    )
    assert (again.fits, less.fits) == (True, False)
    assert found.plain.decode_tokens_s == again.speeds[0].decode_tokens_s
    assert found.plain.flags == again.flags
    assert not any("expert-offload" in flag for flag in found.plain.flags)
    given = planned("gpt-oss-120b", preset("4x4090"), given={"mem_fraction_static": 0.85}, **asked)
    assert given.plain.mem_fraction_static == 0.85
    drafting = planned("glm-4.5-air", "4xH200", speculative=True, draft_num_resident=10)
    assert drafting.plain is not None
    assert drafting.offloads


# Plans of no use


def test_a_useless_plan_is_called_useless():
    none, few, enough = (planned(given={"num_resident": number}) for number in (0, 15, 16))
    assert none.useless[0] == "no expert is in VRAM: every step reads all its experts over the link"
    assert few.useless[0].startswith("15 residents are fewer than twice the 8 experts that a token uses")
    assert enough.useless == ()
    text = render(none)
    assert "It fits: 0 of 256 experts a layer resident (0%).\nBut this plan is useless:\n  - no expert is in VRAM" in text
    assert "useless" not in render(enough)


def test_a_plan_that_a_cpu_engine_beats_on_a_slow_link_only_says_so():
    where = preset("4x4090")
    found = planned("glm-4.5-air", where, context_length=32768, requests=1)
    (note,) = [each for each in found.notes if "slowest published link" in each]
    best = max(found.speeds, key=lambda speed: speed.decode_tokens_s)
    assert note.startswith(
        "over the slowest published link of this kind, an engine that computes the experts on the CPU would be"
    )
    assert f"{best.least.cpu_engine_tokens_s:.1f} tok/s against {best.least.decode_tokens_s:.1f}" in note
    assert found.useless == ()
    unknown = planned("glm-4.5-air", dataclasses.replace(where, link=None), context_length=32768, requests=1)
    assert not any("slowest published" in each for each in unknown.notes)


def test_a_plan_slower_than_a_cpu_engine_is_useless():
    fast_host = machine("1x5090", host_gbps=2000)
    slower = planned("gpt-oss-120b", fast_host, given={"num_resident": 16})
    (reason,) = slower.useless
    best = max(speed.decode_tokens_s for speed in slower.speeds if speed.requests == 2)
    assert f"{slower.speeds[-1].cpu_engine_tokens_s:.1f} tok/s against {best:.1f} at the best hit rate (2 at once)" in reason
    assert "2000 GB/s x 0.5" in render(slower, explain=True)
    assert planned("gpt-oss-120b", "1x5090", given={"num_resident": 16}).useless == (), "a desktop's memory is slower"
    unknown = planned("gpt-oss-120b", dataclasses.replace(fast_host, host_gbps=0), given={"num_resident": 16})
    assert unknown.useless == ()
    assert slower.cpu_engine_tokens_s == slower.speeds[-1].cpu_engine_tokens_s > 0 == unknown.cpu_engine_tokens_s
    assert "CPU engine, for comparison" not in render(unknown, explain=True)


def test_one_memory_gains_nothing_from_offloading():
    refused = planned("glm-4.5-air", preset("1xSPARK"))
    assert refused.problems[0].endswith(f"headroom-gb allow; {ONE_MEMORY}")
    assert not refused.needs
    assert planned("glm-4.5-air", preset("1xSPARK"), given={"num_resident": 48}).problems[0].endswith(ONE_MEMORY)
    forced = planned("gpt-oss-120b", machine("1xSPARK", 64), given={"num_resident": 64})
    assert forced.useless[0].startswith("GPU and CPU share one memory")
    assert planned("gpt-oss-120b", preset("1xSPARK")).useless == (), "it fits whole"


# The command


def test_the_command_prints_a_plan_as_text_or_json(capsys):
    words = (MODELS / "glm-4.5-air.json", "--machine", "4x4090", "--requests", 2)
    assert run(*words) == 0
    assert "It fits" in capsys.readouterr().out
    assert run(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    expected = planned("glm-4.5-air", preset("4x4090"), given={"slots": Slots(None)}, context_length=32768)
    assert (found["num_resident"], found["parallel"]["tp"]) == (expected.num_resident, 4)
    assert found["ranks"][0]["slot_bytes"] > 0


def test_the_command_prints_the_flags_alone(capsys):
    words = (MODELS / "glm-4.5-air.json", "--machine", "4x4090")
    assert run(*words, "--json") == 0
    flags = json.loads(capsys.readouterr().out)["flags"]
    assert run(*words, "--flags-only") == 0
    assert capsys.readouterr().out == " ".join(flags) + "\n"
    assert run(MODELS / "kimi-k2.json", "--machine", "1x5090", "--flags-only") == 1
    out, err = capsys.readouterr()
    refused = planned("kimi-k2", preset("1x5090"), context_length=32768, requests=1)
    assert out == ""
    assert err.splitlines() == [*refused.problems, *(f"enough would be: {need}" for need in refused.needs)]


def test_formulas_and_sources_are_explained_on_request(capsys):
    words = (MODELS / "glm-5-fp8.json", "--machine", "8xH20", "--requests", 4)
    assert run(*words) == 0
    short = capsys.readouterr().out
    assert run(*words, "--explain") == 0
    explained = capsys.readouterr().out
    for detail in ("How this was computed:", "assumed: ", "memory of one GPU", "lowest measured"):
        assert (detail in short, detail in explained) == (False, True)
    assert len(short.splitlines()) < 32


def test_the_command_takes_a_machine_by_its_figures(capsys):
    figures = ("--gpus", 8, "--vram-gb", 96, "--host-gb", 1500, "--link-gbps", 55, "--hbm-gbps", 4000, "--tflops", 148)
    assert run(MODELS / "glm-5-fp8.json", *figures) == 0
    assert "8 GPUs of 96.00 GiB" in capsys.readouterr().out


def test_the_command_plans_with_what_the_flags_of_a_launch_say(capsys):
    def found(*words):
        assert run(MODELS / "deepseek-v3.json", "--machine", "8xH20", "--json", *words) == 0
        return json.loads(capsys.readouterr().out)

    sizes = [(), ("--stream-buffer-gb", "auto"), ("--stream-buffer-gb", "0"), ("--stream-buffer-gb", "1.5")]
    assert [found("--slots", 0, *words)["ranks"][0]["stream_buffers"] for words in sizes] == [2, 2, 0, 1]
    auto = found("--slots", "auto")
    assert auto["slots"] == Slots(None).of(auto["num_resident"] + auto["slots"], 256) > 0
    given = found("--slots", 30, "--num-resident", 50, "--host-gbps", 100)
    assert (given["num_resident"], given["slots"], given["machine"]["host_gbps"]) == (50, 30, 100)
    drafting = found("--speculative", "--speculative-num-draft-tokens", 2, "--read-efficiency", "0.5")
    assert (drafting["assumptions"]["accepted_tokens"], drafting["assumptions"]["read_efficiency"]) == (2, 0.5)


def test_the_command_says_what_is_wrong(capsys, tmp_path):
    assert run(MODELS / "kimi-k2.json", "--machine", "1x5090") == 1
    said, refused = capsys.readouterr().out, planned("kimi-k2", preset("1x5090"), context_length=32768, requests=1)
    assert refused.needs
    assert all(line in said for line in (*refused.problems, *refused.needs))
    assert "launch_server" not in said
    for words, error in (
        ((tmp_path, "--machine", "1x5090"), "cannot read"),
        ((MODELS / "kimi-k2.json", "--machine", "3xNOPE"), "--machine '3xNOPE'"),
        ((MODELS / "kimi-k2.json", "--gpus", 1, "--vram-gb", 80), "--host-gb, --link-gbps, --hbm-gbps, --tflops: not known"),
    ):
        assert run(*words) == 2
        assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--requests", value) for value in ("0", "many")),
        *(("--vram-gb", value) for value in ("nan", "-1", "0")),
        *(("--headroom-gb", "inf"), ("--hit-rate", "1.5"), ("--mem-fraction-static", "0")),
        *(("--num-resident", "-1"), ("--slots", "some"), ("--stream-buffer-gb", "two")),
    ],
)
def test_the_command_refuses_numbers_that_mean_nothing(capsys, flag, value):
    with pytest.raises(SystemExit):
        run(MODELS / "kimi-k2.json", "--machine", "8xH20", flag, value)
    assert f"argument {flag}: '{value}'" in capsys.readouterr().err
