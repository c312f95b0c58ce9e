"""Lines of text files, for commands that do the same with each of many texts."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple, TextIO

from quire.cli.parser import UsageError
from quire.common.bounded_files import MAX_TEXT_BYTES, bounded_lines, open_lines
from quire.errors import RequestError

_ENCODING = "utf-8-sig"
"""UTF-8, of which some programs write three bytes before the first line."""


class TextLine(NamedTuple):
    """A line, and where it stands: `documents.txt:12`."""

    text: str
    place: str


def add_file_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """FILE, any number of times; standard input where there is none."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        default=[],  # without which it would be said to be missing
        help=f"text files, a {what} on each line; - or none is standard input",
    )


def read_lines(files: list[str]) -> Iterator[TextLine]:
    """The lines that are not empty, in order. Raises UsageError for a file that cannot be read, of
    those that are named before the first line of any, and where there is no line at all."""
    for name in files:
        with _readable(name):
            path = Path(name)
            if name != "-" and (path.is_file() or path.is_dir() or not path.exists()):
                path.open("rb").close()  # a pipe or a terminal could lose its text
    num_lines = 0
    for name in files or ["-"]:
        shown = "standard input" if name == "-" else name
        with _readable(shown):
            for number, line in _lines(name):
                num_lines += 1
                yield TextLine(line, f"{shown}:{number}")
    if not num_lines:
        given = ", ".join(files) or "standard input"
        raise UsageError(f"{given}: no line has any text; give one text on each line")


def read_all_lines(files: list[str]) -> list[TextLine]:
    """Return the lines, for a command that needs all at once. Raises UsageError, also for more than
    memory should hold."""
    lines, num_chars = list[TextLine](), 0
    for line in read_lines(files):
        num_chars += len(line.text)
        if num_chars > MAX_TEXT_BYTES:
            raise UsageError(
                f"{line.place}: the lines up to here have more than {MAX_TEXT_BYTES >> 20} Mi "
                "characters; give fewer at once"
            )
        lines.append(line)
    return lines


def check_apart(files: list[str], output: str | None) -> None:
    """Raise UsageError for an output that is one of the files: opening it would empty it, also of
    the lines that are still to be read."""
    if output is None or not os.path.isfile(output):  # nor where it may not be looked at
        return
    for name in files:
        with suppress(OSError):  # it may not be there, which is told when it is read
            if os.path.samefile(name, output):
                raise UsageError(f"--output {output} is one of the files to read; name another one")


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise UsageError(f"{name} cannot be read: it is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None


def _lines(name: str) -> Iterator[tuple[int, str]]:
    with _stdin_lines() if name == "-" else open_lines(name, encoding=_ENCODING) as stream:
        for number, line in enumerate(stream, 1):
            text = line.strip()
            if text:
                yield number, text


@contextmanager
def lines_named(lines: Sequence[TextLine], name: str) -> Iterator[None]:
    """Have an error about one of these lines, which were given to a call as `name`, say where it
    stands."""
    try:
        yield
    except RequestError as error:
        found = re.fullmatch(rf"{name}\[(\d+)\]", error.place or f"{name}[0]" * (len(lines) == 1))
        if found is not None:
            error.place = lines[int(found[1])].place
        raise


@contextmanager
def _stdin_lines() -> Iterator[Iterator[str]]:
    with strict_stdin() as stdin:
        yield bounded_lines(stdin)


@contextmanager
def strict_stdin() -> Iterator[TextIO]:
    """Standard input as UTF-8, whatever the locale says, and bytes that are none an error."""
    if isinstance(sys.stdin, TextIOWrapper) and sys.stdin.encoding != _ENCODING:  # not twice
        sys.stdin.reconfigure(encoding=_ENCODING, errors="strict")
    yield sys.stdin
