"""Reads a checkpoint ahead of the loader that copies from it.

SGLang maps the files, and by default eight threads per rank touch the pages of eight files at once, so a rank reads small
pieces from many places. Here, the ranks of a machine share large read-ahead requests to the kernel, and one thread touches
pages in the order in which the loader takes them. Unlike ``--weight-loader-prefetch-checkpoints``, this reads only a window
ahead, because the experts being loaded compete with the page cache for memory. Cached files need no read-ahead; SGLang's
threads read them.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
from sglang.srt.runtime_context import get_server_args

from sglang_uvm_offload.files.page_cache import is_cached
from sglang_uvm_offload.files.read_ahead import Part, ReadAhead, Share
from sglang_uvm_offload.plan.safetensors_header import CheckpointError, read_header

TOUCHED = 32
"""The most tensors whose pages are mapped before the loader takes them."""
CHOICES = ("disable_mmap", "prefetch", "drop_cache_after_load")
EXTRA_CHOICES = ("enable_multithread_load", "num_threads")
"""Arguments of SGLang's iterator, and keys of ``--model-loader-extra-config``, with which a launch chooses how to read."""

Weights = Generator[tuple[str, torch.Tensor], None, None]


def around_threads(original: Callable[..., Weights], files: Sequence[str], *args: Any, **kwargs: Any) -> Weights:
    """The names and tensors of ``original``, SGLang's threaded iterator. It is used only if the launch chooses how to read, or
    the files are cached."""
    extra = get_server_args().model_loader_extra_config or ""
    chosen = any(map(kwargs.get, CHOICES)) or any(name in extra for name in EXTRA_CHOICES)
    if chosen or is_cached(files):
        return original(files, *args, **kwargs)
    return touched(read_ahead(files))


def touched(weights: Weights) -> Weights:
    """``weights``, advanced on a thread that waits for the disk and maps pages while the loader copies."""
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as thread:
        taken = deque(thread.submit(next, weights, None) for _ in range(TOUCHED))
        while (weight := taken.popleft().result()) is not None:
            taken.append(thread.submit(next, weights, None))
            yield weight


def read_ahead(files: Sequence[str]) -> Weights:
    """The weights of all files, with kernel read-ahead of the bytes that follow each."""
    world = get_world_group()
    ranks = max(1, world.world_size // get_server_args().nnodes)
    ahead = ReadAhead(parts(files), Share(world.rank_in_group % ranks, ranks))
    ahead.read(0)
    try:
        for name, weight in safetensors_weights_iterator(list(files)):
            ahead.read(weight.nbytes)
            yield name, weight
    finally:
        ahead.close()


def parts(files: Sequence[str]) -> Iterator[Part]:
    """The bytes of all tensors in the order in which ``safetensors`` iterates: by name, regardless of their order in the file.
    A file with a bad header yields nothing; whoever opens it reports the error."""
    for path in files:
        with contextlib.suppress(CheckpointError, OSError):
            tensors = read_header(Path(path))
            begin = os.path.getsize(path) - sum(tensor.nbytes for tensor in tensors)
            offsets = accumulate((tensor.nbytes for tensor in tensors), initial=begin)
            found = {tensor.name: Part(path, offset, tensor.nbytes) for tensor, offset in zip(tensors, offsets, strict=False)}
            yield from (found[name] for name in sorted(found))
