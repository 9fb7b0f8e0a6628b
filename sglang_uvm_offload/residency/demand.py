"""The KV cache that ``auto`` leaves room for: what flags ask for, and what is assumed without them."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_uvm_offload.memory.layout import round_up

DEFAULT_KV_TOKENS = 32768
"""Tokens of KV cache that ``auto`` leaves on each rank if no flag sets them: one request of as many tokens, as long as those
that the ``plan`` command assumes, or several shorter ones."""


@dataclass(frozen=True)
class Demand:
    model_context: int
    """The longest request that SGLang accepts, in tokens."""
    context_length: int | None = None
    """As the user gave it, and so are the next two."""
    max_running_requests: int | None = None
    """Of all replicas or attention groups together."""
    max_total_tokens: int | None = None
    """Of one rank."""
    page_tokens: int = 64

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

    def requests_of_rank(self, groups: int) -> int:
        """``groups``: replicas or attention groups that share the requests."""
        return -(-(self.max_running_requests or 1) // groups)

    def tokens_of_rank(self, groups: int) -> int:
        given = self.kv_tokens
        return round_up(self.context, self.page_tokens) * self.requests_of_rank(groups) if given is None else given

    def __str__(self) -> str:
        """In the words of the flags: what was given, and what was assumed."""
        if self.max_total_tokens is not None:
            return "as --max-total-tokens gives them"
        given = {"--max-running-requests": self.max_running_requests, "--context-length": self.context_length}
        count = self.max_running_requests or 1
        requests = f"{count} request{'s' if count > 1 else ''} of {self.context} tokens"
        assumed = [flag for flag, value in given.items() if value is None]
        if not assumed:
            return f"for {requests}"
        return f"for {requests}, or more shorter ones; assumed, and changed by {', '.join(assumed)} or --max-total-tokens"
