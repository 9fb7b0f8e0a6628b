"""Copies of offloaded experts in VRAM: streamed one layer ahead in steps with many tokens, or in slots filled by decode
steps."""
