"""Slots in SGLang's MoE runners: which runners support them, and the hooks that redirect experts to their copies."""
