"""What scripts, benchmarks and tests run real SGLang servers with, on a GPU or on a CPU."""
