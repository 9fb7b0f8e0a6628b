"""The CUDA implementations of the protocols for memory, routing counters, slots and staging."""
