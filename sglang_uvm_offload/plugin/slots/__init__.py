"""Slots in SGLang's MoE runners: which of them can compute an expert from its copy, and the hooks by which they do."""
