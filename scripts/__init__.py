"""What a checkout is worked with: tests, checkpoints, the quickstart, and the harness that starts servers."""
