"""One launch on this machine as the planner sees it: its flags, and the memory that is free before its processes start."""

from __future__ import annotations

import dataclasses

from sglang_uvm_offload.memory.kept_links import KeptLink
from sglang_uvm_offload.memory.layout import round_up
from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape
from sglang_uvm_offload.sizing.conversion import conversion
from sglang_uvm_offload.sizing.draft_model import load_draft
from sglang_uvm_offload.sizing.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.sizing.linear_state import LinearState
from sglang_uvm_offload.sizing.lookup_tables import VRAM
from sglang_uvm_offload.sizing.machine import Machine
from sglang_uvm_offload.sizing.measured_link import with_measured_link
from sglang_uvm_offload.sizing.model_files import ModelFiles
from sglang_uvm_offload.sizing.rank_memory import Case
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError
from sglang_uvm_offload.sizing.server_pools import ServerPools
from sglang_uvm_offload.sizing.slots import NO_SLOTS, Slots

DEFAULT_KV_TOKENS = 32768
"""Tokens of KV cache that ``auto`` leaves on each rank if no flag sets them: one request of as many tokens, as long as those
that the ``plan`` command assumes, or several shorter ones."""

NO_DRAFTS = "the checkpoint has no draft layers of its own to count"


_READING_HEADERS = (
    *("auto", "safetensors", "dummy", "layered", "mistral", "fastsafetensors", "instanttensor", "runai_streamer"),
    *("presharded", "flash_rl"),
)
"""Load formats by which SGLang 0.5.23 reads the safetensors of the folder that is named (``dummy`` reads none). With others the
config says what there is."""


def stored_model(files: ModelFiles, load_format: str, dtype: str | None) -> CheckpointShape:
    """The model as its checkpoint has it. Raises ``CheckpointError``."""
    return files.shape(dtype or None) if load_format in _READING_HEADERS else files.described(dtype or None)


class Uncounted(Exception):
    """Why the planner cannot count this launch, each reason to be read after a flag and a colon."""

    def __init__(self, reasons: list[str]):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


@dataclasses.dataclass(frozen=True)
class Launch:
    """Sizes are bytes, of one GPU or of the whole machine."""

    files: ModelFiles
    parallel: Parallel
    vram_bytes: int
    """The size of a GPU according to SGLang."""
    free_vram_bytes: int
    """Free on the GPU with least, before the server's processes start."""
    host_bytes: int
    """Available to all ranks of this machine together, including the margin that offloading leaves; with ``one_memory``, to
    their GPUs too."""
    mem_fraction_static: float
    """SGLang's value, before the headroom."""
    headroom_gb: float
    model_context: int
    """The longest request that SGLang accepts, in tokens."""
    context_length: int | None = None
    """As given by the user, and so are the next two."""
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    kv_cache_dtype: str = "bfloat16"
    page_tokens: int = 64
    speculative: bool = False
    """The checkpoint's own draft layers are loaded."""
    draft: ModelFiles | None = None
    """A draft model with a checkpoint of its own."""
    draft_num_resident: int | None = None
    """Residents of each of its draft layers; None: all their experts."""
    draft_tokens: int = 0
    """Tokens that a step verifies for a request; 0 without drafts."""
    dtype: str = ""
    """What the weights are loaded as, by torch's name; "" for the bytes that they have on disk."""
    quantization: str | None = None
    """The method that SGLang resolves, by flags and files."""
    image_bytes: int = 0
    hicache_bytes: int = 0
    hicache_ratio: float = 0.0
    chunked_prefill_size: int | None = None
    """The most tokens of one step on all ranks, None if unknown."""
    stream_gb: float | None = None
    stream_tokens: int | None = None
    """Both as in ``Reserve``."""
    linear: LinearState | None = None
    pools: ServerPools | None = None
    """What SGLang itself makes of the KV cache and the states; None where it was not asked."""
    slots: Slots = NO_SLOTS
    stages: tuple[range, ...] = ()
    """The decoder layers of each pipeline stage."""
    notes: tuple[str, ...] = ()
    """What the user should know of memory that is counted elsewhere."""
    rates: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of this machine, 0 if unknown: the link's and VRAM's in 1e9 bytes a second, and TFLOPS (``Machine``)."""
    measured: KeptLink | None = None
    """The link as an earlier server measured it."""
    one_memory: bool = False
    """The GPUs have the host's memory."""
    load_format: str = "auto"
    tables_in: str = VRAM
    """Where SGLang keeps lookup tables."""
    at_least: bool = False
    """For a lower bound: what is not known of a conversion, of states and of draft layers counts the least."""

    def case(self) -> Case:
        """The planner's case for this launch. Raises ``Uncounted``."""
        try:
            model = self._model()
            draft = None if self.draft is None else load_draft(self.draft)
        except CheckpointError as error:
            raise Uncounted([str(error)]) from error
        if reasons := self._uncounted(model):
            raise Uncounted(reasons)
        # SGLang has accepted this context: with scaling it may exceed the config's.
        model = dataclasses.replace(model, context_length=max(model.context_length, self.model_context))
        machine = Machine(
            *("this machine", self.parallel.ranks, self.vram_bytes, self.host_bytes, *self.rates),
            source="this machine",
            one_memory=self.one_memory,
            available_bytes=self.host_bytes if self.one_memory else 0,
        )
        workload = (
            self.workload
            if model.draft_layers
            else dataclasses.replace(self.workload, speculative=False, draft_num_resident=None)
        )
        if all(self.rates):
            machine = with_measured_link(machine, self.measured)
        assumed = Assumptions(accepted_tokens=min(Assumptions.accepted_tokens, workload.draft_tokens))
        return Case(
            *(model, machine, workload, self.parallel, self._reserve(), assumed),
            draft=draft,
            linear=self.linear,
            pools=self.pools,
            slots=self.slots,
            given_stages=self.stages,
            tables_in=self.tables_in,
        )

    def _model(self) -> CheckpointShape:
        """As it is served."""
        stored = stored_model(self.files, self.load_format, self.dtype)
        converted = conversion(self.quantization, stored.quantization)
        return converted.applied(stored, at_least=self.at_least) if converted else stored

    @property
    def context(self) -> int:
        """Tokens of one request: few requests are as long as the contexts that models allow."""
        return self.context_length or min(self.model_context, DEFAULT_KV_TOKENS)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of KV cache on each rank, None for requests x context."""
        if self.max_total_tokens is not None or self.max_running_requests is not None:
            return self.max_total_tokens
        return max(round_up(self.context, self.page_tokens), DEFAULT_KV_TOKENS)

    @property
    def demand(self) -> str:
        """What the KV cache is for, in the words of the flags: what was given, and what was assumed."""
        if self.max_total_tokens is not None:
            return "as --max-total-tokens gives them"
        given = {"--max-running-requests": self.max_running_requests, "--context-length": self.context_length}
        count = self.max_running_requests or 1
        requests = f"{count} request{'s' if count > 1 else ''} of {self.context} tokens"
        assumed = [flag for flag, value in given.items() if value is None]
        if not assumed:
            return f"for {requests}"
        return f"for {requests}, or more shorter ones; assumed, and changed by {', '.join(assumed)} or --max-total-tokens"

    @property
    def workload(self) -> Workload:
        return Workload(
            self.context,
            self.max_running_requests or 1,
            max_total_tokens=self.kv_tokens,
            page_tokens=self.page_tokens,
            kv_cache_dtype=self.kv_cache_dtype,
            speculative=self.speculative,
            draft_num_resident=self.draft_num_resident if self.speculative else None,
            draft_tokens=self.draft_tokens or Workload.draft_tokens,
            other_drafts=bool(self.draft_tokens) and not self.speculative,
            tokens_are_least=self.max_total_tokens is None,
        )

    def _reserve(self) -> Reserve:
        return Reserve(
            self.mem_fraction_static,
            self.headroom_gb,
            free_vram_bytes=self.free_vram_bytes,
            image_bytes=self.image_bytes,
            hicache_bytes=self.hicache_bytes,
            hicache_ratio=self.hicache_ratio,
            chunked_prefill_size=self.chunked_prefill_size,
            stream_gb=self.stream_gb,
            stream_tokens=self.stream_tokens,
        )

    def _uncounted(self, model: CheckpointShape) -> list[str]:
        """Users of VRAM on this model's ranks that a plan does not count."""
        out = []
        layers = len(model.kv.state_layers)
        if not self.at_least and self.pools is None and bool(layers) != (self.linear is not None):
            out.append(f"the state of {layers or 'the'} layers with linear attention is not counted: their sizes are unknown")
        if self.speculative and not model.draft_layers and not self.at_least:
            out.append(NO_DRAFTS)
        return out
