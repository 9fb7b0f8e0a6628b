"""Builds SGLang's models on torch's ``meta`` device, in a process of its own, to count their tensors."""
