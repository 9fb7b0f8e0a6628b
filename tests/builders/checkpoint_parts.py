"""Replaces the functions of ``checkpoint_engine`` that SGLang calls to take weights from another process. Weights come through
a socket here, where the package shares GPU memory."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import zmq

DEVICE = "GPU-0"
"""Both sides' name for the only device."""


def install() -> None:
    """Call this in the process that has the model."""
    worker = types.ModuleType("checkpoint_engine.worker")
    worker.__dict__["update_weights_from_ipc"] = receive
    sys.modules.update({"checkpoint_engine": types.ModuleType("checkpoint_engine"), worker.__name__: worker})
    from sglang.srt.checkpoint_engine import checkpoint_engine_worker

    checkpoint_engine_worker.SGLangCheckpointEngineWorkerExtensionImpl.get_device_uuid = lambda self: DEVICE
    torch.cpu.current_device = lambda: 0  # type: ignore[return-value]


def receive(context: zmq.Context, address: str, device_id: int, *, run: Any, post_hook: Any = None) -> None:
    """Loads each part that arrives, until an empty one."""
    with context.socket(zmq.REP) as socket:
        socket.connect(address)
        while part := socket.recv_pyobj():
            run(part)
            socket.send(b"")
        post_hook()
        socket.send(b"")


def send(socket: zmq.Socket, parts: list[list[tuple[str, torch.Tensor]]]) -> None:
    """Sends ``parts`` as a trainer does, on a bound ``zmq.REQ``."""
    for part in [*parts, []]:
        socket.send_pyobj(part)
        socket.recv()
