"""An answer in the forms of a chat completion: as the deltas of a stream, and as a whole message,
which is their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.api.answer_format import AnswerFormat, Event
from quire.server.api.tools import call_id
from quire.text.reasoning import ReasoningText
from quire.text.tools import CallArguments, Text


class ChoiceReader:
    """One choice."""

    def __init__(self, answer_format: AnswerFormat, *, shows_reasoning: bool = True) -> None:
        self._reader = answer_format.reader()
        self._tools = answer_format.tools
        self._shows_reasoning = shows_reasoning

    @property
    def num_reasoning_tokens(self) -> int:
        """As OpenAI's `reasoning_tokens` counts them."""
        return self._reader.num_reasoning_tokens

    def deltas(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> list[dict[str, Any]]:
        """Return what a piece of the answer brings."""
        events = self._reader.feed(text, token_ids, is_last=is_last)
        return [
            self._delta(event)
            for event in events
            if self._shows_reasoning or not isinstance(event, ReasoningText)
        ]

    def message(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return a whole answer: its `content`, and its reasoning and `tool_calls` where there are
        any. A content that is empty beside either is null.
        """
        calls: dict[int, dict[str, Any]] = {}
        texts = {"content": "", "reasoning": "", "reasoning_content": ""}
        for delta in self.deltas(text, token_ids, is_last=True):
            for part in delta.pop("tool_calls", ()):
                call = calls.setdefault(
                    part["index"], {key: value for key, value in part.items() if key != "index"}
                )
                if call["function"] is not part["function"]:
                    call["function"]["arguments"] += part["function"]["arguments"]
            for name, more in delta.items():
                texts[name] += more
        message: dict[str, Any] = {name: value for name, value in texts.items() if value}
        if calls:
            message["tool_calls"] = list(calls.values())
        return {"content": None if message else "", **message}

    def finish_reason(self, reason: str | None) -> str | None:
        """Return OpenAI's reason: a call that was demanded by name ends with `stop`."""
        has_called = (
            self._tools is not None and self._tools.mode != "named" and self._reader.num_calls
        )
        return "tool_calls" if reason == "stop" and has_called else reason

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, ReasoningText):  # under both names that clients know
            return {"reasoning": event.text, "reasoning_content": event.text}
        if isinstance(event, Text):
            return {"content": event.text}
        if isinstance(event, CallArguments):
            return {"tool_calls": [{"index": event.number, "function": {"arguments": event.text}}]}
        assert self._tools is not None, "calls are read only where there are tools"
        function = {"name": event.name, "arguments": ""}
        begun = {
            "index": event.number,
            "id": call_id(self._tools.form),
            "type": "function",
            "function": function,
        }
        return {"tool_calls": [begun]}
