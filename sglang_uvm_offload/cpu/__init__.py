"""Emulations of the ``Memory`` and ``RoutingCounters`` protocols, for machines without a GPU."""
