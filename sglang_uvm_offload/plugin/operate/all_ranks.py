"""Asks every rank of this node, from a process that serves HTTP, through SGLang's ``set_internal_state``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from msgspec.structs import astuple
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.runtime_context import get_parallel

from sglang_uvm_offload import __version__
from sglang_uvm_offload.plugin import compat
from sglang_uvm_offload.plugin.operate.rank_files import RankFiles
from sglang_uvm_offload.residency.status import OffloadStatus

STEP_SECONDS = 60.0
"""How long a message waits for the first rank, which answers after the step at hand."""
RANK_SECONDS = 10.0
"""How long a status then waits for the other ranks of this node."""
SAVE_SECONDS = 30.0
"""How long a request waits for saves."""

_late: set[asyncio.Task[Any]] = set()
"""Messages whose answer nobody waits for any more; the event loop keeps only weak references."""


class Unanswered(Exception):
    """No rank answers, one could not make its status, or no temporary folder can be written to."""


async def deliver(manager: Any, message: dict[str, int]) -> None:
    """Returns once the first ranks have the message. A request of SGLang's cannot be cancelled: the next one would take its
    answer for its own. Raises ``Unanswered``."""
    request = asyncio.create_task(manager.set_internal_state(SetInternalStateReq(server_args=message)))
    _late.add(request)
    request.add_done_callback(_late.discard)
    done, _ = await asyncio.wait({request}, timeout=STEP_SECONDS)
    if not done:
        raise Unanswered(f"no rank has answered within {STEP_SECONDS:g} s: a step takes longer, or a rank hangs")
    request.result()


async def status_of(manager: Any) -> OffloadStatus:
    """The status of all ranks. Raises ``Unanswered``."""
    total = compat.num_ranks()
    with contextlib.ExitStack() as stack:
        try:
            files = stack.enter_context(RankFiles())
        except OSError as error:
            raise Unanswered(f"ranks answer in a folder for temporary files, set by TMPDIR: {error}") from error
        await deliver(manager, files.message())
        end = time.monotonic() + RANK_SECONDS
        while len(files) < total // get_parallel().nnodes and time.monotonic() < end:
            await asyncio.sleep(0.005)
        found = files.read()
    ranks = [rank for rank in found if rank is not None]
    if len(ranks) < max(len(found), 1):
        raise Unanswered("a rank could not make its status; its log has the reason")
    return OffloadStatus(__version__, sorted(ranks, key=lambda rank: astuple(rank.rank)), total - len(ranks))


async def saved(manager: Any) -> OffloadStatus:
    """The status when all saves have ended, or after ``SAVE_SECONDS``. Raises ``Unanswered``."""
    end = time.monotonic() + SAVE_SECONDS
    status = await status_of(manager)
    while any(save.under_way for rank in status.ranks for save in rank.saves) and time.monotonic() < end:
        await asyncio.sleep(0.1)
        status = await status_of(manager)
    return status
