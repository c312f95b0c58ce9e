"""Lines of text files: what ends one, what is no text, and what comes before the first."""

from __future__ import annotations

import io
from argparse import Namespace
from pathlib import Path

import pytest

from quire.cli.parser import UsageError
from quire.cli.prompts import read_prompts
from quire.cli.text_lines import read_lines
from quire.errors import ConfigError

TEXT = "\ufeff one\u2028two\x85three\x0cfour \r\n\r\n\u4f60\u597d\n"
LINES = ["one\u2028two\x85three\x0cfour", "\u4f60\u597d"]


def _typed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Have standard input be these bytes, where the locale would have others."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


def _read(*names: str) -> list[str]:
    return [each.text for each in read_lines(list(names))]


def _prompts(name: str) -> list[str]:
    args = Namespace(prompt=[], prompts_file=name, chat=False, system=None, chat_template=None)
    return [each.text for each in read_prompts(args, None)]


def test_a_line_ends_where_a_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON and prose may hold separators of Unicode, and a form feed."""
    path = tmp_path / "lines.txt"
    path.write_bytes(TEXT.encode())
    assert _read(str(path)) == LINES
    assert [each.place for each in read_lines([str(path)])] == [f"{path}:1", f"{path}:3"]
    assert [each.strip() for each in _prompts(str(path))] == LINES
    _typed(monkeypatch, TEXT.encode())
    assert _read(str(path), "-", "-") == LINES * 2
    _typed(monkeypatch, TEXT.encode())
    assert [each.strip() for each in _prompts("-")] == LINES
    path = tmp_path / "lines.jsonl"
    path.write_bytes('\ufeff"a\u2028b"\r\n{"prompt": "c\x85d"}'.encode())
    assert _prompts(str(path)) == ["a\u2028b", "c\x85d"]


def test_input_that_is_no_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _typed(monkeypatch, b"one\n\xff\n")
    with pytest.raises(UsageError, match="standard input cannot be read: it is not UTF-8"):
        list(read_lines([]))
    _typed(monkeypatch, b"one\n\xff\n")
    with pytest.raises(ConfigError, match="- is not UTF-8 text: invalid start byte at byte 4"):
        _prompts("-")
