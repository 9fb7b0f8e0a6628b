"""Routing traces through the real manager, beside baseline policies."""
