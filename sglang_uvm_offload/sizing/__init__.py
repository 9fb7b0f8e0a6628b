"""Predicts, before anything loads, whether a model fits a machine, with how many residents, and how fast."""
