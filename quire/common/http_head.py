"""The head of an answer in HTTP/1.1 (RFC 9112), read strictly: what another reader could take for
something else is refused, and handed on to none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

CHUNKED = -1
"""In place of a length."""
_STATUS_LINE = re.compile(r"HTTP/1\.[0-9] [1-5][0-9][0-9]( .*)?")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Tabs may be within values."""
_MAX_SHOWN_CHARS = 80


class AnswerHead(NamedTuple):
    """Status and headers; names are lower case."""

    version: str
    status: int
    headers: dict[str, str]


def parse_head(data: bytes) -> AnswerHead:
    """Parse what stands before the empty line. Raises ValueError saying what is wrong."""
    status_line, *lines = data.decode("latin-1").split("\r\n")
    if not _STATUS_LINE.fullmatch(status_line):
        raise ValueError(f"this is not an answer in HTTP/1.1: {status_line[:_MAX_SHOWN_CHARS]!r}")
    fields = list[tuple[str, str]]()
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name) or _CONTROLS.search(value):
            raise ValueError(f"the answer has no valid header in {line[:_MAX_SHOWN_CHARS]!r}")
        fields.append((name.lower(), value.strip(" \t")))
    version, _, rest = status_line.partition(" ")
    return AnswerHead(version, int(rest[:3]), joined(fields))


def joined(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by name, those that come more than once as one (RFC 9110, 5.3).

    Cookies to keep, whose values have commas of their own, stay apart by line ends, which none has.
    """
    found = dict[str, str]()
    for name, value in fields:
        before = found.get(name)
        found[name] = value if before is None else f"{before}{_JOINTS.get(name, ', ')}{value}"
    return found


_JOINTS = {"set-cookie": "\n", "cookie": "; "}


def split(name: str, value: str) -> list[str]:
    """Return the values of a header as they may be sent, each in a line of its own."""
    return value.split("\n") if name == "set-cookie" else [value]


def body_length(headers: Mapping[str, str]) -> int | None:
    """Return the bytes of the body, or CHUNKED; None where it ends with the connection. Raises
    ValueError for a length or a coding that is none."""
    coding = headers.get("transfer-encoding", "identity").lower()
    if coding == "chunked":
        return CHUNKED
    if coding != "identity":
        raise ValueError(f"the answer has transfer-encoding {coding[:_MAX_SHOWN_CHARS]!r}")
    if "content-length" not in headers:
        return None
    lengths = {each.strip() for each in headers["content-length"].split(",")}
    length = lengths.pop()
    if lengths or not _LENGTH.fullmatch(length):
        raise ValueError(f"the answer's length is {headers['content-length'][:_MAX_SHOWN_CHARS]!r}")
    return int(length)


def options_of(headers: Mapping[str, str]) -> frozenset[str]:
    """Return what `connection` names, in lower case."""
    return frozenset(each.strip() for each in headers.get("connection", "").lower().split(","))
