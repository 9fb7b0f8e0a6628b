"""Serve Mixture-of-Experts models that do not fit in VRAM: experts in CUDA unified memory, as an SGLang plugin.

The modules, in the order in which they depend on each other:

    config          the flags, and whether their values are well-formed
    moe_config      how many routed experts a model's config describes, and in which layers
    uvm             what a machine with unified memory can do (the Memory protocol)
    layout          how experts lie in pages
    context         what the experts in use tell of the others (pure)
    forecast        the touches to come of each expert (pure)
    policy          which experts should be resident (pure)
    routing         counting what the router picked
    npz             reading arrays from files of unknown origin
    profile         routing kept between runs
    atomic_file     replacing a file whole
    profile_file    the profile that a server saves
    saver           saving beside the work
    profile_cli     the profile command
    report          what a person reads
    host_ram        how much host memory this process may take
    cuda_device     what the CUDA driver says about a GPU
    cuda_build      compiling kernels/uvm_ops.cu, once
    cuda_ops        its functions
    uvm_cuda        Memory over the CUDA driver
    uvm_host        Memory emulated, for machines without a GPU
    routing_cuda    counting on the GPU
    takeover        making PyTorch allocate a layer's experts in managed memory
    expert_tensor   one tensor of experts, each resident or offloaded
    expert_layer    all experts of one layer
    ledger          what the steps were served from
    observer        booking what the device counted into it
    history         how it came to that, and what other budgets would have covered
    adaptation      following the traffic
    decisions       deciding beside the steps
    manager         loading, counting, choosing residents, moving them
    metrics         Prometheus
    planning        will a model fit, with how many residents, and how fast
    trace           measured routing
    recorder        measuring it
    references      policies to measure the shipped one against
    simulator       replaying a trace through the manager
    replay_cli      the replay command
    svg             charts
    report_source   the records of a server's statistics or a replay's results
    report_units    numbers as a page shows them
    advice          what follows from these records
    replay_page     the page of a replay
    report_page     the page of a server
    report_cli      the report command
    plugin          the edge to SGLang: the only package that imports it
    doctor          whether this machine, SGLang and a model can be served
    cli             the sglang-uvm-offload command
"""

__version__ = "0.1.0"
