"""Will a model fit a machine, with how many residents, and how fast; before anything loads. In dependency order:

safetensors_header  the tensors of a local checkpoint, off its headers
config_tensors      the tensors that a config describes
kv_cache            bytes of KV cache for a token
checkpoint          what a checkpoint holds, and what divides it between ranks
machine             a machine to plan for
sglang_memory       what SGLang leaves to weights and cache
plan                what the planner is asked and answers
speed               predicting decode and prefill
rank_memory         bytes of each rank
plan_report         a plan as a person reads it
planner             will it fit, with how many residents, how fast
planner_cli         the plan command
"""
