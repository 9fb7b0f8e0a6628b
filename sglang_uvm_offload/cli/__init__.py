"""The ``sglang-uvm-offload`` command, one file for each subcommand."""
