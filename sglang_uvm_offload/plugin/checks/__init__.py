"""Launch checks: every reason why a launch cannot offload, reported before anything loads."""
