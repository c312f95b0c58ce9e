"""A batch's input file: judged line by line before anything runs, then read again one line at a
time.

Nothing of it is held but the line that is wanted, and a digest of each `custom_id` while a file is
judged. Blocking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Set
from typing import Annotated, BinaryIO, Literal, NamedTuple

import msgspec
from msgspec import Meta

from quire.server.http.body import decode
from quire.server.http.errors import ApiError, bad_request

MAX_LINES = 50_000
"""As OpenAI's. So many blank lines are also borne."""
MAX_CUSTOM_ID_LEN = 512


class BatchLine(msgspec.Struct, kw_only=True):
    """One request of the input file."""

    custom_id: Annotated[str, Meta(max_length=MAX_CUSTOM_ID_LEN)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class PlacedLine(NamedTuple):
    """A line and where it is."""

    custom_id: str
    body: bytes
    offset: int
    end: int


class BatchInput:
    """One file. `open_content` opens it anew, so that a file that is deleted meanwhile is noticed,
    and not held."""

    def __init__(
        self, open_content: Callable[[], BinaryIO], endpoint: str, max_line_len: int
    ) -> None:
        self._open_content = open_content
        self._endpoint = endpoint
        self._max_line_len = max_line_len

    def check(self, is_wanted: Callable[[], bool]) -> int:
        """Return the number of lines, all of which are valid. Raises ApiError whose `param` is the
        number of the line that is wrong.

        Ends early, with any number, where it `is_wanted` no more.
        """
        seen: set[bytes] = set()
        with self._open_content() as source:
            for number, _, raw in self._lines(source):
                if not is_wanted():
                    break
                line = self._read(raw, number)
                digest = digest_of(line.custom_id)
                if digest in seen:
                    raise _wrong(number, "its custom_id is used twice", "duplicate_custom_id")
                seen.add(digest)
        if not seen:
            raise bad_request("the input file has no requests", code="empty_file")
        return len(seen)

    def line(self, offset: int, done: Set[bytes]) -> PlacedLine | None:
        """Return the next line at or behind `offset` whose `custom_id` has no digest in `done`;
        None at the end. Raises ApiError."""
        with self._open_content() as source:
            source.seek(offset)
            for number, begin, raw in self._lines(source):
                line = self._read(raw, number)
                if digest_of(line.custom_id) not in done:
                    return PlacedLine(line.custom_id, bytes(line.body), begin, source.tell())
        return None

    def unanswered(self, done: Set[bytes]) -> Iterator[str]:
        """Yield each `custom_id` that has no digest in `done`. Raises ApiError."""
        with self._open_content() as source:
            for number, _, raw in self._lines(source):
                custom_id = self._read(raw, number).custom_id
                if digest_of(custom_id) not in done:
                    yield custom_id

    def _lines(self, source: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
        """(number, offset, bytes) of each line that is not blank, from where the source is."""
        number = num_blank = 0
        offset = source.tell()
        while raw := source.readline(self._max_line_len + 1):
            if raw.strip():
                number += 1
                yield number, offset, raw
            else:
                num_blank += 1
            if number > MAX_LINES or num_blank > MAX_LINES or len(raw) > self._max_line_len:
                raise _wrong(number, f"too long, or more than {MAX_LINES} lines", "too_large")
            offset += len(raw)

    def _read(self, raw: bytes, number: int) -> BatchLine:
        if len(raw) > self._max_line_len:
            raise _wrong(number, f"it has more than {self._max_line_len} bytes", "too_large")
        try:
            line, _ = decode(raw, BatchLine)
        except ApiError as error:
            raise _wrong(number, error.message, "invalid_json_line") from None
        if line.url != self._endpoint:
            raise _wrong(number, "its url is not the batch's endpoint", "mismatched_url")
        return line


def digest_of(custom_id: str) -> bytes:
    """Return what stands for a `custom_id` of whatever length: no two have the same."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _wrong(number: int, what: str, code: str) -> ApiError:
    return bad_request(f"line {number}: {what}", param=str(number), code=code)
