"""Conversations of real traces: turns whose prompts go on where earlier ones ended.

Two kinds of files are read. A trace with block hashes says itself which prompts begin alike: a
conversation is a request and all that continue it, in order of arrival. A table of lengths without
hashes (ShareGPT's, whose rows are the turns of one conversation after the other) is one where a
prompt is at least as long as the prompt and the answer before it; these conversations take turns.
Conversations are taken whole, all their turns that fit, so that first turns are no larger a share
of a sample than of its trace. Lengths may be divided, so that a trace of long prompts fits a small
machine: what is shared is divided with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from quire.bench.tiers import prompts_of
from quire.common.numbers import ceil_div
from quire.common.seeds import mix64
from quire.sim.traces import Trace, TraceRequest, read_trace

_T = TypeVar("_T")

_FIRST_TOKEN = 3
"""Below are the ids of special tokens, in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    prompt: tuple[int, ...]
    history: tuple[int, ...]
    """What the next turn begins with: the prompt and, where the trace shares it, its answer."""
    num_known: int
    """Tokens of the prompt that earlier turns have in their histories."""

    @property
    def is_continuing(self) -> bool:
        """Whether most of the prompt was there before."""
        return 2 * self.num_known > len(self.prompt)


def conversations(
    path: Path, num_turns: int, *, divide: int, max_len: int, min_turns: int, vocab_size: int
) -> list[Turn]:
    """Return the turns of the conversations that begin first, which have `min_turns` and more of at
    most `max_len` tokens, in the order in which they come; `num_turns` or a few less."""
    trace = read_trace(path)
    if any(request.hashes for request in trace.requests):
        return _hashed(trace, num_turns, divide, max_len, min_turns, vocab_size)
    found = _by_lengths(trace, divide, max_len, min_turns)
    return list(_in_turns(list(_whole(found, num_turns)), vocab_size))


def _whole(found: Iterable[list[_T]], num_turns: int) -> Iterator[list[_T]]:
    """Yield the first conversations that have `num_turns` together; a single one may be cut."""
    left = num_turns
    for turns in found:
        if len(turns) > left:
            if left == num_turns:
                yield turns[:left]
            return
        left -= len(turns)
        yield turns


def _hashed(
    trace: Trace, num_turns: int, divide: int, max_len: int, min_turns: int, vocab_size: int
) -> list[Turn]:
    """Conversations as the hashes have them; answers are not shared."""
    chosen = _chosen(trace, num_turns, divide, max_len, min_turns)
    requests = tuple(
        replace(
            trace.requests[number],
            num_prompt_tokens=ceil_div(trace.requests[number].num_prompt_tokens, divide),
            end_hashes=(),
        )
        for number in chosen
    )
    small = Trace(requests, trace.hash_block_size // divide)
    prompts = prompts_of(small, len(requests), max_len, vocab_size)
    return [
        Turn(prompt, prompt, num_known)
        for prompt, num_known in zip(prompts, small.ideal_hits(), strict=True)
    ]


def _chosen(trace: Trace, num_turns: int, divide: int, max_len: int, min_turns: int) -> list[int]:
    """Numbers of the requests of the conversations that begin first, in order of arrival.

    A request continues the latest one that has the last hash that both have, if that is more than
    half of it: a prefix that everybody shares makes no conversation."""
    first_of, last_with = dict[int, int](), dict[int, int]()
    members: dict[int, list[int]] = {}
    for number, request in enumerate(trace.requests):
        shared = 0
        while shared < len(request.hashes) and request.hashes[shared] in last_with:
            shared += 1
        is_continuing = 2 * shared > len(request.hashes)
        parent = last_with[request.hashes[shared - 1]] if is_continuing else number
        first = first_of[number] = first_of.get(parent, number)
        if request.num_prompt_tokens <= divide * max_len:
            members.setdefault(first, []).append(number)
        last_with.update(dict.fromkeys(request.hashes, number))
    found = [members[first] for first in sorted(members) if len(members[first]) >= min_turns]
    return sorted(number for numbers in _whole(found, num_turns) for number in numbers)


def _by_lengths(trace: Trace, divide: int, max_len: int, min_turns: int) -> list[list[_Lengths]]:
    """Lengths of prompt and history, for each turn of each conversation."""
    found: list[list[_Lengths]] = [[]]
    before = 0
    for request in trace.requests:
        total = request.num_prompt_tokens + request.num_output_tokens
        if request.num_prompt_tokens < before:
            found.append([])
        if total <= divide * max_len:
            found[-1].append(_lengths(request, divide))
        before = total
    return [each for each in found if len(each) >= min_turns]


@dataclass(frozen=True, slots=True)
class _Lengths:
    prompt: int
    history: int


def _lengths(request: TraceRequest, divide: int) -> _Lengths:
    prompt = ceil_div(request.num_prompt_tokens, divide)
    return _Lengths(prompt, prompt + request.num_output_tokens // divide)


def _in_turns(chosen: list[list[_Lengths]], vocab_size: int) -> Iterator[Turn]:
    """The first turns of all conversations before the second ones."""
    for place in range(max(map(len, chosen), default=0)):
        for number, lengths in enumerate(chosen):
            if place < len(lengths):
                text = tuple(
                    _FIRST_TOKEN + mix64(number << 32 | position) % (vocab_size - _FIRST_TOKEN)
                    for position in range(lengths[place].history)
                )
                known = lengths[place - 1].history if place else 0
                yield Turn(text[: lengths[place].prompt], text, known)
