"""The tensors of a layer's experts in managed memory, each expert resident or offloaded."""
