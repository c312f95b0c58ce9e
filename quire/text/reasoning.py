"""Reasoning in a model's text: how a model marks what it thinks before it answers, and telling the
two apart as they stream.

Owns the tags and the parser. Reasoning is at an answer's beginning, between two tags; the first may
be in the prompt already, where the chat template writes it. The line breaks inside the tags and
behind them are neither reasoning nor answer, as in the templates that put both together again. What
is given does not depend on how the text was cut into pieces, and costs O(text). Only what may still
become a mark, and line breaks before one, are held back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.text.tools import Text

_MAX_HELD = 64
"""White space before the first mark, and line breaks before the second;
more than that is no layout."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around a model's reasoning."""

    name: str
    begin: str
    end: str
    plain: str = ""
    """What an answer without reasoning begins with, where it has a mark too (only of formats that
    have a parser of their own)."""
    shown: str = ""
    """What a template that knows the tags contains; nothing: the second one."""
    has_special_parts: bool = False
    """Tags are several tokens, some of which are special (`<|...|>`)."""

    @property
    def is_countable(self) -> bool:
        """Whether a token, or a text, is a mark, so that tokens between the two can be counted."""
        return not self.has_special_parts


THINK = ReasoningFormat("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
HARMONY = ReasoningFormat(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    plain="<|channel|>final<|message|>",
    shown="<|channel|>analysis<|message|>",
    has_special_parts=True,
)
"""gpt-oss: what it thinks is a message of its own, on another channel than the answer. `begin` and
`end` are what a usual answer has; `quire.text.harmony` reads all of them."""
REASONING_FORMATS = {each.name: each for each in (THINK, MISTRAL_THINK, HARMONY)}


def reasoning_of_template(source: str) -> ReasoningFormat | None:
    """Return the tags that a chat template knows; None where it knows none."""
    known = REASONING_FORMATS.values()
    return next((form for form in known if (form.shown or form.end) in source), None)


def is_thinking(form: ReasoningFormat, prompt: str, continued: str | None = None) -> bool:
    """Return whether an answer to `prompt` begins inside reasoning;
    `continued` is the message that it goes on with, if it does."""
    if continued is not None:
        return continued.rfind(form.begin) > continued.rfind(form.end)
    return prompt[-256:].rstrip().endswith(form.begin)


class ReasoningText(NamedTuple):
    """More of what the model thinks."""

    text: str


class ReasoningParser:
    """Reads an answer in a format other than harmony (`quire.text.harmony`). `feed` it pieces, then
    `flush` it. `is_inside`: the prompt ended with the first mark."""

    def __init__(self, form: ReasoningFormat, *, is_inside: bool = False) -> None:
        self._form = form
        self._state = _INSIDE if is_inside else _START
        self._is_fresh = is_inside
        """Whether only line breaks have come since the mark."""
        self._held = ""
        self.has_begun = is_inside
        """Whether there was reasoning, be it empty."""

    def feed(self, text: str) -> list[ReasoningText | Text]:
        """Return what a piece of text brings."""
        out: list[ReasoningText | Text] = []
        held, self._held = self._held + text, ""
        if self._state is _START:
            held = self._begin(held)
        if self._state is _INSIDE:
            thought, held = self._think(held)
            if thought:
                out.append(ReasoningText(thought))
        if self._state is _OUTSIDE:
            answer = self._freshened(held)
            if answer:
                out.append(Text(answer))
            held = ""
        self._held = held
        return out

    def flush(self) -> list[ReasoningText | Text]:
        """Give back what was held, as the answer has ended."""
        held, self._held = self._held, ""
        if self._state is _START:
            return [Text(held)] if held else []
        held = self._freshened(held)
        return [ReasoningText(held)] if held else []

    def _begin(self, text: str) -> str:
        """Return, at the answer's beginning, what is left to read, or to hold, of a text."""
        begin, rest = self._form.begin, text.lstrip(" \n\r\t")
        if len(text) - len(rest) <= _MAX_HELD:
            if rest.startswith(begin):
                self._state, self._is_fresh, self.has_begun = _INSIDE, True, True
                return rest[len(begin) :]
            if begin.startswith(rest):
                return text
        self._state = _OUTSIDE
        return text

    def _think(self, text: str) -> tuple[str, str]:
        """Inside reasoning: (what is known to be reasoning, the rest)."""
        end = self._form.end
        found = text.find(end)
        if found >= 0:
            thought = self._freshened(text[: found - _num_breaks(text, found)])
            self._state, self._is_fresh = _OUTSIDE, True
            return thought, text[found + len(end) :]
        keep = next(
            size
            for size in range(min(len(end) - 1, len(text)), -1, -1)
            if text.endswith(end[:size])
        )
        keep += _num_breaks(text, len(text) - keep)
        return self._freshened(text[: len(text) - keep]), text[len(text) - keep :]

    def _freshened(self, text: str) -> str:
        """Return the text without the line breaks that follow a tag."""
        if self._is_fresh:
            text = text.lstrip("\n")
            self._is_fresh = not text
        return text


_START, _INSIDE, _OUTSIDE = "start", "inside", "outside"


def _num_breaks(text: str, place: int) -> int:
    """Line breaks right before a place, as far as they are layout."""
    before = text[max(0, place - _MAX_HELD) : place]
    return len(before) - len(before.rstrip("\n"))
