"""Explains a server or a replay to a person: advice, charts, HTML reports."""
