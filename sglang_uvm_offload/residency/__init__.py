"""Runs the policy, moves experts, and accounts for what steps were served from."""
