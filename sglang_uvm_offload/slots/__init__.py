"""Slots: rows in VRAM beside each layer's experts, which decode steps fill with the offloaded experts that they use."""
