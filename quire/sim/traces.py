"""Real traces: when requests came, how long they were, and which prefixes they shared.

A trace names whole prefixes by block hashes: equal hash, equal prefix up to that block. Tokens are
made up so that this holds to the token: equal hashes stand for equal tokens, and different ones
differ in their first token.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import operator
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.common.bounded_files import MAX_DATA_BYTES, open_lines
from quire.common.numbers import ceil_div
from quire.errors import ConfigError

_FIRST_HASH_TOKEN = 1 << 12
_FIRST_UNIQUE_TOKEN = 1 << 30
_MAX_HASH_BLOCK = 1 << 12
_MAX_TOKENS = 1 << 24
"""Of a prompt or an answer: each is made up token by token."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hashes: tuple[int, ...] = ()
    """Of the prompt's blocks, the last of which may be an unfinished one."""
    end_hashes: tuple[int, ...] = ()
    """Of the blocks that the answer completes."""


@dataclass(frozen=True, slots=True)
class Trace:
    """All requests in order of arrival, and how many tokens a hash stands for."""

    requests: tuple[TraceRequest, ...]
    hash_block_size: int

    def prompt(self, number: int) -> tuple[int, ...]:
        """Return synthetic tokens for a request's prompt."""
        request, size = self.requests[number], self.hash_block_size
        tokens: list[int] = []
        for place in range(ceil_div(request.num_prompt_tokens, size)):
            tokens.append(self._first_token(number, place))
            tokens.extend(_FOLLOWING[: size - 1])
        return tuple(tokens[: request.num_prompt_tokens])

    def output_token(self, number: int, position: int) -> int:
        """Return the synthetic token that a request's answer has at `position`
        (counted from the prompt's start)."""
        request = self.requests[number]
        place, offset = divmod(position, self.hash_block_size)
        if offset == 0:
            return self._first_token(number, place)
        # Where the prompt's last hash stands for an unfinished block, the answer must not look like
        # more of it.
        is_free = place < len(request.hashes) or place >= len(request.hashes) + len(
            request.end_hashes
        )
        return (
            _FIRST_UNIQUE_TOKEN + number
            if is_free and position == request.num_prompt_tokens
            else offset
        )

    def ideal_hits(self) -> list[int]:
        """Return tokens of each prompt that a cache of unlimited size must serve, from the hashes
        alone.

        A prompt's leading blocks that an earlier request contained (its unfinished last one is part
        of the answer's first), except its last token, whose logits are needed.
        """
        seen: set[int] = set()
        hits = []
        for request in self.requests:
            num_seen = 0
            for block_hash in (*request.hashes, *request.end_hashes):
                if block_hash not in seen:
                    break
                num_seen += 1
            hits.append(min(num_seen * self.hash_block_size, request.num_prompt_tokens - 1))
            seen.update(request.hashes, request.end_hashes)
        return hits

    def num_blocks_without_eviction(self, block_size: int) -> int:
        """Return blocks with which nothing is ever evicted, if every possible hit is made."""
        return sum(
            ceil_div(request.num_prompt_tokens + request.num_output_tokens, block_size)
            - hit // block_size
            + 1
            for request, hit in zip(self.requests, self.ideal_hits(), strict=True)
        )

    def _first_token(self, number: int, place: int) -> int:
        request = self.requests[number]
        if place < len(request.hashes):
            return _FIRST_HASH_TOKEN + request.hashes[place]
        place -= len(request.hashes)
        if place < len(request.end_hashes):
            return _FIRST_HASH_TOKEN + request.end_hashes[place]
        return _FIRST_UNIQUE_TOKEN + number


_FOLLOWING = list(range(1, _MAX_HASH_BLOCK))


NO_TRACE = (
    KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error,
    EOFError, zlib.error, gzip.BadGzipFile,
)  # fmt: skip
"""What reading something else raises, besides OSError."""


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Read a .csv or .jsonl file, gzipped or not, with the columns arrival_s, prompt_tokens,
    output_tokens and, where prefixes are known, block_hashes and end_block_hashes. Requests without
    a prompt or an answer are left out; those of a table without times come at once.

    Raises `ConfigError` for anything else.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} must be at least 1; leave it out for the whole trace")
    try:
        with open_lines(path, MAX_DATA_BYTES) as lines:
            requests = tuple(_read_requests(path, lines, limit))
    except FileNotFoundError:
        raise ConfigError(f"no trace file at {path}") from None
    except NO_TRACE as error:
        raise ConfigError(f"{path} is not a trace: {type(error).__name__} {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not requests:
        raise ConfigError(f"{path} holds no requests")
    return Trace(requests, _hash_block_size(path, requests))


def _read_requests(path: Path, lines: Iterable[str], limit: int | None) -> Iterator[TraceRequest]:
    is_csv = ".csv" in path.suffixes
    records: Iterable[dict[str, Any]] = (
        csv.DictReader(lines) if is_csv else (json.loads(line) for line in lines)
    )
    num_read = 0
    for record in records:
        if limit is not None and num_read >= limit:
            return
        num_prompt, num_output = int(record["prompt_tokens"]), int(record["output_tokens"])
        arrival_s = float(record["arrival_s"] or 0.0)
        if max(num_prompt, num_output) > _MAX_TOKENS or not math.isfinite(arrival_s):
            raise ValueError(
                f"of request {num_read}: {num_prompt} prompt tokens, {num_output} output tokens, "
                f"{arrival_s} s"
            )
        if num_prompt > 0 and num_output > 0:
            num_read += 1
            yield TraceRequest(
                arrival_s,
                num_prompt,
                num_output,
                _hashes(record.get("block_hashes")),
                _hashes(record.get("end_block_hashes")),
            )


def _hashes(given: Any) -> tuple[int, ...]:
    """Hashes of blocks: a list of them, or in a table numbers with spaces between."""
    listed = given.split() if isinstance(given, str) else given or ()
    return tuple(map(int if isinstance(given, str) else operator.index, listed))


def _hash_block_size(path: Path, requests: tuple[TraceRequest, ...]) -> int:
    """Return tokens per hash: the one power of two for which every prompt has as many hashes as
    whole, or begun, blocks."""
    hashed = [request for request in requests if request.hashes]
    size = 1
    while hashed and size <= _MAX_HASH_BLOCK:
        if all(
            request.num_prompt_tokens // size
            <= len(request.hashes)
            <= ceil_div(request.num_prompt_tokens, size)
            for request in hashed
        ):
            return size
        size *= 2
    if hashed:
        raise ConfigError(
            f"{path}: no power of two up to {_MAX_HASH_BLOCK} gives the number of block hashes"
        )
    return _MAX_HASH_BLOCK
