"""torch's bound, over the stand-in driver: what it may take, and that it frees its cache at the bound."""

from __future__ import annotations

import pytest
from standin.run import Standin

from sglang_uvm_offload.plugin.rank.vram_limits import torch_bytes

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("free", "headroom", "more"),
    [(8 * GIB, GIB, 7 * GIB), (8 * GIB, 0, 8 * GIB), (GIB, GIB, GIB // 2), (0, GIB, 0), (3 * GIB, 2 * GIB, 3 * GIB // 2)],
)
def test_torch_may_take_what_is_free_but_for_the_headroom_or_half(free, headroom, more):
    assert torch_bytes(5 * GIB, free, headroom) == 5 * GIB + more


BOUNDED = """
    import logging
    from sglang_uvm_offload.plugin.rank.vram_limits import bound_torch
    logging.basicConfig(level=logging.INFO)
    kept = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
"""


def test_at_the_bound_torch_frees_what_it_has_cached(standin: Standin):
    """torch has half a GiB of 4; 3.5 are free, and 1 of them is headroom."""
    ran = standin.run(
        BOUNDED
        + """
    bound_torch(1.0)
    for mib in (1000, 1001, 1002, 1003):
        del_me = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
        del del_me
    print(json.dumps([torch.cuda.memory_reserved(), len(torch.cuda.memory_snapshot())]))
    """,
        vram=4 * GIB,
    )
    reserved, _ = ran.said
    assert reserved <= 3 * GIB
    assert [call for call in ran.named("cudaFree") if not call["managed"]], "a cached block went back to the driver"
    assert "torch's allocator is limited to 3.00 GiB" in ran.err


def test_what_torch_may_take_it_gets_and_no_more(standin: Standin):
    ran = standin.run(
        BOUNDED
        + """
    bound_torch(1.0)
    more = torch.empty(2500 << 20, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    except RuntimeError:  # out of memory, of which the stand-in cannot say more
        print(json.dumps("refused"))
    """,
        vram=4 * GIB,
    )
    assert ran.said == "refused"


def test_a_tighter_bound_stays(standin: Standin):
    ran = standin.run(
        BOUNDED
        + """
    torch.cuda.set_per_process_memory_fraction(0.25)
    bound_torch(1.0)
    print(json.dumps(torch.cuda.get_per_process_memory_fraction()))
    """,
        vram=4 * GIB,
    )
    assert ran.said == 0.25
