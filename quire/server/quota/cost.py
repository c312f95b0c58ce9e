"""What one request may cost at most, besides its tokens: all that multiplies, known before anything
is allocated.

A body of a hundred bytes could cost gigabytes otherwise. Three products are bounded.
Log-probabilities: tokens times alternatives times sequences; each entry takes about 380 bytes until
its answer is sent (measured: 252,000 entries, 91 MiB), and those of a prompt count as often as the
answer shows them. Entries of lists (`logit_bias`, `stop_token_ids`) times sequences:
a step looks at each for each row. And what an answer repeats of prompts: characters and token ids
times choices. Lists as such are read and held once, however many prompts a body has
(`quire.engine.front.digest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.config.api import ApiConfig
from quire.core.params import SamplingParams
from quire.server.http.errors import ApiError, bad_request


class Piece(NamedTuple):
    """What one prompt of a request multiplies."""

    num_prompt_tokens: int
    params: SamplingParams
    num_shown: int = 1
    """How often the answer repeats the prompt's log-probabilities."""
    num_repeated: int = 0
    """Characters and token ids of the prompt in the answer, counted as often as they are there."""


class Bounds:
    """What an operator allows one request."""

    def __init__(self, config: ApiConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size

    def check(self, pieces: Sequence[Piece]) -> None:
        """Refuse a request that would cost too much. Raises ApiError 400 with the numbers."""
        check_sequences(
            self._config, len(pieces), sum(each.params.num_sequences for each in pieces)
        )
        self._check_logprobs(pieces)
        self._check_lists(pieces)
        self._check_repeated(pieces)

    def _check_logprobs(self, pieces: Sequence[Piece]) -> None:
        most = self._config.max_logprob_entries
        num_entries = 0
        for num_prompt_tokens, params, num_shown, _ in pieces:
            num_entries += num_prompt_tokens * num_shown * self._num_each(params.prompt_logprobs, 0)
            num_each = self._num_each(params.num_logprobs, len(params.logprob_token_ids or ()))
            num_entries += params.num_sequences * (params.max_tokens or 1) * num_each
        if num_entries > most:
            raise bad_request(
                f"logprobs: the request asks for up to {num_entries} log-probabilities "
                "(tokens times alternatives times "
                f"sequences), and one may ask for {most}; lower max_tokens, n or the number "
                "of alternatives",
                param="logprobs",
                code="too_many_logprobs",
            )

    def _check_lists(self, pieces: Sequence[Piece]) -> None:
        most, num_entries = self._config.max_list_entries, 0
        param, longest = "logit_bias", 0
        for _, params, _, _ in pieces:
            lists = {
                "logit_bias": len(params.logit_bias or ()),
                "stop_token_ids": len(params.stop_token_ids or ()),
            }
            num_entries += params.num_sequences * sum(lists.values())
            param, longest = max([(param, longest), *lists.items()], key=lambda each: each[1])
        if num_entries > most:
            raise bad_request(
                f"{param}: the lists of this request have {num_entries} entries to be looked "
                "at in a step (logit_bias and "
                f"stop_token_ids times sequences), and one may have {most}; give shorter "
                "lists, fewer prompts or a lower n",
                param=param,
                code="too_many_list_entries",
            )

    def _check_repeated(self, pieces: Sequence[Piece]) -> None:
        most, num_repeated = self._config.max_repeated, sum(each.num_repeated for each in pieces)
        if num_repeated > most:
            raise bad_request(
                f"echo: the answer would repeat {num_repeated} characters and token ids of "
                "prompts (as many as they have, "
                f"times n), and one may repeat {most}; leave out echo and return_token_ids, "
                "or lower n",
                param="echo",
                code="answer_too_large",
            )

    def _num_each(self, wanted: int | None, num_extra: int) -> int:
        """Entries of one token."""
        if wanted is None:
            return 0
        return 1 + num_extra + (self._vocab_size if wanted < 0 else wanted)


def check_sequences(
    config: ApiConfig, num_prompts: int, num_sequences: int, param: str | None = None
) -> None:
    """Refuse a request with too many prompts or sequences. Raises ApiError 400."""
    if num_prompts > config.max_prompts or num_sequences > config.max_sequences:
        raise _too_many(
            config, num_prompts, num_sequences, param or ("prompt" if num_prompts > 1 else "n")
        )


def _too_many(config: ApiConfig, num_prompts: int, num_sequences: int, param: str) -> ApiError:
    return bad_request(
        f"{param}: {num_prompts} prompts make {num_sequences} sequences; one request may "
        f"have {config.max_prompts} prompts and "
        f"{config.max_sequences} sequences",
        param=param,
    )


def room_for_logprobs(num_top: int | None, num_sequences: int, max_entries: int) -> int | None:
    """Return output tokens of a request that does not say how many it wants,
    if its log-probabilities bound them."""
    return None if num_top is None else max(1, max_entries // (num_sequences * (num_top + 1)))
