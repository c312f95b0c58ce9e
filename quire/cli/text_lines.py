"""Lines of text files, for commands that do the same with each of many texts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TextIO

from quire.cli.parser import UsageError


def add_file_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """FILE, any number of times; standard input where there is none."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help=f"text files, a {what} on each line; - or none is standard input",
    )


def read_lines(files: list[str]) -> Iterator[str]:
    """The lines that are not empty, in order. Raises UsageError for a file that cannot be read."""
    for name in files or ["-"]:
        if name == "-":
            yield from _lines(sys.stdin)
            continue
        try:
            with open(name, encoding="utf-8") as file:
                yield from _lines(file)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"{name} cannot be read: {reason}") from None


def _lines(stream: TextIO) -> Iterator[str]:
    for line in stream:
        text = line.strip()
        if text:
            yield text
