"""Runs the policy, moves experts, and accounts for where steps were served from."""
