"""Programs that measure and predict: run each from the root of the repository, as ``python -m benchmarks.serve``."""
