"""Steps with many tokens read each offloaded expert once: layer by layer, experts are copied into VRAM, one layer ahead."""
