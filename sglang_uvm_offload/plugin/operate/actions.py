"""The actions that an operator may request, which servers support them, and how a rank performs them."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.runtime_context import get_parallel

from sglang_uvm_offload.config import Settings
from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.status import RankStatus
from sglang_uvm_offload.routing.profile import RoutedModel

KEY = "expert_offload"
"""The key in ``SetInternalStateReq.server_args``, which SGLang delivers to every rank between the same two steps."""


class Action(str, enum.Enum):
    """The value of ``action`` in ``POST /expert_offload``."""

    READVISE = "readvise"
    """Choose residents now, from the routing since the last such choice."""
    PAUSE = "pause"
    """Residents stay where they are."""
    RESUME = "resume"
    SAVE = "save"
    """Save the profile and the trace."""

    def __str__(self) -> str:
        return self.value

    def message(self) -> dict[str, int]:
        """The action as ``SetInternalStateReq.server_args``, which hold numbers only."""
        return {KEY: list(Action).index(self)}

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Action | None:
        """The inverse of ``message``; None for any other message."""
        number = message.get(KEY)
        actions = dict(enumerate(cls))
        return actions.get(number) if len(message) == 1 and type(number) is int else None


def refusal(action: Action, config: Settings) -> str | None:
    """Why this server cannot perform the action, None if it can."""
    if action is Action.SAVE:
        if config.saves:
            return None
        flags = [flag_name(name) for name in ("profile", "trace", "stats")]
        return f"there is nothing to save: the server has none of {', '.join(flags)}"
    if not config.residents_change:
        return (
            f"the residents of this server never change: it has {flag_name('adapt')} {config.adapt} and "
            f"{flag_name('resident_selection')} {config.resident_selection}"
        )
    if get_parallel().enable_dp_attention_local_control_broadcast:
        return (
            "the ranks of this server would act between different steps and wait for each other: it has "
            "--enable-dp-attention-local-control-broadcast"
        )
    return None


def fewest_tokens(model: RoutedModel) -> int:
    """The fewest tokens from whose routing residents may be chosen: those that could have activated every expert of a layer
    once. After fewer, some expert has no activation however even the routing is, and its rank among the experts means
    nothing. One expert a token is assumed where the model does not say how many."""
    return max(1, math.ceil(model.num_experts / (model.top_k or 1)))


def too_few_tokens(ranks: Sequence[RankStatus]) -> str | None:
    """Why no rank would choose residents now, None if any would."""
    if not ranks or any(rank.tokens_since_choice >= rank.fewest_tokens for rank in ranks):
        return None
    most, needed = max((rank.tokens_since_choice, rank.fewest_tokens) for rank in ranks)
    return (
        f"tokens since residents were last chosen: {most}. Ranking the experts of a layer takes {needed}, with which even "
        f"routing activates each of them once; serve {needed - most} more first"
    )


def choices(before: Sequence[RankStatus], after: Sequence[RankStatus]) -> str:
    """What ``readvise`` did, for each data-parallel rank if there are several: they choose apart. Takes the statuses before and
    after it."""
    then = {rank.rank.dp: rank.tokens_since_choice for rank in before}
    done = {rank.rank.dp: _choice(then.get(rank.rank.dp, 0), rank) for rank in after}
    return "; ".join(done.values() if len(done) == 1 else (f"DP {dp}: {what}" for dp, what in done.items()))


def _choice(tokens_before: int, rank: RankStatus) -> str:
    """``tokens_before``: ``tokens_since_choice`` before ``readvise``."""
    if rank.tokens_since_choice < tokens_before:
        return f"residents chosen from the routing of {rank.chosen_from_tokens} tokens"
    return f"residents stay: {rank.tokens_since_choice} tokens since they were last chosen, {rank.fewest_tokens} needed"


def perform(action: Action, manager: OffloadManager, savers: Sequence[Saver]) -> None:
    """Perform the action. Call this on every rank, between the same two steps."""
    match action:
        case Action.READVISE:
            manager.readvise()
        case Action.PAUSE:
            manager.pause()
        case Action.RESUME:
            manager.resume()
        case Action.SAVE:
            for saver in savers:
                saver.save_now()


END: dict[str, int] = {KEY: len(Action)}
"""The message that the server is shutting down. It is not an action that operators can request."""
