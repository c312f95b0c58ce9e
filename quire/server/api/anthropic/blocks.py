"""Blocks of /v1/messages: those that turns bring, as a chat's messages;
and those that an answer brings, as they grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from quire.engine.front.outputs import CompletionOutput
from quire.media.parts import image_part, is_image
from quire.server.api.answer_format import AnswerFormat, Event
from quire.server.api.anthropic.shapes import ContentBlock
from quire.server.api.openai.messages import (
    MAX_CALLS_OF_MESSAGE,
    arguments_of,
    part_text,
    string_field,
    text_of,
)
from quire.server.api.tools import call_id
from quire.server.http.body import shape
from quire.server.http.errors import ApiError, bad_request
from quire.server.http.responses import StreamEvent
from quire.text.reasoning import ReasoningText
from quire.text.tools import CallArguments, CallBegin, Text

Block = dict[str, Any]


class Turn(msgspec.Struct, kw_only=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Annotated[Block, shape(ContentBlock)]]


# -- what turns bring
# --------------------------------------------------------------------------------------------------


def messages_of(
    turns: Sequence[Turn], system: str | None, unread: list[str] | None = None
) -> list[dict[str, Any]]:
    """Return the turns as templates read them. Raises ApiError 400 naming the block that is wrong.

    `unread` is told where there is reasoning that only the service that made them can read.
    """
    if not turns:
        raise bad_request("messages: at least one is needed", param="messages")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for number, turn in enumerate(turns):
        where = f"messages[{number}].content"
        if isinstance(turn.content, str) or not turn.content or turn.role == "system":
            messages.append({"role": turn.role, "content": text_of(turn.content, where)})
        elif turn.role == "user":
            messages += _user_messages(turn.content, where)
        else:
            messages.append(
                _assistant_message(turn.content, where, [] if unread is None else unread)
            )
    if "tool_calls" in messages[-1]:
        raise bad_request(
            "messages: a turn with the results of the last one's tool_use is missing",
            param="messages",
        )
    return messages


def _user_messages(blocks: Sequence[Block], where: str) -> list[dict[str, Any]]:
    """Results of tools first, then what the user says."""
    results: list[dict[str, Any]] = []
    parts: list[Block] = []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if is_image(block):
            parts.append(image_part(block, place))
            continue
        if block.get("type") != "tool_result":
            parts.append({"type": "text", "text": part_text(block, place)})
            continue
        content = block.get("content")
        if not isinstance(content, str | list | None):
            raise bad_request(
                f"{place}.content: it must be a text, or a list of texts", param=f"{place}.content"
            )
        text = text_of(content or "", f"{place}.content")
        results.append(
            {
                "role": "tool",
                "tool_call_id": string_field(block, "tool_use_id", place),
                "content": text,
            }
        )
    if not parts:
        return results
    has_images = any(map(is_image, parts))
    content_of_user = parts if has_images else "\n".join(part["text"] for part in parts)
    return [*results, {"role": "user", "content": content_of_user}]


def _assistant_message(blocks: Sequence[Block], where: str, unread: list[str]) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if block.get("type") == "tool_use":
            calls.append(_call(block, place))
        elif block.get("type") == "thinking":
            texts["thinking"].append(string_field(block, "thinking", place, max_len=None))
        elif block.get("type") == "redacted_thinking":
            unread.append(place)
        else:
            texts["text"].append(part_text(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts["text"])}
    if len(calls) > MAX_CALLS_OF_MESSAGE:
        raise bad_request(
            f"{where}: it has more than {MAX_CALLS_OF_MESSAGE} blocks of type tool_use", param=where
        )
    if calls:
        message["tool_calls"] = calls
    if texts["thinking"]:
        message["reasoning_content"] = "\n".join(texts["thinking"])
    return message


def _call(block: Block, place: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise bad_request(f"{place}.input: it must be an object", param=f"{place}.input")
    function = {"name": string_field(block, "name", place), "arguments": arguments}
    return {"id": string_field(block, "id", place), "type": "function", "function": function}


# -- what an answer brings
# -----------------------------------------------------------------------------------------------


class ContentBlocks:
    """The blocks of one answer, and the events that tell of their growth."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        self._reader = answer_format.reader()
        self._parts: list[str] = []
        """The open block's text."""
        self._is_open = False
        self._num_begun = 0
        self.content: list[Block] = []
        """Blocks that are complete. A call whose input is no object, because it was cut or for want
        of a better model, is the text that it is; a stream has begun it by then, and leaves it
        unfinished.
        """

    @property
    def has_calls(self) -> bool:
        """Whether there is a call that can be answered."""
        return any(block["type"] == "tool_use" for block in self.content)

    def take(self, completion: CompletionOutput) -> list[StreamEvent]:
        """Return what a piece of the answer brings."""
        is_last = completion.finish_reason is not None
        events: list[StreamEvent] = []
        for each in self._reader.feed(completion.text, completion.token_ids, is_last=is_last):
            events += self._grow(each)
        return [*events, *(self._close() if is_last and self._is_open else ())]

    def _grow(self, event: Event) -> list[StreamEvent]:
        kind = _KINDS[type(event)]
        is_new = (
            not self._is_open or self.content[-1]["type"] != kind or isinstance(event, CallBegin)
        )
        events = self._begin(kind, event) if is_new else []
        if isinstance(event, CallBegin):
            return events
        self._parts.append(event.text)
        name, field = _DELTAS[kind]
        return [
            *events,
            self._event("content_block_delta", delta={"type": name, field: event.text}),
        ]

    def _begin(self, kind: str, event: Event) -> list[StreamEvent]:
        events = self._close() if self._is_open else []
        self._is_open, self._parts = True, []
        self._num_begun += 1
        block: Block = {"type": kind}
        if isinstance(event, CallBegin):
            assert self._format.tools is not None, "calls are read only where there are tools"
            block |= {
                "id": call_id(self._format.tools.form, "toolu"),
                "name": event.name,
                "input": {},
            }
        else:
            block |= {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
        self.content.append(block)
        return [*events, self._event("content_block_start", content_block=dict(block))]

    def _close(self) -> list[StreamEvent]:
        block, text = self.content[-1], "".join(self._parts)
        self._is_open = False
        if block["type"] == "tool_use":
            try:
                block["input"] = arguments_of(text, "input")
            except ApiError:
                self.content[-1] = {
                    "type": "text",
                    "text": f'{{"name": "{block["name"]}", "input": {text}',
                }
        else:
            block[block["type"]] = text
        return [self._event("content_block_stop")]

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        return StreamEvent(kind, {"index": self._num_begun - 1, **fields})


_KINDS: Mapping[type, str] = {
    ReasoningText: "thinking",
    Text: "text",
    CallBegin: "tool_use",
    CallArguments: "tool_use",
}
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
