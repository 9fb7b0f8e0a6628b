"""Runs real SGLang servers for scripts, benchmarks and tests, on a GPU or on a CPU."""
