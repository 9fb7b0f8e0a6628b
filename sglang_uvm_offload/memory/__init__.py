"""Unified memory (the ``Memory`` protocol), the layout of experts in its blocks, and the available host RAM."""
