"""Estimates offline whether a model fits a machine, with how many residents, and how fast.

In reading order: ``engine_shape`` has SGLang's class tell a model's shape; ``machine`` and ``inputs`` are what else is given;
``granted_vram``, ``rank_weights`` and ``case`` estimate what a rank would measure, which ``residency.budget`` divides as in a
launch; ``speed`` predicts; ``planner`` makes the ``outcome`` of these, and ``plan_report`` shows it.
"""
