"""What unified memory can do (the ``Memory`` protocol), how experts lie in its blocks, and how much host RAM there is."""
