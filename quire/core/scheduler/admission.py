"""Admission: whether a request could ever be served, and whether a refusal still holds.

The first is a question of its lengths and the limits alone, not of other requests. The scheduler asks it of every request, and
a server before a request travels to the engine's process.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.common.numbers import ceil_div
from quire.config.limits import SchedulerLimits
from quire.core.request import Request, Sequence
from quire.errors import InvalidParameterError, PromptTooLongError


def fit(request: Request, limits: SchedulerLimits) -> None:
    """Bound `max_tokens` by the context. Raises PromptTooLongError, with the numbers, for what could never be served."""
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidParameterError("the prompt is empty; give at least one token", param="prompt")
    if num_prompt >= limits.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {num_prompt} tokens, but the context holds {limits.max_model_len}, of which at least one is "
            "for the answer; shorten the prompt or raise max_model_len"
        )
    # The last token sampled is never computed, so it needs no slot.
    num_slots = min(num_prompt + request.max_tokens, limits.max_model_len) - 1
    num_blocks = ceil_div(num_slots, limits.block_size)
    if num_blocks > limits.num_blocks:
        raise PromptTooLongError(
            f"the prompt's {num_prompt} tokens and up to {num_slots + 1 - num_prompt} new ones need {num_blocks} KV "
            f"blocks of {limits.block_size}, but the whole pool has {limits.num_blocks}; shorten the prompt, lower "
            "max_tokens, or give the KV cache more memory"
        )
    request.max_tokens = min(request.max_tokens, limits.max_model_len - num_prompt)
    for begun in request.resumed:
        num_output, most = len(begun.output_token_ids), request.max_tokens - 1
        if not 0 < num_output <= most:
            raise InvalidParameterError(
                f"resumed sequence {begun.index} has {num_output} output tokens; give 1 to {most}", param="resumed"
            )


class Refusal(NamedTuple):
    """When the head of the queue was refused. It stays refused until something happens that could help it."""

    sequence: Sequence | None
    num_available: int
    num_free_rows: int
    num_prefill_publications: int

    def still_holds(self, now: Refusal) -> bool:
        """Whether neither blocks nor rows have come free since, nor a prompt's prefix been published to share."""
        return (
            self.sequence is now.sequence
            and self.num_available >= now.num_available
            and self.num_free_rows >= now.num_free_rows
            and self.num_prefill_publications == now.num_prefill_publications
        )
