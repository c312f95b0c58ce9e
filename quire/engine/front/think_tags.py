"""Automata over token ids that find a model's think tags, made once over the whole vocabulary: the
sampler, which sees token ids alone, can tell where a tag is, however it was tokenized.

Owns the making of the plan's `ThinkTagTokens`, over the bytes of tokens. The opening tag counts at
an answer's beginning only, behind nothing but white space, as `quire.text.reasoning` reads it; the
closing tag counts anywhere, and is searched as Knuth, Morris and Pratt do (Fast pattern matching in
strings, 1977). Where both are special tokens, only these tokens count, as in the grammars that
leave room for reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from quire.core.plan import ANY_STATE, ThinkTagTokens
from quire.errors import InvalidParameterError
from quire.text.tokenizer import Tokenizer

_WHITE_SPACE = b" \n\r\t"

Step = tuple[int, int, int]


@lru_cache(maxsize=4)
def tokens_of_tags(tokenizer: Tokenizer, marks: tuple[str, str], num_tokens: int) -> ThinkTagTokens:
    """Look through the first `num_tokens` tokens, once: 1 s for 150,000.

    Raises InvalidParameterError where none spell the second mark.
    """
    num_tokens = min(num_tokens, tokenizer.vocab_size)
    begin_id, end_id = (tokenizer.token_to_id(mark) for mark in marks)
    if begin_id in tokenizer.special_token_ids and end_id in tokenizer.special_token_ids:
        assert begin_id is not None and end_id is not None
        if max(begin_id, end_id) < num_tokens:
            blanks = [
                (0, token_id, 0)
                for token_id, data in _texts(tokenizer, num_tokens, ())
                if not data.strip(_WHITE_SPACE)
            ]
            return ThinkTagTokens(
                ((0, begin_id, 1), *blanks), 1, ((ANY_STATE, end_id, 1),), (end_id,)
            )
    begin, end = (mark.encode() for mark in marks)
    begin_steps: list[Step] = []
    end_steps: list[Step] = []
    pieces: dict[bytes, int] = {}
    tails = tuple(mark[place:] for mark in (begin, end) for place in range(len(mark)))
    for token_id, data in _texts(tokenizer, num_tokens, (begin_id, end_id)):
        is_piece = data in end or data in begin or data.startswith(tails)
        if is_piece or begin[:1] in data or data.isspace():
            begin_steps += _begin_steps(begin, token_id, data)
        if is_piece or end[:1] in data:
            end_steps += _end_steps(end, token_id, data)
        if data in end:
            pieces.setdefault(data, token_id)
    usual = [
        tokenizer.read_bytes(each)
        for each in tokenizer.encode(marks[1], add_special_tokens=False, parse_special=True)
    ]
    return ThinkTagTokens(
        tuple(begin_steps), len(begin), tuple(end_steps), _token_ids(end, pieces, usual)
    )


def _texts(
    tokenizer: Tokenizer, num_tokens: int, marks: tuple[int | None, ...]
) -> Iterator[tuple[int, bytes]]:
    """Yield tokens that have a text, and that text; special tokens other than the tags have none
    that counts."""
    hidden = tokenizer.special_token_ids - set(marks)
    for token_id in range(num_tokens):
        data = b"" if token_id in hidden else tokenizer.read_bytes(token_id)
        if data:
            yield token_id, data


def _begin_steps(mark: bytes, token_id: int, data: bytes) -> Iterator[Step]:
    rest = data.lstrip(_WHITE_SPACE)
    if _agree(mark, rest):
        yield 0, token_id, min(len(rest), len(mark))
    yield from (
        (s, token_id, min(s + len(data), len(mark)))
        for s in range(1, len(mark))
        if _agree(mark[s:], data)
    )


def _end_steps(mark: bytes, token_id: int, data: bytes) -> Iterator[Step]:
    found = [_search(mark, state, data) for state in range(len(mark))]
    if found[0]:
        yield ANY_STATE, token_id, found[0]
    yield from ((state, token_id, to) for state, to in enumerate(found) if to != found[0])


def _agree(left: bytes, right: bytes) -> bool:
    """Return whether one goes on where the other ends."""
    return left.startswith(right) or right.startswith(left)


def _search(mark: bytes, state: int, data: bytes) -> int:
    """Return the KMP state after consuming `data` from `state`; it stops at a full match."""
    known = mark[:state] + data
    if mark in known:
        return len(mark)
    return next(
        size for size in range(min(len(mark), len(known)), -1, -1) if known.endswith(mark[:size])
    )


def _token_ids(mark: bytes, pieces: dict[bytes, int], usual: list[bytes]) -> tuple[int, ...]:
    """Return for each state the token that goes on: as the tokenizer splits the tag,
    else the longest that fits, else the first."""
    found: dict[int, int] = {}
    for state in range(len(mark)):
        fitting = [mark[state:to] for to in range(len(mark), state, -1) if mark[state:to] in pieces]
        if fitting:
            found[state] = pieces[fitting[0]]
    if b"".join(usual) == mark and all(data in pieces for data in usual):
        sizes = [sum(map(len, usual[:place])) for place in range(len(usual))]
        found |= {state: pieces[data] for state, data in zip(sizes, usual, strict=True)}
    lengths = {token_id: len(data) for data, token_id in pieces.items()}
    state = 0
    while state < len(mark):
        if state not in found:
            raise InvalidParameterError(
                f"thinking_token_budget: the tokenizer has no tokens for {mark.decode()!r}, "
                "which has to end the thoughts",
                param="thinking_token_budget",
            )
        state += lengths[found[state]]
    return tuple(found.get(state, found[0]) for state in range(len(mark)))
