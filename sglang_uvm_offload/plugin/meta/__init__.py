"""Builds SGLang's models on torch's ``meta`` device in a separate process to count their tensors."""
