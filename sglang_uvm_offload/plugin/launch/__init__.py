"""A launch as SGLang's resolved arguments describe it: its ranks, GPUs, checkpoint, drafts, KV demand and files."""
