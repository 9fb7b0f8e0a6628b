"""Serves Mixture-of-Experts models that do not fit in VRAM: an SGLang plugin that keeps experts in CUDA unified memory.

Packages by rank. A package imports only from lower ranks, and imports never form a cycle. The files next to this one have
rank 1.

    0  files
    2  memory policy
    3  experts routing
    4  residency streaming cuda cpu
    5  plan
    6  plugin replay
    7  report
    8  cli

Each package's docstring states its purpose in one sentence. The five most important paths, file by file:

Loading:

    plugin/rank/fused_moe           FusedMoE.__init__: hooks the quantisation method of each MoE layer
    plugin/rank/expert_map          maps the checkpoint's experts to places (expert_location)
    experts/takeover                allocates ``[num_experts, ...]`` tensors in managed memory: only address space
    plugin/rank/loading_hooks       once the model is built:
    plugin/rank/rank_budget         measures this rank and the KV cache that SGLang needs (plugin/rank/cache_need)
    residency/budget                divides VRAM, identically on all ranks (plugin/rank/residency)
    experts/layer                   places each tensor's residents (residency/placement)
    experts/tensor                  as extents of blocks (memory/layout)
    cuda/memory, cpu/memory         with advice and prefetch (memory/protocol)
    memory/populating               on a thread: populates host pages of offloaded experts while SGLang reads
    plugin/rank/link                once the target is loaded: measures the link (cuda/link), saves it (memory/kept_links)
    plugin/rank/residency           correct, once all weights are loaded: divides again, before SGLang allocates the KV cache

Serving, for each forward step:

    plugin/rank/step_hooks          ModelRunner.forward: the step's valid rows, tokens and phase
    residency/manager               begin_step: runs what is due
    residency/ledger                polls the counts, which arrive some steps late, without waiting
    residency/residents             starts the decided move and the next decision
    residency/adaptation            on a decision thread: decides (policy/adaptive, over policy/extents)
    residency/mover                 on a mover thread: demotes, then promotes
    plugin/rank/fused_moe           apply: counts, then computes
    cuda/counters, cpu/counters     one kernel per step (cuda/step_routing), captured in the graph (routing/counts)
    plugin/rank/operating_hooks     after the step: polls, metrics, log lines (plugin/rank/chores) and saves (files/autosave)
    residency/evictions             on the mover thread, every ten seconds: checks for evictions (cuda/read_times)

Operating, while it serves:

    plugin/operate/http_routes      GET and POST /expert_offload, in the process that serves HTTP
    plugin/operate/rank_files       the status that each rank writes for it, between two steps
    plugin/operate/actions          readvise, pause, resume, save: on every rank between the same two steps
    plugin/rank/expert_map          ExpertLocationUpdater.update: experts are rearranged, and counts and residents follow them
    residency/residents             chooses at once; residency/rearranging follows; files/autosave saves

Streaming, in a step with many tokens, for each MoE layer:

    plugin/rank/buffers             once after loading: creates the stream buffers and slots
    streaming/streamer              runs before and after the layer's apply (plugin/rank/fused_moe)
    streaming/schedule              assigns layers to buffers
    streaming/replicas              points the layer's tensors at a buffer and back
    cuda/staging, cpu/staging       copies, and orders copies and readers (memory/staging)
    streaming/model_slots           copies to slots instead, if the layer has enough

Slots, in each step that reads experts in place, for each MoE layer:

    plugin/slots/triton, marlin, deep_gemm  between SGLang's list of rows or blocks and its first kernel: redirects
                                    experts to their copies
    plugin/rank/lookahead           guesses the experts of the next layer, with prefetch speculative
    streaming/model_slots           finds the layer; between steps: resets stale slots and updates what is offloaded
    cuda/slots, cpu/slots           counts, fills, and rewrites the list in one kernel (memory/slots)
    policy/slot_policy              the policy that the kernel implements
"""

__version__ = "0.1.0"
