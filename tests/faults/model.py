"""A small model whose answers depend on every byte of the experts that it uses, computed where a GPU would read them."""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

LAYERS, EXPERTS, TOP_K = 3, 16, 2
TENSORS = {"w13": 512 << 10, "w2": 256 << 10}
"""The bytes of an expert in each: 4 and 8 experts share a block of 2 MiB."""
MASK = (1 << 32) - 1

Read = Callable[[int, Sequence[int]], list[int]]
"""Maps a layer and the experts of a step's rows to a checksum of the bytes that the layer reads for each."""


@functools.cache
def weights(layer: int, name: str) -> np.ndarray:
    """uint8 ``[EXPERTS, bytes]``"""
    nbytes = EXPERTS * TENSORS[name]
    raw = np.random.default_rng([layer, *name.encode()]).integers(0, 1 << 63, nbytes // 8, dtype=np.int64)
    return raw.view(np.uint8).reshape(EXPERTS, TENSORS[name])


def checksum(*addresses: int) -> int:
    """The checksum of one expert, whose rows are at these addresses, in the order of ``TENSORS``."""
    total = 0
    for address, nbytes in zip(addresses, TENSORS.values(), strict=True):
        total = zlib.crc32((ctypes.c_char * nbytes).from_address(address), total)
    return total


@functools.cache
def true_checksum(layer: int, expert: int) -> int:
    return checksum(*(weights(layer, name)[expert].ctypes.data for name in TENSORS))


def truly(layer: int, experts: Sequence[int]) -> list[int]:
    """``Read`` of the weights themselves: what a model without offloading computes."""
    return [true_checksum(layer, expert) for expert in experts]


def route(state: int, layer: int, domain: int) -> list[int]:
    """The experts of a token, most of them among the four favourites of the domain."""
    drawn = mixed(state ^ (layer * 0x9E3779B1) ^ (domain << 20))
    first = (4 * domain + drawn % 4) % EXPERTS if drawn % 8 else (drawn >> 3) % EXPERTS
    return [first, (first + 1 + (drawn >> 9) % 3) % EXPERTS]


def step(states: Sequence[int], domain: int, layer_ids: Callable[[int, list[list[int]]], None], read: Read) -> list[int]:
    """The tokens that follow ``states``. Calls ``layer_ids(layer, ids)`` with the routing before ``read``."""
    now = [*states]
    for layer in range(LAYERS):
        ids = [route(state, layer, domain) for state in now]
        layer_ids(layer, ids)
        seen = read(layer, [expert for row in ids for expert in row])
        now = [mixed(state ^ mixed(seen[TOP_K * row]) ^ seen[TOP_K * row + 1]) for row, state in enumerate(now)]
    return now


@functools.cache
def expected(prompt: int, domain: int, tokens: int, length: int = 1, shift: int = 0) -> list[int]:
    """The answer of a model without offloading. The prompt is ``length`` tokens. Each expert has the weights of the one that is
    ``shift`` behind it."""

    def read(layer: int, experts: Sequence[int]) -> list[int]:
        return truly(layer, [(expert + shift) % EXPERTS for expert in experts])

    return answer(prompt, domain, tokens, length, lambda layer, ids: None, lambda states: None, read)


def answer(
    prompt: int,
    domain: int,
    tokens: int,
    length: int,
    layer_ids: Callable[[int, list[list[int]]], None],
    begin: Callable[[int], object],
    read: Read,
    end: Callable[[], object] = lambda: None,
) -> list[int]:
    """Prefill, then decode. ``begin(rows)`` and ``end()`` are called around each step."""
    states, told = [mixed(prompt + row) for row in range(length)], []
    for _ in range(tokens):
        begin(len(states))
        try:
            states = step(states, domain, layer_ids, read)[-1:]
        finally:
            end()
        told.append(states[0])
    return told


def mixed(bits: int) -> int:
    bits = (bits * 0x9E3779B1 + 0x7F4A7C15) & MASK
    bits ^= bits >> 15
    return (bits * 0x85EBCA6B) & MASK ^ bits >> 13
