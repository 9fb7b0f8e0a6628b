"""Stands in for vLLM, of which SGLang imports ``_custom_ops`` on a CPU."""
