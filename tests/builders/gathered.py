"""Makes what SGLang tells the ranks of data-parallel attention about a batch that they compute together."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from sglang.srt.managers.scheduler_components import dp_attn
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import common


class Local(NamedTuple):
    """A rank's own batch."""

    mode: ForwardMode
    rows: int


IDLE = Local(ForwardMode.IDLE, 0)


def gathered(ranks: Sequence[Local], own: int, a2a: str = "none", dense_tp_size: int | None = None) -> dict[str, object]:
    """Returns fields of rank ``own``'s ``ForwardBatch``, from SGLang's own exchange without its transport. ``dense_tp_size`` is
    ``--moe-dense-tp-size``, given with ``--enable-dp-lm-head``."""
    infos = [_info(rank, len(ranks)) for rank in ranks]
    sent = torch.cat([info._get_local_tensor("cpu") for info in infos])
    group = SimpleNamespace(active_ranks_cpu=torch.ones(len(ranks)))
    exec_config = SimpleNamespace(moe=SimpleNamespace(elastic_ep_backend=None))
    sizes = {"num_dp_ranks": len(ranks), "tp_size": len(ranks), "moe_dense_tp_size": dense_tp_size}
    batch = SimpleNamespace()
    with (
        get_parallel().override(tp_group=group, attn_dp_enabled=True, enable_dp_lm_head=dense_tp_size is not None, **sizes),
        mock.patch.object(common, "get_exec", return_value=exec_config),
        mock.patch.object(dp_attn, "exchange_sync_rows", lambda whole, row, group: whole.copy_(sent)),
    ):
        infos[own].all_gather("cpu", None)
        dp_attn._update_gather_batch(batch, infos[own], common.require_mlp_tp_gather(moe_a2a_backend=a2a))
    return {"global_num_tokens_cpu": batch.global_num_tokens, "is_extend_in_batch": batch.is_extend_in_batch}


def _info(rank: Local, ranks: int) -> dp_attn.MLPSyncBatchInfo:
    graphs = dict.fromkeys(("can_run_decode_cuda_graph", "can_run_draft_cuda_graph", "can_run_prefill_cuda_graph"), False)
    return dp_attn.MLPSyncBatchInfo(
        num_dp_ranks=ranks,
        tp_size=1,
        cp_size=1,
        num_tokens=rank.rows,
        num_tokens_for_logprob=rank.rows,
        is_extend_in_batch=rank.mode.is_extend(),
        local_can_run_tbo=False,
        local_forward_mode=rank.mode.value,
        **graphs,
    )
