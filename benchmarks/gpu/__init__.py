"""The GPU session (``scripts/gpu_session.sh``): sections whose parts measure, and goals that judge the measured rows."""
