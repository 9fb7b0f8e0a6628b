"""SGLang's recorder of expert distributions, whose counts the tests compare with the plugin's."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cpu_shims.hooks import around, on_cpu


def install() -> None:
    around("sglang.srt.eplb.expert_distribution.get_device", on_cpu)
    cpu_is_the_default_device_module()


def cpu_is_the_default_device_module() -> None:
    """The recorder queries the current device module for graph capture, and torch returns that of CUDA."""
    original = torch.get_device_module

    @functools.wraps(original)
    def get_device_module(device: Any = None) -> Any:
        return torch.cpu if device is None else original(device)

    torch.cpu.is_current_stream_capturing = lambda: False  # type: ignore[attr-defined]
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    torch.get_device_module = get_device_module  # type: ignore[assignment]
