"""Calls of tools in a model's text: which notation a model writes them in, and reading it as it
streams.

Owns the notations and one parser for all of them. The parser looks at each character once and
remembers what it has seen of a call, so it costs O(text), and what it gives does not depend on how
the text was cut into pieces: an answer in one piece is a stream of one. What begins like a call and
is none is given back as the text that it is. Only text that may still become a call is held back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

_SPACE = " \n\r\t"
MAX_HELD_CHARS = 4096
"""Of a call whose name has not come yet; a name has at most 64."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: `begin`, then JSON objects
    `{"name": ..., <arguments_key>: {...}}`, then `end`."""

    name: str
    begin: str
    """"" where an answer that begins with an object is a call."""
    end: str
    arguments_key: str = "arguments"
    is_list: bool = False
    """The objects stand in a JSON list."""
    glue: str = ""
    """White space that the model puts between marker and object."""
    has_special_parts: bool = False
    """Calls are messages of their own, with several marks (`quire.text.harmony`)."""

    @property
    def first_mark(self) -> str:
        """What a call begins with, which may be one token; "" where there is no such mark."""
        return self.begin[: self.begin.find(">") + 1] if self.has_special_parts else self.begin


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", glue="\n")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", is_list=True)
LLAMA3 = ToolFormat("llama3_json", "", "", "parameters")
HARMONY_CALLS = ToolFormat(
    "harmony", "<|channel|>commentary to=functions.", "<|call|>", has_special_parts=True
)
"""Of gpt-oss; `begin` and `end` are what a usual call has."""
FORMATS = {each.name: each for each in (HERMES, MISTRAL, LLAMA3, HARMONY_CALLS)}


def format_of_template(source: str) -> ToolFormat | None:
    """Return the notation that a chat template shows to the model; None for one that is not known
    here.

    Templates that say nothing of tools get Hermes' notation, which is only ever written where a
    grammar forces it.
    """
    if "<|channel|>commentary" in source and '"functions."' in source:
        return HARMONY_CALLS
    if "[TOOL_CALLS]" in source and "[ARGS]" not in source:
        return MISTRAL
    if "<tool_call>" in source and "<function=" not in source:
        return HERMES
    if "<|python_tag|>" in source and '"parameters"' in source:
        return LLAMA3
    return HERMES if "tool" not in source else None


class Text(NamedTuple):
    """More of the answer's text."""

    text: str


class CallBegin(NamedTuple):
    """A call, whose name is complete."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: a part of a JSON text."""

    number: int
    text: str


Event = Text | CallBegin | CallArguments


class ToolParser:
    """Reads one answer. `feed` it pieces, then `flush` it."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._state = _TEXT if form.begin else _START
        self._held = ""
        """What may become a part of a call, as it was written."""
        self._space = ""
        """White space behind a call, which is text only if text follows."""
        self._object = _CallObject(form.arguments_key)
        self.num_calls = 0
        self._out: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Return what a piece of text brings."""
        begin, place = self._form.begin, 0
        while place < len(text):
            if self._state is _TEXT and not self._held:  # the usual case: far from any call
                found = text.find(begin[0], place) if begin else -1
                self._give(text[place : len(text) if found < 0 else found])
                if found < 0:
                    break
                place = found
            self._take(text[place])
            place += 1
        return self._take_out()

    def flush(self) -> list[Event]:
        """Give back what was held, as the answer has ended."""
        if not self._object.is_begun and self._state is not _AFTER:
            self._give(self._held)
        self._held = self._space = ""
        return self._take_out()

    def _take(self, char: str) -> None:
        if self._state is _TEXT:
            self._take_text(char)
        elif self._state is _OBJECT:
            self._take_object(char)
        elif self._state is _AFTER:
            self._take_after(char)
        elif self._state is _BETWEEN:
            self._take_between(char)
        else:
            self._take_gap(char)

    def _take_text(self, char: str) -> None:
        """Text, the end of which may be the beginning of a marker."""
        begin = self._form.begin
        held = self._held + char
        if not begin:
            self._give(char)
        elif held == begin:
            self._held, self._space, self._state = held, "", _GAP
        elif begin.startswith(held):
            self._held = held
        else:
            keep = next(
                size
                for size in range(len(held) - 1, -1, -1)
                if begin.startswith(held[len(held) - size :])
            )
            self._give(held[: len(held) - keep])
            self._held = held[len(held) - keep :]

    def _take_gap(self, char: str) -> None:
        """Between a marker, or the answer's beginning, and an object."""
        self._held += char
        if char == "{":
            self._state = _OBJECT
            self._object = _CallObject(self._form.arguments_key)
            self._object.take(char)
        elif len(self._held) > MAX_HELD_CHARS or (
            char not in _SPACE and not (self._form.is_list and char == "[")
        ):
            self._give_up()

    def _take_object(self, char: str) -> None:
        if not self._object.is_begun:
            self._held += char
        is_fine = self._object.take(char)
        if self._object.is_begun and self._held:
            self._out.append(CallBegin(self.num_calls, self._object.name))
            self._held = ""
        news = self._object.take_arguments() if self._object.is_begun else ""
        if news:
            self._out.append(CallArguments(self.num_calls, news))
        if self._object.is_over:
            if self._object.is_begun:
                self.num_calls += 1
                self._state = _AFTER
                self._object = _CallObject(self._form.arguments_key)
            else:
                self._give_up()
        elif not self._object.is_begun and (not is_fine or len(self._held) > MAX_HELD_CHARS):
            self._give_up()

    def _take_after(self, char: str) -> None:
        """Behind a call: its end, or the next one."""
        end = self._form.end
        if end:
            if self._held or char not in _SPACE:
                self._held += char
            if self._held == end:
                self._held, self._state = "", _BETWEEN
            elif not end.startswith(self._held):
                self._state, again, self._held = _TEXT, self._held, ""
                for each in again:
                    self._take_text(each)
        elif char == "{":
            self._state = _GAP
            self._take_gap(char)
        elif self._form.is_list and char == "]":
            self._state = _TEXT
        elif char not in _SPACE and char not in ",;":
            self._state = _TEXT
            self._take_text(char)

    def _take_between(self, char: str) -> None:
        """Behind the end of a call: white space, then another call or text."""
        if char in _SPACE and len(self._space) < MAX_HELD_CHARS:
            self._space += char
        else:
            self._state = _TEXT
            self._take_text(char)

    def _give_up(self) -> None:
        """Give up: it was no call."""
        held, self._held = self._held, ""
        self._state = _TEXT
        self._object = _CallObject(self._form.arguments_key)
        self._give(held)

    def _give(self, text: str) -> None:
        if text:
            self._out.append(Text(self._space + text))
            self._space = ""

    def _take_out(self) -> list[Event]:
        out, self._out = self._out, []
        return list(_merged(out))


_START, _TEXT, _GAP, _OBJECT, _AFTER, _BETWEEN = (
    "start",
    "text",
    "gap",
    "object",
    "after",
    "between",
)


def _merged(events: list[Event]) -> Iterator[Event]:
    """Successive parts of one thing as one."""

    def thing(event: Event) -> tuple[type, int]:
        return (type(event), -1 if isinstance(event, Text) else event.number)

    for _, group in groupby(events, thing):
        parts = list(group)
        first = parts[0]
        yield (
            first
            if isinstance(first, CallBegin)
            else first._replace(text="".join(each.text for each in parts))  # type: ignore[union-attr]
        )


class _CallObject:
    """One object of a call, character by character: its name,
    and its arguments as they are written."""

    def __init__(self, arguments_key: str) -> None:
        self._arguments_key = arguments_key
        self._place = "open"
        self._key = ""
        self._string: list[str] = []
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._arguments: list[str] = []
        self._has_arguments = False
        self.name = ""
        self.is_over = False

    @property
    def is_begun(self) -> bool:
        """Whether it is known to be a call: it has a name, and arguments that are an object."""
        return bool(self.name) and self._has_arguments

    def take_arguments(self) -> str:
        """Return what is new of them."""
        news, self._arguments = "".join(self._arguments), []
        return news

    def take(self, char: str) -> bool:
        """Take the next character; False where no such object continues so."""
        if self._place == "value":
            return self._take_value(char)
        if self._place == "string":
            return self._take_string(char)
        if char in _SPACE:
            return True
        if self._place == "colon":
            self._place = "before value" if char == ":" else self._place
            return char == ":"
        if self._place == "before value":
            return self._begin_value(char)
        return self._take_between(char)

    def _take_between(self, char: str) -> bool:
        """Outside of keys and values."""
        if self._place == "open":
            self._place = "first key"
            return char == "{"
        if char == '"' and self._place in ("first key", "key"):
            self._place, self._string = "string", []
            return True
        if char == "," and self._place == "next":
            self._place = "key"
            return True
        self.is_over = char == "}" and self._place in ("first key", "next")
        return self.is_over

    def _take_string(self, char: str) -> bool:
        """Within a key."""
        if char == '"' and not self._is_escaped:
            self._key, self._place = "".join(self._string), "colon"
        else:
            self._string.append(char)
            self._is_escaped = char == "\\" and not self._is_escaped
        return True

    def _begin_value(self, char: str) -> bool:
        self._place, self._depth, self._in_string, self._is_escaped, self._string = (
            "value",
            0,
            False,
            False,
            [],
        )
        is_name, is_arguments = self._key == "name", self._key == self._arguments_key
        if (is_name and (char != '"' or self.name)) or (
            is_arguments and (char != "{" or self._has_arguments)
        ):
            return False
        self._has_arguments = self._has_arguments or is_arguments
        return self._take_value(char)

    def _take_value(self, char: str) -> bool:
        """Within a value: its end is where its brackets and quotes are closed,
        or for a number what comes behind it."""
        if not self._in_string and self._depth == 0 and char in ",}" + _SPACE and self._string:
            self._place = "next"
            return True if char in _SPACE else self.take(char)
        (self._arguments if self._key == self._arguments_key else self._string).append(char)
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._depth == 0 and not self._in_string and char in '"}]':
            return self._end_value()
        return self._depth >= 0

    def _end_value(self) -> bool:
        self._place = "next"
        if self._key != "name":
            return True
        try:
            name = json.loads("".join(self._string))
            name.encode()  # half of a surrogate pair, which JSON can spell, is no text to answer
        except ValueError:
            return False
        self.name = name if isinstance(name, str) else ""
        return bool(self.name)
