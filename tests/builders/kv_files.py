"""Transfers KV caches between two servers on one CPU through files, in place of an RDMA library. For each request the prefill
server writes a file with its pages and the first token, and the decode server copies them into its own cache."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.fake import FakeKVManager, FakeKVReceiver, FakeKVSender
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

PREFILL = SimpleNamespace(dp_size=1, follow_bootstrap_room=False)
"""The prefill server's info, for any address."""


def install(folder: str) -> None:
    """Call this in each process of both servers, before SGLang applies plugins. Start the servers with ``nixl``."""
    classes = {
        KVClassType.MANAGER: Manager,
        KVClassType.SENDER: type("Sender", (Sender,), {"folder": Path(folder)}),
        KVClassType.RECEIVER: type("Receiver", (Receiver,), {"folder": Path(folder)}),
        KVClassType.BOOTSTRAP_SERVER: Bootstrap,
    }

    def choose(original: Any, backend: Any, kind: Any) -> Any:
        return classes[kind] if backend is TransferBackend.NIXL and kind in classes else original(backend, kind)

    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", choose, HookType.AROUND)


class Bootstrap:
    """A bootstrap that does nothing: servers need not find each other."""

    def __init__(self, host: str, port: int):
        pass


class Manager(FakeKVManager):
    attn_cp_rank, attn_cp_size, supports_host_destination = 0, 1, False

    @property
    def prefill_info_table(self) -> Any:
        return SimpleNamespace(get=lambda address: PREFILL)


class Sender(FakeKVSender):
    folder: Path

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        super().init(num_kv_indices, aux_index)
        self.left, self.aux_index, self.pages = num_kv_indices, aux_index, []

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        self.pages += kv_indices.tolist()
        self.left -= len(kv_indices)
        if self.left > 0:
            return  # another chunk of the prompt follows
        args = self.kv_mgr.kv_args
        written = self.folder / f"{self.bootstrap_room}.writing"
        with written.open("wb") as file:
            file.writelines(memoryview(rows[self.pages]) for rows in pools(args))
            file.writelines(memoryview(rows[[self.aux_index]]) for rows in aux(args))  # type: ignore[index]
        os.replace(written, self.folder / str(self.bootstrap_room))
        super().send(kv_indices, state_indices)


class Receiver(FakeKVReceiver):
    folder: Path

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None):
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self.room = bootstrap_room

    def send_metadata(self, kv_indices: Any, aux_index: int | None = None, *args: Any, **kwargs: Any) -> None:
        super().send_metadata(kv_indices, aux_index)
        self.pages, self.aux_index = [*map(int, kv_indices)], aux_index

    def poll(self) -> KVPoll:
        if self.conclude_state is None and self.has_sent_metadata:
            sent = self.folder / str(self.room)
            if not sent.exists():
                return KVPoll.Transferring
            with sent.open("rb") as file:
                for rows in pools(self.kv_mgr.kv_args):
                    rows[self.pages] = np.fromfile(file, np.uint8, len(self.pages) * rows.shape[1]).reshape(-1, rows.shape[1])
                for rows in aux(self.kv_mgr.kv_args):
                    rows[self.aux_index] = np.fromfile(file, np.uint8, rows.shape[1])
                assert not file.read(1), "the pages of the two servers differ"
        return super().poll()


def pools(args: Any) -> list[np.ndarray]:
    """Returns ``uint8[pages, page bytes]`` for each layer's keys and values."""
    return [rows(*pool) for pool in zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True)]


def aux(args: Any) -> list[np.ndarray]:
    """Returns ``uint8[requests, bytes]``: the first token and its metadata."""
    return [rows(*buffer) for buffer in zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True)]


def rows(address: int, nbytes: int, row_bytes: int) -> np.ndarray:
    whole = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return whole[: nbytes // row_bytes * row_bytes].reshape(-1, row_bytes)
