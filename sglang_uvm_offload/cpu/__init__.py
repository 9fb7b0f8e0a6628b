"""The ``Memory`` and ``RoutingCounters`` protocols emulated, for machines without a GPU."""
