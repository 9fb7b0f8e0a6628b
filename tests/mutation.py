"""Mutates valid inputs: flipped bytes, wrong lengths, changed JSON fields. The same seed gives the same input."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

MARKUP = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"
LONG = ("é" * 40, "9" * 25, "9" * 5000, "a" * 5000)
TEXTS = ("", "0", "-1", "auto", "inf", "nan", MARKUP, "\0", "\x1b[2J", "\ud800", "1e999", "../x", *LONG)
WHOLE = (0, 1, -1, 2, 7, 255, 1 << 15, 1 << 31, (1 << 53) + 1, 1 << 63, 10**25)
NUMBERS = (*WHOLE, 0.5, -0.0, 1e-300, 1e300, float("inf"), float("nan"))
LENGTHS = (0, 1, 7, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)


def value(chance: random.Random) -> Any:
    """Returns any JSON value."""
    simple = chance.choice((None, True, False, chance.choice(TEXTS), chance.choice(NUMBERS), chance.randrange(-5, 300)))
    wrapped = ({"a": simple}, [simple], [simple] * 3, [], {}, [[simple]])
    return simple if chance.random() < 0.75 else chance.choice(wrapped)


def tree(valid: Any, chance: random.Random) -> Any:
    """Returns ``valid`` JSON with one to four values replaced, removed, repeated or swapped."""
    out = copy.deepcopy(valid)
    for _ in range(chance.randint(1, 4)):
        node = out
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(node[key], (dict, list)) and node[key] and chance.random() < 0.85:
                node = node[key]
                continue
            _change(node, key, keys, chance)
            break
    return out


def _change(node: Any, key: Any, keys: list[Any], chance: random.Random) -> None:
    kind = chance.randrange(8)
    old = node[key]
    if kind == 0:
        del node[key]
    elif kind == 1:
        node[key] = copy.deepcopy(node[chance.choice(keys)])
    elif kind == 2 and isinstance(node, list):
        node.insert(chance.randrange(len(node) + 1), copy.deepcopy(old))
    elif kind == 3 and type(old) in (int, float):
        node[key] = chance.choice((old + 1, old - 1, -old, old * 2, old * 1000, chance.choice(NUMBERS)))
    elif kind == 4 and isinstance(old, str):
        node[key] = old + chance.choice(TEXTS)
    else:
        node[key] = value(chance)


def document(valid: Any, chance: random.Random) -> bytes:
    """Returns a changed ``valid`` as JSON text, sometimes with damaged bytes."""
    text = json.dumps(tree(valid, chance)).encode()
    return damaged(text, chance) if chance.random() < 0.2 else text


def damaged(valid: bytes, chance: random.Random) -> bytes:
    """Returns ``valid`` with bytes flipped, cut, repeated, or overwritten by a wrong length."""
    out = bytearray(valid)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(out) + 1)
        kind = chance.randrange(5)
        if kind == 0:
            del out[at : at + chance.choice((1, 2, 8, 100, len(out)))]
        elif kind == 1:
            out[at:at] = out[at : at + chance.randrange(1, 64)]
        elif kind == 2:
            size = chance.choice((1, 2, 4, 8))
            out[at : at + size] = (chance.choice(LENGTHS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        elif at < len(out):
            out[at] ^= 1 << chance.randrange(8) if kind == 3 else chance.randrange(1, 256)
    return bytes(out)
