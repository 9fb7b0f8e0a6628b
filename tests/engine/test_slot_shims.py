"""The CPU's stand-in for SGLang's Triton MoE functions computes from slot rows as those do, and without slots as ever."""

from __future__ import annotations

from statistics import median

import pytest
from checkpoints import Checkpoints
from nursery import Nursery
from serving import Engines, Result, assert_offloaded, assert_same_answers

PROGRAM = """
    import torch
    from types import SimpleNamespace
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang_uvm_offload.plugin.slots.triton import TritonSlotSeam
    seam = TritonSlotSeam()
    seam.install(HookRegistry.register)
    load_plugins()
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    fused_moe_triton_config.get_exec = lambda: SimpleNamespace(deterministic=deterministic)
    E, S, K, H, I = 8, 3, 2, 32, 16
    HELD = {3: E, 6: E + 2}

    class Slots:
        num_rows, rewritten = E + S, 0

        def align(self, *given):
            pass

        def await_fills(self):
            return False

        def resolve(self, ids, lists, later):
            used = lists.blocks[: int(lists.padded) // lists.block_size]
            assert used.tolist() == sorted(used.tolist())
            for at, expert in enumerate(used.tolist()):
                used[at] = HELD.get(expert, expert)
            self.rewritten += int((used >= E).sum())

    def slotted(tensor):
        grown = torch.full((E + S, *tensor.shape[1:]), 99, dtype=tensor.dtype)
        for expert in set(range(E)) - set(HELD):
            grown[expert] = tensor[expert]
        for expert, row in HELD.items():
            grown[row] = tensor[expert]
        # A storage of the experts alone, as SGLang is given: nothing of torch reaches what lies behind.
        kept.append(grown)
        own = memoryview(grown[:E].contiguous().view(torch.uint8).numpy())
        return torch.frombuffer(own, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)

    def expected(x, w1, w2, s1, s2, b1, b2, weights, ids):
        out = torch.zeros(x.shape)
        for expert in range(E):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            if token.numel():
                gate, up = linear(x[token].float(), w1[expert].float() * s1[expert], b1[expert]).chunk(2, -1)
                hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype)
                one = linear(hidden.float(), w2[expert].float() * s2[expert], b2[expert])
                out.index_add_(0, token, one * weights[token, choice].float().unsqueeze(1))
        return out.to(x.dtype)

    kept, linear = [], torch.nn.functional.linear
    slots = Slots()
    random = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=random)
    integers = lambda *shape: torch.randint(-100, 100, shape, generator=random, dtype=torch.int8)
    own = [integers(E, 2 * I, H), integers(E, H, I), draw(E, 2 * I, 1) / 50, draw(E, H, 1) / 50, draw(E, 2 * I), draw(E, H)]
    for tokens in (1, 5, 70):
        for absent in (False, True):
            x, weights = draw(tokens, H).bfloat16(), torch.rand(tokens, K, generator=random)
            ids = torch.stack([torch.randperm(E, generator=random)[:K] for _ in range(tokens)]).int()
            ids[0] = torch.tensor([3, -1 if absent else 1])
            config = MoeRunnerConfig(num_experts=2 * E, num_local_experts=E, inplace=tokens == 5)
            def run(w1, w2, s1, s2, b1, b2):
                given = dict(b1=b1, b2=b2, use_int8_w8a8=True, per_channel_quant=True, w1_scale=s1, w2_scale=s2)
                return fused_moe.fused_experts(x.clone(), w1, w2, StandardTopKOutput(weights, ids, None), config, **given)
            plain = run(*own)
            assert torch.equal(plain, expected(x, *own, weights, ids)), (tokens, absent)
            views = [slotted(tensor) for tensor in own]
            assert not torch.equal(run(*views), plain)
            slots.row_bytes = {view.data_ptr(): view.stride(0) * view.element_size() for view in views}
            seam.find = dict.fromkeys(slots.row_bytes, slots).get
            assert torch.equal(run(*views), plain), (tokens, absent)
            seam.find = lambda address: None
    assert slots.rewritten >= 6
    print("equal")
"""


def test_the_stand_in_computes_from_slot_rows_bit_by_bit(sglang: Nursery) -> None:
    ended = sglang.run(PROGRAM)
    assert ended.out.endswith("equal\n"), ended.err


def typical_difference(one: Result, other: Result) -> float:
    """Compares the log-probabilities of the prompts' tokens. Two kernels round differently, so that where two experts or tokens
    are nearly alike, one or the other is chosen, on some processors only (``ATEN_CPU_CAPABILITY=default`` with
    ``ONEDNN_MAX_CPU_ISA=SSE41`` acts as such a one). Most tokens are far from that."""
    pairs = zip(one.answers, other.answers, strict=True)
    tokens = [pair for mine, theirs in pairs for pair in zip(mine.input_logprobs, theirs.input_logprobs, strict=True)]
    return median(abs(a - b) for a, b in tokens if a is not None and b is not None)


GPT_OSS = pytest.mark.since("0.5.22", "it asks Triton for a GPU when it loads gpt-oss")


@pytest.mark.parametrize(
    ("family", "flags"), [("qwen3_moe", {}), pytest.param("gpt_oss", {"attention_backend": "triton"}, marks=GPT_OSS)]
)
def test_unquantised_experts_take_the_triton_way_where_a_test_asks_for_it(
    family: str, flags: dict[str, str], checkpoints: Checkpoints, engines: Engines
) -> None:
    env = {"SHIM_EXPERTS": "triton"}
    flags = {**flags, "moe_runner_backend": "triton", "log_level": "warning"}
    native = engines.baseline(checkpoints(family), **flags)
    off = engines.baseline(checkpoints(family), env=env, **flags)
    on = engines.run(checkpoints(family), env=env, expert_offload_num_resident=4, **flags)
    assert_offloaded(on.server_info)
    assert_same_answers(on, off)
    assert typical_difference(off, native) < 0.1
    assert "Config file not found" in off.log, "SGLang looked for no tile configuration"
    assert "Config file not found" not in native.log
