"""Whether a plan that fits is worth serving."""

from __future__ import annotations

from sglang_uvm_offload.plan.outcome import Plan, Speed
from sglang_uvm_offload.residency.budget import LEAST_RESIDENTS, ONE_MEMORY


def uselessness(plan: Plan) -> tuple[str, ...]:
    """Reasons not to serve with this plan; empty if there are none or nothing is offloaded."""
    if plan.num_resident in (None, plan.num_experts):
        return ()
    rows, what = plan.rows, "residents and slots" if plan.slots else "residents"
    out = []
    if plan.machine.one_memory:
        out.append(ONE_MEMORY)
    if rows == 0:
        out.append("no expert is in VRAM: every step reads all its experts over the link")
    elif rows < LEAST_RESIDENTS * plan.top_k:
        out.append(
            f"{rows} {what} are fewer than twice the {plan.top_k} experts that a token uses: a step reads most of its experts "
            "over the link"
        )
    best = _best(plan)
    if best and _slower_than_a_cpu(best):
        out.append(_faster_on_a_cpu(best))
    return tuple(out)


def useless_on_a_slow_link(plan: Plan) -> str:
    """The reason not to serve with this plan over the slowest published link of its kind; empty if there is none, or if the
    plan is useless over any link."""
    best = _best(plan)
    if best is None or plan.num_resident in (None, plan.num_experts) or _slower_than_a_cpu(best):
        return ""
    return (
        f"over the slowest published link of this kind, {_faster_on_a_cpu(best.least)}"
        if _slower_than_a_cpu(best.least)
        else ""
    )


def slower_than_a_cpu(plan: Plan) -> bool:
    """Whether an engine on the CPU is faster than the fastest prediction."""
    best = _best(plan)
    return best is not None and _slower_than_a_cpu(best)


def _slower_than_a_cpu(speed: Speed) -> bool:
    return 0 < speed.cpu_engine_step_s < speed.decode_step_s


def _faster_on_a_cpu(speed: Speed) -> str:
    return (
        f"an engine that computes the experts on the CPU would be faster: {speed.cpu_engine_tokens_s:.1f} tok/s against "
        f"{speed.decode_tokens_s:.1f} at the best hit rate ({speed.requests} at once)"
    )


def _best(plan: Plan) -> Speed | None:
    """The fastest prediction for all requests of the workload."""
    return min(plan.speeds_of_all, key=lambda speed: speed.decode_step_s, default=None)
