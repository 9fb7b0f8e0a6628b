"""How much KV cache ``auto`` leaves room for: what the flags ask for, with assumptions where they say nothing."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_uvm_offload.memory.layout import round_up

DEFAULT_KV_TOKENS = 32768
"""Tokens of KV cache that ``auto`` leaves room for on each rank if no flag sets them: one request of this length, which is also
what ``plan`` assumes, or several shorter ones."""


@dataclass(frozen=True)
class Demand:
    model_context: int
    """The longest request that SGLang accepts, in tokens."""
    context_length: int | None = None
    """This and the next two are as the user gave them."""
    max_running_requests: int | None = None
    """The total over all replicas or attention groups."""
    max_total_tokens: int | None = None
    """The tokens on one rank."""
    page_tokens: int = 64

    @property
    def context(self) -> int:
        """Tokens of one request. Without a flag, it is capped: few requests fill the context that a model allows."""
        return self.context_length or min(self.model_context, DEFAULT_KV_TOKENS)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of KV cache on each rank; None if they follow from requests x context."""
        if self.max_total_tokens is not None or self.max_running_requests is not None:
            return self.max_total_tokens
        return max(round_up(self.context, self.page_tokens), DEFAULT_KV_TOKENS)

    def requests_of_rank(self, groups: int) -> int:
        """Requests on one rank, if ``groups`` replicas or attention groups share them."""
        return -(-(self.max_running_requests or 1) // groups)

    def tokens_of_rank(self, groups: int) -> int:
        given = self.kv_tokens
        return round_up(self.context, self.page_tokens) * self.requests_of_rank(groups) if given is None else given

    def __str__(self) -> str:
        """What was given and what was assumed, in the words of the flags."""
        if self.max_total_tokens is not None:
            return "as --max-total-tokens gives them"
        given = {"--max-running-requests": self.max_running_requests, "--context-length": self.context_length}
        count = self.max_running_requests or 1
        requests = f"{count} request{'s' if count > 1 else ''} of {self.context} tokens"
        assumed = [flag for flag, value in given.items() if value is None]
        if not assumed:
            return f"for {requests}"
        return f"for {requests}, or more shorter ones; assumed, and changed by {', '.join(assumed)} or --max-total-tokens"
