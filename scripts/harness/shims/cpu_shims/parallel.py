"""Several ranks on a CPU: tensor and expert parallelism, and attention data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cpu_shims.hooks import around, on_cpu


def install() -> None:
    around("sglang.srt.layers.moe.token_dispatcher.standard.get_device", on_cpu)
    around("sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp", replicate_kv_heads)
    plain_memory_for_data_parallel_batches()
    gather_on_cpu()


def replicate_kv_heads(original: Callable[..., Any], model_config: Any, load_config: Any, tp_size: int) -> Any:
    """On a CPU with fewer KV heads than ranks, SGLang pads the KV heads, and only the loader of its CPU kernels can fill them.
    Leave the model as on a GPU, where each rank has a copy of a head."""
    if tp_size > model_config.get_total_num_kv_heads() and model_config.num_attention_heads % tp_size == 0:
        return model_config
    return original(model_config, load_config, tp_size)


def plain_memory_for_data_parallel_batches() -> None:
    """Attention data parallelism stages batches in pinned memory, copies them with Triton, and queries the attention backend
    for the sequence length of a padded row. Use plain memory and copies, and a length of 1."""
    import sglang.srt.layers.dp_attention as dp_attention
    import sglang.srt.model_executor.forward_batch_info as forward_batch_info
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    forward_batch_info._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    for name in ("get_cuda_graph_seq_len_fill_value", "get_cpu_graph_seq_len_fill_value"):
        setattr(TorchNativeAttnBackend, name, lambda self: 1)


def gather_on_cpu() -> None:
    """Process groups use the device that SGLang was built for. They read NCCL's device even without NCCL."""
    import sglang.srt.distributed.parallel_state as parallel_state
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator

    parallel_state._is_cpu = True
    PyNcclCommunicator.device = torch.device("cpu")
