"""Serve Mixture-of-Experts models that do not fit in VRAM: experts in CUDA unified memory, as an SGLang plugin.

Packages, by rank; a package imports from lower ranks only, and no file of it imports in a circle. The files next to this one,
facts that every package uses, have rank 1.

    0  files
    2  memory policy
    3  experts routing
    4  residency streaming cuda cpu
    5  plan
    6  plugin replay
    7  report
    8  cli

Each package's docstring begins with its purpose in one sentence. Five paths matter most, file by file.

Loading:

    plugin/rank/fused_moe           FusedMoE.__init__: hooks the quantisation method of each MoE layer
    plugin/rank/expert_map          which of the checkpoint's experts lies where (expert_location)
    experts/takeover                allocates ``[num_experts, ...]`` tensors from managed memory: address space
    plugin/rank/loading_hooks       once the model is built:
    plugin/rank/rank_budget         measures this rank, and asks SGLang for the KV cache (plugin/rank/cache_need)
    residency/budget                divides VRAM, the same on all ranks (plugin/rank/residency)
    experts/layer                   what of each tensor is resident (residency/placement)
    experts/tensor                  its extents of blocks (memory/layout)
    cuda/memory, cpu/memory         place: advise, prefetch (memory/protocol)
    memory/populating               on a thread: host pages of offloaded experts, while SGLang reads
    plugin/rank/link                once all are loaded, times the link (cuda/link) and keeps its rates (memory/kept_links)

Serving, for each forward step:

    plugin/rank/step_hooks          ModelRunner.forward: the step's valid rows, tokens and phase
    residency/manager               between steps: what is due
    plugin/rank/fused_moe           apply: count, then compute
    cuda/counters, cpu/counters     one kernel a step (cuda/step_routing), captured in the graph (routing/counts)
    residency/ledger                polls the counts, which arrive some steps late, without waiting
    residency/residents             starts the move that was decided, and the next decision
    residency/adaptation            on a thread of its own: decides (policy/adaptive, over policy/extents)
    residency/mover                 on another one: demotes, then promotes
    residency/evictions             on that one, every ten seconds: are residents in VRAM (cuda/read_times)

Operating, while it serves:

    plugin/operate/http_routes      GET and POST /expert_offload, in the process that serves HTTP
    plugin/operate/rank_files       the status that each rank writes for it, between two steps
    plugin/operate/actions          readvise, pause, resume, save: on every rank between the same two steps
    plugin/rank/expert_map          ExpertLocationUpdater.update: experts are rearranged, and counts and residents follow them
    residency/residents             chooses at once; residency/rearranging follows; files/autosave saves

Streaming, in a step with many tokens, for each MoE layer:

    plugin/rank/buffers             once, after loading: the stream buffers, and slots
    streaming/streamer              before and after the layer's apply (plugin/rank/fused_moe)
    streaming/schedule              which layer is copied into which buffer
    streaming/replicas              points the layer's tensors at a buffer, and back
    cuda/staging, cpu/staging       copies, and orders copies and readers (memory/staging)
    streaming/model_slots           fills slots from the buffer, before the layer computes

Slots, in each step that reads experts in place, for each MoE layer:

    plugin/slots/triton, plugin/slots/marlin  between SGLang's list of blocks and its first kernel: what has a copy is
                                    computed from it
    streaming/model_slots           which layer it is; between steps: what is stale, and what is offloaded
    cuda/slots, cpu/slots           counts, fills and rewrites the list, in one kernel (memory/slots)
    policy/slot_policy              the rules, which the kernel follows
"""

__version__ = "0.1.0"
