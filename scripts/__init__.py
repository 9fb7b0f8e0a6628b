"""Tools for a checkout: tests, checkpoints, the quickstart, and the harness that starts servers."""
