"""Reads untrusted files, and writes files without destroying existing ones."""
