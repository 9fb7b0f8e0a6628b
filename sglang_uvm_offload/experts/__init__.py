"""A layer's expert tensors in managed memory, each expert resident or offloaded."""
