"""Hooks in an offloading scheduler process: loading, forward steps, routing, streaming and weight updates."""
