"""One launch on this machine as the planner sees it: its flags, and the memory that is free before its processes start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sglang_uvm_offload.memory.layout import round_up
from sglang_uvm_offload.sizing.checkpoint import CheckpointShape, load
from sglang_uvm_offload.sizing.machine import Machine
from sglang_uvm_offload.sizing.plan import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.sizing.rank_memory import Case
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError

DEFAULT_KV_TOKENS = 32768
"""Tokens of KV cache that ``auto`` leaves on each rank if no flag sets them: eight requests of 4096 tokens."""

NO_DRAFTS = "the checkpoint has no draft layers of its own to count"


class Uncounted(Exception):
    """Why the planner cannot count this launch, each reason to be read after a flag and a colon."""

    def __init__(self, reasons: list[str]):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


@dataclasses.dataclass(frozen=True)
class Launch:
    """Sizes are bytes, of one GPU or of the whole machine."""

    model_path: str
    """A checkpoint's folder."""
    parallel: Parallel
    vram_bytes: int
    """The size of a GPU according to SGLang."""
    free_vram_bytes: int
    """Free on the GPU with least, before the server's processes start."""
    host_bytes: int
    """Available to all ranks of this machine together, including the margin that offloading leaves."""
    mem_fraction_static: float
    """SGLang's value, before the headroom."""
    headroom_gb: float
    context_length: int
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    kv_cache_dtype: str = "bfloat16"
    page_tokens: int = 64
    speculative: bool = False
    image_bytes: int = 0

    def case(self) -> Case:
        """The planner's case for this launch. Raises ``Uncounted``."""
        try:
            model = load(Path(self.model_path))
        except CheckpointError as error:
            raise Uncounted([str(error)]) from error
        if reasons := self._uncounted(model):
            raise Uncounted(reasons)
        # SGLang has accepted this context: with scaling it may exceed the config's.
        model = dataclasses.replace(model, context_length=max(model.context_length, self.context_length))
        ranks = self.parallel.ranks
        machine = Machine("this machine", ranks, self.vram_bytes, self.host_bytes, 1, 1, 1, "this machine")
        return Case(model, machine, self._workload(), self.parallel, self._reserve(), Assumptions())

    def _workload(self) -> Workload:
        tokens = self.max_total_tokens
        if self.max_running_requests is None and tokens is None:
            tokens = max(round_up(self.context_length, self.page_tokens), DEFAULT_KV_TOKENS)
        return Workload(
            self.context_length,
            self.max_running_requests or 1,
            max_total_tokens=tokens,
            page_tokens=self.page_tokens,
            kv_cache_dtype=self.kv_cache_dtype,
            speculative=self.speculative,
        )

    def _reserve(self) -> Reserve:
        return Reserve(
            self.mem_fraction_static, self.headroom_gb, free_vram_bytes=self.free_vram_bytes, image_bytes=self.image_bytes
        )

    def _uncounted(self, model: CheckpointShape) -> list[str]:
        """Users of VRAM on this model's ranks that a plan does not count."""
        out = []
        if model.kv.stateless_layers:
            out.append(f"the state of {len(model.kv.stateless_layers)} layers with linear attention is not counted")
        if self.speculative and not model.draft_layers:
            out.append(NO_DRAFTS)
        return out
