"""What requests list (tokens, words, grammars), sent to an engine once for all that share it, and
forgotten with the last.

A client's body with 512 prompts and a megabyte of lists is 512 requests that refer to one digest.
Owns the numbers by which both ends know a digest's lists, and the count of requests in flight that
need them. Belongs to the supervisor's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.core.plan import ThinkTagTokens
from quire.core.request_spec import RequestSpec
from quire.engine.front.digest import Digest
from quire.engine.process.messages import NO_LISTS, Forget, Lists

_FEW_IDS = 64
"""Lists with no more travel with each request: that costs less than three messages do."""
_NO_MARKS = ThinkTagTokens((), 0, (), ())


@dataclass(slots=True)
class _Held:
    number: int
    digest: Digest
    num_requests: int = 0
    is_sent: bool = False
    """Whether the engine that runs now has them."""


class SharedLists:
    """The lists of all requests in flight."""

    def __init__(self) -> None:
        self._by_params: dict[int, _Held] = {}
        """By the identity of the digest's sampling, which digests share that were made of one."""
        self._by_number: dict[int, _Held] = {}
        self._num_given = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def hold(self, digest: Digest) -> int:
        """Hold the lists of a request that has come; returns their number."""
        if digest.num_ids <= _FEW_IDS and digest.sampling.grammar is None and digest.marks is None:
            return NO_LISTS
        held = self._by_params.get(id(digest.sampling))
        if held is None:
            self._num_given += 1
            held = _Held(self._num_given, digest)
            self._by_params[id(digest.sampling)] = self._by_number[held.number] = held
        held.num_requests += 1
        return held.number

    def release(self, number: int) -> Forget | None:
        """Release the lists of a request that has ended; returns what the engine must hear if it
        was the last."""
        held = self._by_number.get(number)
        if held is None:
            return None
        held.num_requests -= 1
        if held.num_requests:
            return None
        del self._by_number[number], self._by_params[id(held.digest.sampling)]
        return Forget(number) if held.is_sent else None

    def unsent(self, number: int) -> Lists | None:
        """Return what must be sent before a request that refers to it; None where the engine has
        it."""
        held = self._by_number.get(number)
        if held is None or held.is_sent:
            return None
        row, marks = held.digest.sampling, held.digest.marks
        return Lists(
            number=number,
            stop_token_ids=row.stop_token_ids,
            logit_bias=row.logit_bias,
            allowed_token_ids=row.allowed_token_ids,
            bad_words=row.bad_words,
            grammar=row.grammar,
            marks=None if marks is None else marks[1],
        )

    def note_sent(self, number: int) -> None:
        """Note that the engine has them now."""
        self._by_number[number].is_sent = True

    def leave_engine(self) -> None:
        """Note that the engine is gone, and all it had."""
        for held in self._by_number.values():
            held.is_sent = False


def without_lists(spec: RequestSpec) -> RequestSpec:
    """Return what is left to be said of a request whose lists are known by their number."""
    row = spec.sampling
    thinking = None if row.thinking is None else row.thinking._replace(marks=_NO_MARKS)
    row = row._replace(
        stop_token_ids=(),
        logit_bias=(),
        allowed_token_ids=None,
        bad_words=(),
        grammar=None,
        thinking=thinking,
    )
    return replace(spec, sampling=row, stop_token_ids=frozenset())


def with_lists(spec: RequestSpec, lists: Lists, stop_token_ids: frozenset[int]) -> RequestSpec:
    """Return the request that `without_lists` was made of; its lists are the very objects of
    `lists`."""
    thinking = spec.sampling.thinking
    if thinking is not None and lists.marks is not None:
        thinking = thinking._replace(marks=lists.marks)
    row = spec.sampling._replace(
        stop_token_ids=lists.stop_token_ids,
        logit_bias=lists.logit_bias,
        allowed_token_ids=lists.allowed_token_ids,
        bad_words=lists.bad_words,
        grammar=lists.grammar,
        thinking=thinking,
    )
    return replace(spec, sampling=row, stop_token_ids=stop_token_ids)
