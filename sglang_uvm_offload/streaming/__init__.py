"""Copies of offloaded experts in VRAM: one layer ahead of a step with many tokens, or in slots that decode steps fill."""
