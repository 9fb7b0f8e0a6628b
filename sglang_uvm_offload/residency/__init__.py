"""Runs the policy, moves experts, and accounts for where steps were served from.

In reading order: ``budget`` divides VRAM between ranks' residents, slots, buffers and cache; ``model`` is the layers of a model
as arrays; ``placement`` chooses what is resident at load. While serving, ``manager`` does between steps what is due: ``ledger``
reads the counts, ``adaptation`` decides on them, ``residents`` holds what was decided, ``mover`` moves, and ``rearranging``
follows SGLang. ``evictions``, ``history`` and ``status`` tell how it goes.
"""
