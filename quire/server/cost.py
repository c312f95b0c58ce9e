"""What one request may cost at most, besides its tokens: log-probabilities, the one thing that multiplies them.

Each entry (a token or an alternative) takes about 380 bytes until its answer is sent (measured: 252,000 entries, 91 MiB), so
a body of a hundred bytes could ask for gigabytes. The bound is checked before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.params import SamplingParams
from quire.server.errors import bad_request


def check_logprobs(jobs: Iterable[tuple[int, SamplingParams]], max_entries: int, vocab_size: int) -> None:
    """Refuse requests with more entries than `max_entries`. `jobs`: (prompt tokens, parameters). Raises ApiError 400."""
    num_entries = 0
    for num_prompt_tokens, params in jobs:
        num_entries += num_prompt_tokens * _num_each(params.prompt_logprobs, 0, vocab_size)
        num_each = _num_each(params.num_logprobs, len(params.logprob_token_ids or ()), vocab_size)
        num_entries += params.num_sequences * (params.max_tokens or 1) * num_each
    if num_entries > max_entries:
        raise bad_request(
            f"logprobs: the request asks for up to {num_entries} log-probabilities (tokens times alternatives times "
            f"sequences), and one may ask for {max_entries}; lower max_tokens, n or the number of alternatives",
            param="logprobs",
            code="too_many_logprobs",
        )


def room_for_logprobs(num_top: int | None, num_sequences: int, max_entries: int) -> int | None:
    """Output tokens of a request that does not say how many it wants, if its log-probabilities bound them."""
    return None if num_top is None else max(1, max_entries // (num_sequences * (num_top + 1)))


def _num_each(wanted: int | None, num_extra: int, vocab_size: int) -> int:
    """Entries of one token."""
    if wanted is None:
        return 0
    return 1 + num_extra + (vocab_size if wanted < 0 else wanted)
