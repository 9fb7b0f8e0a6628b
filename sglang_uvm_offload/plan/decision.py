"""What to do with a model on a machine: one sentence, and the speeds that it rests on."""

from __future__ import annotations

from sglang_uvm_offload.plan.kv_cache import FP8
from sglang_uvm_offload.plan.outcome import Plain, Plan
from sglang_uvm_offload.plan.plain import HIGHEST_FRACTION
from sglang_uvm_offload.plan.text_table import between, counted
from sglang_uvm_offload.plan.verdict import slower_than_a_cpu, useless_on_a_slow_link

CPU_ENGINE = "llama.cpp or KTransformers, which compute the experts on the CPU"


def decision(plan: Plan) -> str:
    """The advice, and below it the comparison."""
    return "\n".join(filter(None, [_advice(plan), _comparison(plan)]))


def _advice(plan: Plan) -> str:
    if plan.plain and not plan.offloads and plan.fits:
        return "Use plain SGLang: every expert fits in VRAM."
    if plan.plain and plan.num_resident != plan.num_experts:
        return f"Use plain SGLang with --mem-fraction-static {plan.plain.mem_fraction_static:g}."
    if not plan.fits:
        return "It does not fit." + (" Any one of the changes below is enough." if plan.needs else "")
    if plan.machine.one_memory and plan.useless:
        return "Do not offload here: GPU and CPU share one memory. Use a smaller quantisation, or a larger machine."
    if slower_than_a_cpu(plan):
        return f"Use {CPU_ENGINE}."
    if plan.useless:
        return f"Do not use this plan, too few experts fit: use a smaller quantisation, more VRAM, or {CPU_ENGINE}."
    if useless_on_a_slow_link(plan):
        return f"Use this plan if your link is a fast one of its kind; over a slow one use {CPU_ENGINE}."
    return "Use this plan."


def _comparison(plan: Plan) -> str:
    """Whether plain SGLang holds the model, and decoding speeds with all requests of the workload."""
    if not plan.ranks:
        return ""
    out = [_plain(plan)]
    if plan.offloads and plan.speeds_of_all:
        low = min(speed.least.decode_tokens_s for speed in plan.speeds_of_all)
        high = max(speed.decode_tokens_s for speed in plan.speeds_of_all)
        out.append(f"Offloaded with --mem-fraction-static {plan.mem_fraction_static:g}: {_rate(low, high)}.")
        if cpu := plan.cpu_engine_tokens_s:
            out.append(f"An engine on the CPU with as many experts in VRAM: about {_rate(cpu, cpu)}.")
    if smaller := plan.plain_fp8:
        flags = f"--kv-cache-dtype {FP8} --mem-fraction-static {smaller.mem_fraction_static:g}"
        out.append(f"Or plain SGLang with {flags}{_speed(smaller)}.")
    if plan.speeds_of_all or any(plain.decode_tokens_s for plain in (plan.plain, plan.plain_fp8) if plain):
        out.append(f"Predicted decoding with {counted(plan.workload.requests, 'request')}.")
    return " ".join(out)


def _plain(plan: Plan) -> str:
    if plan.plain is None:
        most = max(plan.mem_fraction_static, HIGHEST_FRACTION)
        return f"The model does not fit in VRAM with plain SGLang, even with --mem-fraction-static {most:g}."
    return f"Plain SGLang holds it whole with --mem-fraction-static {plan.plain.mem_fraction_static:g}{_speed(plan.plain)}."


def _speed(plain: Plain) -> str:
    rate = plain.decode_tokens_s
    return f": {_rate(rate, rate)}" if rate else ""


def _rate(low: float, high: float) -> str:
    return f"{between(low, high, '.0f' if low >= 10 else '.1f')} tok/s"
