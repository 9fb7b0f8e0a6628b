"""Estimates offline whether a model fits a machine, with how many residents, and how fast.

In reading order: ``engine_shape`` gets a model's shape from SGLang's class; ``machine`` and ``inputs`` are the other inputs;
``granted_vram``, ``rank_weights`` and ``case`` estimate what a rank would measure, and ``residency.budget`` divides it as in a
launch; ``speed`` predicts; ``planner`` builds the ``outcome``, with the ``launch_flags`` of that plan and of ``plain`` SGLang;
``plan_report`` shows it, beginning with the ``decision``.
"""
