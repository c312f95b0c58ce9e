"""Streams the answers of requests that are generated together, one after the other: the first live,
the others in turn.

Owns the order and the headings of what is shown, never where it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.engine.front.outputs import RequestOutput

_HEADING_CHARS = 70


class _AnswerKey(NamedTuple):
    """One answer: a request's number and a sequence of it."""

    request: int
    sequence: int


class StreamPrinter:
    """Shows cumulative outputs of requests "0", "1", ... through `write`.

    With several answers, each gets a heading; a single one is shown bare.
    """

    def __init__(
        self, prompts: Sequence[str], num_sequences: int, write: Callable[[str], None]
    ) -> None:
        self._prompts = prompts
        self._places = [_AnswerKey(i, j) for i in range(len(prompts)) for j in range(num_sequences)]
        self._write = write
        self._texts: dict[_AnswerKey, str] = {}
        self._done: set[_AnswerKey] = set()
        self._turn = 0
        self._num_shown = 0

    def take(self, output: RequestOutput) -> None:
        """Take in what a request has now, and show what it is the turn of."""
        request = int(output.request_id)
        for each in output.outputs:
            place = _AnswerKey(request, each.index)
            self._texts[place] = each.text
            if each.finish_reason is not None or output.finished:
                self._done.add(place)
        if output.error is not None:
            self._texts[_AnswerKey(request, 0)] = f"[failed: {output.error}]"
        if output.finished:
            self._done.update(place for place in self._places if place.request == request)
        self._show()

    def _show(self) -> None:
        while self._turn < len(self._places):
            place = self._places[self._turn]
            text = self._texts.get(place, "")
            if self._num_shown == 0 and len(self._places) > 1 and (text or place in self._done):
                self._write(self._heading(place))
            if len(text) > self._num_shown:
                self._write(text[self._num_shown :])
                self._num_shown = len(text)
            if place not in self._done:
                return
            self._write("\n")
            self._turn += 1
            self._num_shown = 0

    def _heading(self, place: _AnswerKey) -> str:
        """`[2/5] the prompt, cut to one line`, with `#1` for a request's second answer."""
        prompt = " ".join(self._prompts[place.request].split())
        if len(prompt) > _HEADING_CHARS:
            prompt = prompt[: _HEADING_CHARS - 1] + "…"
        variant = f" #{place.sequence}" if place.sequence else ""
        gap = "\n" if self._turn else ""
        return f"{gap}[{place.request + 1}/{len(self._prompts)}{variant}] {prompt}\n"
