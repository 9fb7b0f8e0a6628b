"""Unified memory (the ``Memory`` protocol), the block layout of experts, and the available host RAM."""
