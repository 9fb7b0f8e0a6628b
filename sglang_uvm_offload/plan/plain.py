"""Whether SGLang without offloading would hold the model."""

from __future__ import annotations

import dataclasses

from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.lookup_tables import MANAGED, VRAM
from sglang_uvm_offload.residency.slot_split import NO_SLOTS

HIGHEST_FRACTION = 0.9
"""The largest ``--mem-fraction-static`` to suggest: above it, too little is left for activations and CUDA graphs."""


def plain_case(case: Case) -> Case | None:
    """``case`` with every expert in VRAM and nothing of this plugin, at the case's ``--mem-fraction-static`` or the smallest
    higher one (up to ``HIGHEST_FRACTION``, in steps of 0.01) that VRAM allows; None if it does not fit."""
    steps = (hundredths / 100 for hundredths in range(1, round(100 * HIGHEST_FRACTION) + 1))
    fractions = [case.fraction, *(step for step in steps if step > case.fraction)]
    return next((plain for plain in (_plain(case, fraction) for fraction in fractions) if plain.fits), None)


def _plain(case: Case, fraction: float) -> Case:
    return dataclasses.replace(
        case,
        num_resident=case.model.num_experts,
        slots=NO_SLOTS,
        tables_in=VRAM if case.tables_in == MANAGED else case.tables_in,
        reserve=dataclasses.replace(case.reserve, mem_fraction_static=fraction, headroom_gb=0.0, stream_gb=0.0),
        workload=dataclasses.replace(case.workload, draft_num_resident=None),
    )
