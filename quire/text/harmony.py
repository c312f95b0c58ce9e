"""Answers in gpt-oss' harmony format: messages on channels, read as they stream.

An answer goes on behind `<|start|>assistant`. Each of its messages is a header (a channel, for a
call a recipient, perhaps a content type), `<|message|>` and a body. The channel `analysis` is
reasoning; `final`, and `commentary` without a recipient, are text; a message to `functions.NAME` is
a call whose body is its arguments. What is none of these, or is read by no one in this request, is
given back as it was written. A message ends where another one begins, so that a body may spell a
mark's name. What is given does not depend on how the text was cut into pieces, and costs O(text).
"""

from __future__ import annotations

import json
import re
from typing import Final

from quire.text.reasoning import ReasoningText
from quire.text.tools import CallArguments, CallBegin, Text

_MAX_HEADER: Final = 256
"""Characters; a function's name has at most 64."""
_MESSAGE: Final = "<|message|>"
_ENDS: Final = tuple(f"<|{name}|>" for name in ("end", "call", "return"))
_NEXT: Final = "<|start|>assistant"
_BOUNDARIES: Final = tuple(end + _NEXT for end in _ENDS)
_BOUNDARY: Final = re.compile("|".join(map(re.escape, _BOUNDARIES)))
_LONGEST: Final = max(map(len, _BOUNDARIES))
_HEADER: Final = re.compile(
    r"\s*(?:to=(?P<early>[^\s<]+)\s*)?<\|channel\|>(?P<channel>\w+)(?:\s+to=(?P<late>[^\s<]+))?"
    r"\s*(?:<\|constrain\|>)?\s*[\w/.+-]*\s*<\|message\|>"
)
_BEGINNINGS: Final = ("<|channel|>", "to=")
_FUNCTION: Final = re.compile(r"functions\.([\w-]{1,64})")
_REASONING, _TEXT, _CALL, _RAW = "reasoning", "text", "call", "raw"

Event = ReasoningText | Text | CallBegin | CallArguments


class HarmonyParser:
    """Reads one answer. `feed` it pieces, then `flush` it.

    `reads_reasoning` and `reads_calls`: whether these are told apart from text. `is_inside`: the
    prompt ended with the header of reasoning.
    """

    def __init__(
        self, *, reads_reasoning: bool = True, reads_calls: bool = True, is_inside: bool = False
    ) -> None:
        self._reads_reasoning, self._reads_calls = reads_reasoning, reads_calls
        self._kind: str | None = _REASONING if is_inside else None
        """Of the message whose body is read; None in a header."""
        self._held = ""
        """What is undecided: a header, a call's beginning, or what may become a boundary."""
        self._header = ""
        """Of a call that is not known to be one."""
        self._name = ""
        self._arguments: list[str] = []
        self._has_begun = {_REASONING: is_inside, _TEXT: False}
        """Kinds of which there was a message, be it empty."""
        self._num_begun = 0
        self.num_calls = 0
        """Calls that are complete: their arguments are an object."""
        self._out: list[Event] = []

    @property
    def has_begun(self) -> bool:
        """Whether there was reasoning, be it empty."""
        return self._has_begun[_REASONING]

    def feed(self, text: str) -> list[Event]:
        """Return what a piece of text brings."""
        self._held += text
        while (self._kind is None and self._read_header()) or self._read_body(is_last=False):
            pass
        return self._take_out()

    def flush(self) -> list[Event]:
        """Give back what was held, as the answer has ended."""
        if self._kind is None:
            self._give(_RAW, self._held)
            self._held = ""
        else:
            if self._kind != _RAW:
                self._held = self._held.removesuffix(next(filter(self._held.endswith, _ENDS), ""))
            self._read_body(is_last=True)
            self._end_message()
        return self._take_out()

    def _read_header(self) -> bool:
        """Return whether a header has ended, or was none, so that its body can be read."""
        header, mark, rest = self._held.partition(_MESSAGE)
        if not mark:
            begun = header.lstrip()
            is_possible = any(
                begun.startswith(each) or each.startswith(begun) for each in _BEGINNINGS
            )
            if is_possible and len(header) <= _MAX_HEADER:
                return False
            self._kind = _RAW
            return True
        self._held, header = rest, header + mark
        self._kind = self._kind_of(header)
        if self._kind == _CALL:
            self._header = header
        elif self._kind == _RAW:
            self._give(_RAW, header)
        else:
            if self._has_begun[self._kind]:
                self._give(self._kind, "\n")
            self._has_begun[self._kind] = True
        return True

    def _kind_of(self, header: str) -> str:
        match = _HEADER.fullmatch(header) if len(header) <= _MAX_HEADER else None
        if match is None:
            return _RAW
        recipient, channel = match["early"] or match["late"], match["channel"]
        if recipient is not None:
            function = _FUNCTION.fullmatch(recipient)
            if function is None or not self._reads_calls:
                return _RAW
            self._name = function[1]
            return _CALL
        if channel == "analysis":
            return _REASONING if self._reads_reasoning else _RAW
        return _TEXT if channel in ("final", "commentary") else _RAW

    def _read_body(self, *, is_last: bool) -> bool:
        """Read on in a body; return whether it has ended, so that a header follows."""
        if self._kind is None:
            return False
        boundary = _BOUNDARY.search(self._held)
        if boundary is not None:
            body, self._held = self._held[: boundary.start()], self._held[boundary.end() :]
        else:
            keep = 0 if is_last else _num_undecided(self._held)
            end = len(self._held) - keep
            body, self._held = self._held[:end], self._held[end:]
        self._give(self._kind, body)
        if boundary is None:
            return False
        if self._kind == _RAW:
            self._give(_RAW, boundary[0])
        self._end_message()
        return True

    def _end_message(self) -> None:
        if self._kind == _CALL and self._header:  # no arguments have come: no call
            self._give(_RAW, self._header)
        elif self._kind == _CALL:
            self.num_calls += _is_object("".join(self._arguments))
        self._kind, self._header, self._arguments = None, "", []

    def _give(self, kind: str, text: str) -> None:
        if not text:
            return
        if kind == _CALL:
            self._give_arguments(text)
        else:
            self._out.append(ReasoningText(text) if kind == _REASONING else Text(text))

    def _give_arguments(self, text: str) -> None:
        """More of a body that is a call's arguments if it begins as an object."""
        if self._header:
            stripped = text.lstrip()
            if not stripped:
                return
            header, self._header = self._header, ""
            if stripped[0] != "{":
                self._kind = _RAW
                self._give(_RAW, header + text)
                return
            self._out.append(CallBegin(self._num_begun, self._name))
            self._num_begun += 1
            text = stripped
        self._arguments.append(text)
        self._out.append(CallArguments(self._num_begun - 1, text))

    def _take_out(self) -> list[Event]:
        out, self._out = self._out, []
        return out


def _num_undecided(text: str) -> int:
    """Return how many characters at the end may be the beginning of a boundary."""
    sizes = range(min(_LONGEST - 1, len(text)), 0, -1)
    return next(
        (size for size in sizes if any(each.startswith(text[-size:]) for each in _BOUNDARIES)), 0
    )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
