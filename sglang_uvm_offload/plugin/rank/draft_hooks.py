"""Hooks on SGLang's adaptive speculation: how many tokens to draft is chosen by what steps miss, too.

SGLang asks before each decode step how many tokens to draft, switches to the graphs and backends that it has built for that
number, and says afterwards how many were accepted. Only the answer is another one here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.residency.draft_lengths import DraftLengths

_PARAMS = "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"


class DraftHooks:
    def __init__(self, lengths: Callable[[], DraftLengths | None]):
        """``lengths``: None before the server serves."""
        self._lengths = lengths

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(f"{_PARAMS}.get_steps_for_batch", self.around_choice, HookType.AROUND)
        add(f"{_PARAMS}.on_verify_complete", self.around_verified, HookType.AROUND)

    def around_choice(self, original: Callable[..., int], params: Any, batch_size: int) -> int:
        """The number of draft tokens of the decode step that is launched next."""
        lengths, slot = self._lengths(), params._route(batch_size)
        if lengths is None:
            return original(params, batch_size)
        if len(slot.candidate_steps) < 2:
            lengths.leave()
            return original(params, batch_size)
        return lengths.choose(batch_size, slot.candidate_steps, slot.current_steps)

    def around_verified(
        self, original: Callable[..., int | None], params: Any, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None:
        """The results of a step are there. Returns the number to switch to at once, None for no change: it changes with the
        next choice."""
        lengths = self._lengths()
        if lengths is None or len(params._route(batch_size).candidate_steps) < 2:
            return original(params, num_correct_drafts_per_req, batch_size)
        lengths.verified(num_correct_drafts_per_req)
        return None
