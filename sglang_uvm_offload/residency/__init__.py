"""Runs the policy, moves experts, and accounts for where steps were served from.

In reading order: ``budget`` divides each rank's VRAM between residents, slots, stream buffers and the KV cache; ``model`` holds
the layers of a model as arrays; ``placement`` chooses the residents at load. While serving, ``manager`` runs whatever is due
between steps: ``ledger`` reads the counts, ``adaptation`` decides, ``residents`` holds the decision, ``mover`` moves experts,
and ``rearranging`` follows SGLang's EPLB. ``evictions``, ``history`` and ``status`` report on it.
"""
