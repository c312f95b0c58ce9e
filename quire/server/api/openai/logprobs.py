"""Log-probabilities in OpenAI's forms: one entry for each token of an answer, as the engine gives
them offline.

An answer's list is as long as its `token_ids` and as `usage.completion_tokens`. It includes the
token that ended the answer and those of a stop string, whose text is not shown. In a stream an
entry comes with its token, also while the token's text is held back because it may be part of a
stop string; a stream's parts add up to the whole answer's list.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from quire.engine.front.outputs import CompletionOutput, Logprob, LogprobsByToken
from quire.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""What OpenAI's API says for "so unlikely that no number is given"; JSON has no infinity."""


class Alternative(NamedTuple):
    """A token that could have been chosen."""

    name: str
    data: bytes | None
    logprob: float

    @property
    def content(self) -> dict[str, Any]:
        """As chat completions show it."""
        return {
            "token": self.name,
            "logprob": self.logprob,
            "bytes": None if self.data is None else list(self.data),
        }


class ScoredToken(NamedTuple):
    """One token with its log-probability and the likeliest alternatives."""

    token_id: int
    name: str
    data: bytes | None
    """The bytes that it contributes to the text; None for a special token that is not shown."""
    logprob: float
    top: tuple[Alternative, ...]
    """The token itself first where alternatives were requested, then these: likeliest first,
    or in the request's order."""
    text_offset: int
    """Where its text begins, in characters."""

    @property
    def content(self) -> dict[str, Any]:
        """As chat completions show it."""
        return {
            "token": self.name,
            "logprob": self.logprob,
            "bytes": None if self.data is None else list(self.data),
            "top_logprobs": [alternative.content for alternative in self.top],
        }

    @property
    def encoded(self) -> msgspec.Raw:
        """The same as JSON: a fifth of the memory, where an answer has very many."""
        return msgspec.Raw(msgspec.json.encode(self.content))


class TokenNames:
    """How tokens are named in answers: their text, or their ids where the request wants that."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool, shows_special: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._hidden = (
            frozenset() if tokenizer is None or shows_special else tokenizer.special_token_ids
        )

    def name(self, token_id: int) -> str:
        """Return the token's text; `bytes:\\xe2\\x82` for a part of a character;
        `token_id:7` where ids are wanted."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def data(self, token_id: int) -> bytes | None:
        """Return what the token contributes to the text."""
        return (
            None
            if self._tokenizer is None or token_id in self._hidden
            else self._tokenizer.token_bytes(token_id)
        )


class LogprobTracker:
    """Scores one sequence's tokens as they come.

    num_top: alternatives to show, -1 for all that were computed. asked: token ids to show in their
    place. counts_sampled:
    whether the token itself is one of the `num_top`, as in chats, or comes beside them, as in
    legacy completions.
    """

    def __init__(
        self,
        names: TokenNames,
        num_top: int,
        first_offset: int = 0,
        *,
        asked: Iterable[int] = (),
        counts_sampled: bool = True,
    ) -> None:
        self._names = names
        self._num_top = num_top
        self._asked = tuple(dict.fromkeys(asked))
        self._counts_sampled = counts_sampled
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._num_chars = first_offset

    def take(self, completion: CompletionOutput) -> list[ScoredToken]:
        """Return one entry for each new token of the sequence."""
        if completion.logprobs is None:
            return []
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        return [self.score(token_id, record) for token_id, record in pairs]

    def score(self, token_id: int, record: LogprobsByToken | None) -> ScoredToken:
        """Return the next token of the text; `record` is None for a prompt's first,
        which nothing predicts."""
        names = self._names
        data = names.data(token_id)
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(data or b""))
        record = record or {}
        mine = record.get(token_id)
        top = tuple(
            Alternative(names.name(other), names.data(other), finite(logprob))
            for other, logprob in self._top(token_id, record)
        )
        return ScoredToken(
            token_id,
            names.name(token_id),
            data,
            MIN_LOGPROB if mine is None else finite(mine.logprob),
            top,
            offset,
        )

    def _top(self, token_id: int, record: LogprobsByToken) -> Iterable[tuple[int, float]]:
        """Return what of a record is shown. A record begins with the token itself; its others are
        in the order of their ranks, and those without a rank were requested by id.
        """
        if self._asked:
            wanted = dict.fromkeys((token_id, *self._asked))
            return [(other, record[other].logprob) for other in wanted if other in record]
        if self._num_top < 0:
            return [(other, each.logprob) for other, each in record.items()]
        chosen = (
            (other, each.logprob)
            for other, each in record.items()
            if other == token_id or (each.rank is not None and each.rank <= self._num_top)
        )
        return islice(chosen, self._num_top) if self._counts_sampled else chosen


def legacy_logprobs(
    tokens: Sequence[ScoredToken], *, is_first_unknown: bool = False
) -> dict[str, Any]:
    """Return log-probabilities as legacy completions show them: four lists of equal length."""
    logprobs: list[float | None] = [token.logprob for token in tokens]
    top: list[dict[str, float] | None] = [_legacy_top(token) for token in tokens]
    if is_first_unknown and tokens:
        logprobs[0], top[0] = None, None
    return {
        "tokens": [token.name for token in tokens],
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": [token.text_offset for token in tokens],
    }


def prompt_logprobs(
    records: Iterable[LogprobsByToken | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Return log-probabilities as vLLM shows them: one map per prompt token, token id to
    log-probability, rank and text; null first."""
    if records is None:
        return None
    return [
        None if record is None else {str(key): _shown(value) for key, value in record.items()}
        for record in records
    ]


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # NaN too


def _legacy_top(token: ScoredToken) -> dict[str, float]:
    """Return log-probabilities by name, the token itself first; of several tokens with the same
    name the likeliest stays."""
    shown = {token.name: token.logprob}
    for other in token.top:
        shown.setdefault(other.name, other.logprob)
    return shown


def _shown(value: Logprob) -> dict[str, Any]:
    return {
        "logprob": finite(value.logprob),
        "rank": value.rank,
        "decoded_token": value.decoded_token,
    }
