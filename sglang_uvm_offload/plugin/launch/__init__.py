"""What a launch is, by SGLang's resolved arguments: its ranks, GPUs, checkpoint, drafts, pools, routing format and files."""
