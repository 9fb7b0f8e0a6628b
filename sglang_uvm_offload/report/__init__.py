"""Explains a server or a replay to a person: advice, charts, pages."""
