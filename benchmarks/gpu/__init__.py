"""A GPU session: sections of parts, which measure, and the goals that judge their rows (``scripts/gpu_session.sh``)."""
