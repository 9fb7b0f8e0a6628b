"""Replays routing traces through the real manager and through baseline policies."""
