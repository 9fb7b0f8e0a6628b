"""Stands in for the one module of vLLM that SGLang imports on a CPU. See ``_custom_ops``."""
