"""The installed SGLang version, and the first version of each hook point that ``compat`` does without in older ones."""

from __future__ import annotations

import re

import sglang

VERSION = tuple(int(number) for number in re.findall(r"\d+", sglang.__version__)[:3])

SINCE = {
    "sglang.srt.arg_groups.fields.parallel.Parallel.attn_dp_enabled": (0, 5, 22),
    "sglang.srt.server_args.ServerArgs.attn_dp_size": (0, 5, 22),
    "sglang.srt.environ.Envs.SGLANG_HTTP_SERVER_APP_PATH": (0, 5, 23),
    "sglang.srt.environ.Envs.SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS": (0, 5, 23),
    "sglang.srt.environ.Envs.SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT": (0, 5, 23),
    "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info": (0, 5, 23),
    "sglang.srt.managers.data_parallel_controller.DataParallelController._scheduler_init_infos": (0, 5, 23),
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.uses_expert_location": (0, 5, 23),
    "sglang.srt.layers.moe.topk.TopKConfig.runner_backend": (0, 5, 23),
    "sglang.srt.layers.quantization.base_config.FusedMoEMethodBase.get_moe_runner_backend": (0, 5, 23),
    "sglang.srt.server_args.ServerArgs.enable_nvidia_megakernel": (0, 5, 23),
    "sglang.srt.server_args.ServerArgs.enable_paged_experts": (0, 5, 23),
    # In older versions, a wrapper hides the same parameters.
    "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe.fused_marlin_moe": (0, 5, 23),
}
