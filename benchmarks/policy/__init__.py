"""Residency policies and slots on measured and generated routing, by replay: ``python -m benchmarks.policy STUDY``."""
