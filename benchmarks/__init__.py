"""Programs that measure and predict. Run them from the root of the repository, as ``python -m benchmarks.serve``."""
