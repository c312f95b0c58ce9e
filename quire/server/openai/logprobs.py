"""Log-probabilities in OpenAI's forms, in step with the text that is shown.

Text is held back while it may be part of a stop string, and cut where it was one; the tokens reported must be those whose text
is shown, so they wait with it. A `LogprobTracker` sees a sequence's tokens and its text grow and gives out each token once,
in order, so a stream's parts add up to the whole answer's list.
"""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.engine.outputs import CompletionOutput, Logprob, LogprobsByToken
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
        return {"token": self.name, "logprob": self.logprob, "bytes": None if self.data is None else list(self.data)}


class ScoredToken(NamedTuple):
    """One token with its log-probability and the likeliest alternatives."""

    token_id: int
    name: str
    data: bytes | None
    """The bytes that it contributes to the text; None for a special token that is not shown."""
    logprob: float
    top: tuple[Alternative, ...]
    """Likeliest first."""
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
    """How tokens are named in answers: their text, or their ids where the request asks for that."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool, shows_special: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._hidden = frozenset() if tokenizer is None or shows_special else tokenizer.special_token_ids

    def name(self, token_id: int) -> str:
        """The token's text; `bytes:\\xe2\\x82` for a part of a character; `token_id:7` where ids are wanted."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def data(self, token_id: int) -> bytes | None:
        """What the token contributes to the text."""
        return None if self._tokenizer is None or token_id in self._hidden else self._tokenizer.token_bytes(token_id)


class LogprobTracker:
    """One sequence's tokens on their way out. `num_top`: alternatives to show; `asked`: and these, whatever their rank."""

    def __init__(self, names: TokenNames, num_top: int, first_offset: int = 0, asked: Iterable[int] = ()) -> None:
        self._names = names
        self._num_top = num_top
        self._asked = frozenset(asked)
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._num_chars = first_offset
        self._num_bytes = 0
        self._num_shown_bytes = 0
        self._waiting: deque[tuple[int, ScoredToken]] = deque()

    def take(self, completion: CompletionOutput) -> list[ScoredToken]:
        """The tokens whose text is shown now, given what is new of the sequence."""
        self._num_shown_bytes += len(completion.text.encode())
        for token_id, record in zip(completion.token_ids, completion.logprobs or (), strict=False):
            self._waiting.append((self._num_bytes, self.score(token_id, record)))
        shown: list[ScoredToken] = []
        is_stopped = completion.finish_reason == "stop" and isinstance(completion.stop_reason, str)
        is_cut = completion.finish_reason is None or is_stopped
        while self._waiting:
            start, token = self._waiting[0]
            if start >= self._num_shown_bytes and (is_cut or not token.data):
                break
            shown.append(token)
            self._waiting.popleft()
        return shown

    def score(self, token_id: int, record: LogprobsByToken | None) -> ScoredToken:
        """The next token of the text; `record` is None for a prompt's first, which nothing predicts."""
        data = self._names.data(token_id)
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(data or b""))
        self._num_bytes += len(data or b"")
        record = record or {}
        mine = record.get(token_id)
        ranked = sorted(
            (math.inf if each.rank is None else each.rank, -each.logprob, other)
            for other, each in record.items()
            if (each.rank is not None and each.rank <= self._num_top) or other in self._asked
        )
        names = self._names
        top = tuple(Alternative(names.name(other), names.data(other), finite(-negated)) for _, negated, other in ranked)
        return ScoredToken(
            token_id, self._names.name(token_id), data, MIN_LOGPROB if mine is None else finite(mine.logprob), top, offset
        )


def legacy_logprobs(tokens: Sequence[ScoredToken], *, has_top: bool, is_first_unknown: bool = False) -> dict[str, Any]:
    """As legacy completions show them: four lists of equal length."""
    logprobs: list[float | None] = [token.logprob for token in tokens]
    top: list[dict[str, float] | None] = [_legacy_top(token) for token in tokens]
    if is_first_unknown and tokens:
        logprobs[0], top[0] = None, None
    return {
        "tokens": [token.name for token in tokens],
        "token_logprobs": logprobs,
        "top_logprobs": top if has_top else None,
        "text_offset": [token.text_offset for token in tokens],
    }


def prompt_logprobs(records: Iterable[LogprobsByToken | None] | None) -> list[dict[str, Any] | None] | None:
    """As vLLM shows them: one map a prompt token, token id to log-probability, rank and text; null first."""
    if records is None:
        return None
    return [None if record is None else {str(key): _shown(value) for key, value in record.items()} for record in records]


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # NaN too


def _legacy_top(token: ScoredToken) -> dict[str, float]:
    return {**{other.name: other.logprob for other in reversed(token.top)}, token.name: token.logprob}


def _shown(value: Logprob) -> dict[str, Any]:
    return {"logprob": finite(value.logprob), "rank": value.rank, "decoded_token": value.decoded_token}
