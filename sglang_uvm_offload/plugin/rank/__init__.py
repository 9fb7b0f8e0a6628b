"""Hooks in a scheduler process that offloads: loading, each step, routing, streaming and updates of the weights."""
