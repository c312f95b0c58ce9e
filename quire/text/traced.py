"""Strings that remember which of their characters a template wrote, through the operations that
templates use.

Owns `TracedText`, a `str` like any other in value, comparison and type tests, with trusted spans
beside it. Text without a record is text of users: an operation that is not traced here gives a
plain `str`, so a forgotten operation loses trust and never grants it. That direction is what makes
chat templates safe to tokenise; see `chat.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, Final, SupportsIndex

Span = tuple[int, int, int]
"""(start, end, level) of trusted characters; level as in `Tokenizer.control_level`."""

_NO_SPANS: Final[tuple[Span, ...]] = ()


class TracedText(str):
    """A string with trusted spans: sorted, disjoint, not empty;
    spans of one level that touch are one."""

    __slots__ = ("_spans",)
    _spans: tuple[Span, ...]

    def __new__(cls, text: str = "", spans: tuple[Span, ...] = _NO_SPANS) -> TracedText:
        traced = super().__new__(cls, text)
        traced._spans = spans
        return traced

    def __str__(self) -> str:
        return self  # `str(text)` in compiled templates must keep the record

    def __getitem__(self, key: Any) -> str:
        if not isinstance(key, slice):
            is_inside = isinstance(key, int) and 0 <= key < len(self)
            return self._cut(key, key + 1) if is_inside else super().__getitem__(key)
        start, stop, step = key.indices(len(self))
        return self._cut(start, max(start, stop)) if step == 1 else super().__getitem__(key)

    def strip(self, chars: str | None = None, /) -> str:
        stop = len(super().rstrip(chars))
        return self._cut(min(len(self) - len(super().lstrip(chars)), stop), stop)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(self) - len(suffix)) if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(super().split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(super().rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._locate(super().splitlines(keepends), 0)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, _ = super().partition(sep)
        first, second = len(before), len(before) + len(middle)
        return self._cut(0, first), self._cut(first, second), self._cut(second, len(self))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, _ = super().rpartition(sep)
        first, second = len(before), len(before) + len(middle)
        return self._cut(0, first), self._cut(first, second), self._cut(second, len(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return super().replace(old, new, count)
        return join_traced(_interleave(self.split(old, count), new))

    def join(self, iterable: Iterable[str], /) -> str:
        return join_traced(_interleave(list(iterable), self))

    def upper(self) -> str:
        return self._recase(super().upper())

    def lower(self) -> str:
        return self._recase(super().lower())

    def _recase(self, text: str) -> str:
        return _traced(text, self._spans) if self.isascii() else text

    def _cut(self, start: int, stop: int) -> str:
        """`self[start:stop]` for 0 <= start <= stop <= len(self), with its spans."""
        text = super().__getitem__(slice(start, stop))
        spans = self._spans
        first = bisect_right(spans, start, key=itemgetter(1)) if text else len(spans)
        kept = []
        for begin, end, level in spans[first:]:
            if begin >= stop:
                break
            kept.append((max(begin, start) - start, min(end, stop) - start, level))
        return _traced(text, tuple(kept))

    def _locate(self, parts: list[str], num_between: int) -> list[str]:
        """Return the record of parts that lie in this text from left to right,
        `num_between` characters apart at least."""
        located, position = [], 0
        for part in parts:
            position = self.index(part, position) if part else position
            located.append(self._cut(position, position + len(part)))
            position += len(part) + num_between
        return located


def trace(text: str, level: int) -> str:
    """Return a text all of whose characters are trusted at `level`."""
    return _traced(text, ((0, len(text), level),) if text else _NO_SPANS)


def spans_of(text: str) -> tuple[Span, ...]:
    """Return the trusted spans of any string."""
    return text._spans if isinstance(text, TracedText) else _NO_SPANS


def join_traced(parts: Iterable[str]) -> str:
    """`"".join(parts)` with the spans of the parts."""
    parts = list(parts)
    text = "".join(parts)
    spans: list[Span] = []
    offset = 0
    for part in parts:
        for start, end, level in spans_of(part):
            if spans and spans[-1][1] == offset + start and spans[-1][2] == level:
                spans[-1] = (spans[-1][0], offset + end, level)
            else:
                spans.append((offset + start, offset + end, level))
        offset += len(part)
    return _traced(text, tuple(spans))


def _traced(text: str, spans: tuple[Span, ...]) -> str:
    return TracedText(text, spans) if spans else text


def _interleave(parts: list[str], separator: str) -> list[str]:
    """parts[0], separator, parts[1], separator, ..."""
    mixed = [separator] * (2 * len(parts) - 1) if parts else []
    mixed[::2] = parts
    return mixed
