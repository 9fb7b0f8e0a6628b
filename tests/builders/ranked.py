"""A rank as SGLang's configurators see it, from resolved arguments and without weights, groups or a device."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sglang.srt import runtime_context
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.weight_utils import get_quant_config
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_uvm_offload.plugin.compat import resolving_view


@contextlib.contextmanager
def as_a_rank(server_args: Any) -> Iterator[None]:
    """Within the block, SGLang has the settings of a rank with ``server_args``, except groups and devices."""
    context = runtime_context.RuntimeContext(parallel=runtime_context.ParallelContext())
    with mock.patch.dict(os.environ, server_args._environment):
        context.set_server_args(server_args)
        with runtime_context.use_context(context):
            context.parallel.override_permanently(attn_dcp_rank=0)
            yield


def runner_of(server_args: Any) -> Any:
    """Returns SGLang's runner of the target before it loads. Call this in ``as_a_rank``."""
    cfg, model = resolving_view(server_args), model_config_of(server_args)
    runner = object.__new__(ModelRunner)
    runner.device, runner.gpu_id = cfg.device, 0
    runner.pp_group = SimpleNamespace(world_size=cfg.pp_size)
    runner.server_args, runner.model_config = server_args, model
    runner.is_draft_worker, runner.draft_model_idx, runner.draft_attention_backend = False, None, None
    runner.spec_algorithm = SpeculativeAlgorithm.from_string(cfg.speculative_algorithm)
    runner.page_size = cfg.page_size
    runner.is_hybrid_swa, runner.is_hybrid_swa_compress = model.is_hybrid_swa, model.is_hybrid_swa_compress
    runner.use_mla_backend = model.attention_arch == AttentionArch.MLA
    runner.forward_stream = runner.req_to_token_pool = runner.token_to_kv_pool_allocator = runner.memory_pool_config = None
    runner.init_spec_aux_hidden_state()
    return runner


def stage_of(server_args: Any, stage: int = 0) -> Any:
    """Returns what the configurators read from the model of a pipeline stage."""
    cfg, model = resolving_view(server_args), model_config_of(server_args)
    part = SimpleNamespace(quant_config=_quantization(cfg, model))
    if cfg.pp_size > 1:
        layers = model.hf_text_config.num_hidden_layers
        part.start_layer, part.end_layer = get_pp_indices(layers, stage, cfg.pp_size)
    return part


def _quantization(cfg: Any, model: Any) -> Any:
    """Returns the checkpoint's quantisation, which may set the KV cache's dtype. Copies the config: SGLang writes to it."""
    if cfg.kv_cache_dtype != "auto" or model.quantization is None:
        return None
    model = copy.copy(model)
    model.hf_config = copy.deepcopy(model.hf_config)
    with contextlib.suppress(Exception):  # SGLang may raise anything; the cache then has the model's dtype
        return get_quant_config(model, LoadConfig(download_dir=cfg.download_dir), {})
    return None
