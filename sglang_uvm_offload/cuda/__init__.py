"""The ``Memory`` and ``RoutingCounters`` protocols over the CUDA driver."""
