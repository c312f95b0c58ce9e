"""Items of /v1/responses: those that a request brings, as messages of a chat;
and those that an answer brings, as they grow."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.front.outputs import CompletionOutput
from quire.media.known import check_uuid
from quire.media.parts import is_image
from quire.server.api.answer_format import AnswerFormat, Event
from quire.server.api.openai.logprobs import ScoredToken
from quire.server.api.openai.messages import (
    MAX_CALLS_OF_MESSAGE,
    Message,
    arguments_of,
    part_text,
    string_field,
    text_of,
)
from quire.server.api.tools import call_id
from quire.server.http.body import convert
from quire.server.http.errors import ApiError, bad_request, unavailable_feature
from quire.server.http.responses import StreamEvent
from quire.text.reasoning import ReasoningText
from quire.text.tools import CallArguments, CallBegin, Text

Item = dict[str, Any]


def new_id(prefix: str) -> str:
    """Return an id that nothing else has."""
    return f"{prefix}_{secrets.token_hex(16)}"


# -- what a request brings
# -----------------------------------------------------------------------------------------------


class InputReader:
    """Reads what one request brings. `unseal` gives the reasoning of a text that this server
    has sealed (see `sealed`)."""

    def __init__(self, unseal: Callable[[str], str | None]) -> None:
        self._unseal = unseal
        self.unread: list[str] = []
        """Where there was reasoning that cannot be read: sealed by another server,
        or before this one was started."""

    def items(self, value: str | Sequence[Item]) -> list[Item]:
        """Return the input as items with ids, as they are listed later.
        Raises ApiError 400 naming the item that is wrong."""
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not value:
            raise bad_request("input: it is empty", param="input")
        return [self._item(item, f"input[{number}]") for number, item in enumerate(value)]

    def _item(self, item: Item, where: str) -> Item:
        if item.get("type") == "reasoning":
            return {
                "id": new_id("rs"),
                "type": "reasoning",
                "summary": [],
                "content": self._reasoning_texts(item, where),
            }
        return _input_item(item, where)

    def _reasoning_texts(self, item: Item, where: str) -> list[Item]:
        """Return the reasoning of an earlier answer: what was sealed, where it can be verified,
        else what stands there."""
        sealed, content = item.get("encrypted_content"), item.get("content") or []
        if not isinstance(sealed, str | None):
            raise bad_request(
                f"{where}.encrypted_content: it must be a text", param=f"{where}.encrypted_content"
            )
        text = None if sealed is None else self._unseal(sealed)
        if text is not None:
            return [{"type": "reasoning_text", "text": text}]
        if sealed is not None and not content:
            self.unread.append(f"{where}.encrypted_content")
        return _reasoning_parts(content, where)


def _input_item(item: Item, where: str) -> Item:
    kind = item.get("type", "message")
    if kind == "message":
        return _input_message(item, where)
    if kind == "function_call":
        arguments = string_field(item, "arguments", where, max_len=1 << 20)
        arguments_of(arguments, f"{where}.arguments")
        names = {name: string_field(item, name, where) for name in ("call_id", "name")}
        return {
            "id": new_id("fc"),
            "type": kind,
            **names,
            "arguments": arguments,
            "status": "completed",
        }
    if kind == "function_call_output":
        output = item.get("output")
        text = text_of(output, f"{where}.output") if isinstance(output, str | list) else None
        if text is None:
            raise bad_request(
                f"{where}.output: it must be a text, or a list of texts", param=f"{where}.output"
            )
        called = string_field(item, "call_id", where)
        return {
            "id": new_id("fco"),
            "type": kind,
            "call_id": called,
            "output": text,
            "status": "completed",
        }
    raise unavailable_feature(where, f"items of type {str(kind)[:40]!r} are not possible here")


def _input_message(item: Item, where: str) -> Item:
    message = convert({"role": item.get("role"), "content": item.get("content")}, Message)
    kind = "output_text" if message.role == "assistant" else "input_text"
    if isinstance(message.content, list) and any(map(is_image, message.content)):
        parts = [_input_part(part, f"{where}.content") for part in message.content]
    else:
        text = text_of(message.content, f"{where}.content")
        parts = [] if text is None else [{"type": kind, "text": text}]
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": message.role,
        "content": parts,
        "status": "completed",
    }


def _input_part(part: Item, where: str) -> Item:
    """Return a part as it is listed later."""
    if not is_image(part):
        return {"type": "input_text", "text": part_text(part, where)}
    url, uuid = part.get("image_url"), check_uuid(part.get("uuid"), f"{where}.uuid")
    if not isinstance(url, str) and (url is not None or uuid is None):
        raise bad_request(
            f"{where}: an image needs image_url, a text such as 'data:image/png;base64,...'",
            param=where,
        )
    named = {} if uuid is None else {"uuid": uuid}
    return {
        "type": "input_image",
        "image_url": url,
        "detail": part.get("detail") or "auto",
        **named,
    }


def _reasoning_parts(content: Any, where: str) -> list[Item]:
    """Reasoning in the clear."""
    param = f"{where}.content"
    texts = (
        [part.get("text") for part in content if isinstance(part, Mapping)]
        if isinstance(content, list)
        else [None]
    )
    if any(not isinstance(text, str) for text in texts):
        raise bad_request(f"{param}: it must be a list of parts with a text", param=param)
    return [{"type": "reasoning_text", "text": text} for text in texts]


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Return items as a chat's messages: an assistant's reasoning,
    text and calls that follow one another are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            messages.append(
                {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            )
            continue
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": item["content"] or None})
            continue
        if (
            not messages
            or messages[-1]["role"] != "assistant"
            or not _continues(messages[-1], kind)
        ):
            messages.append({"role": "assistant", "content": ""})
        _add(messages[-1], item)
    return [convert(message, Message) for message in messages]


def _continues(message: Mapping[str, Any], kind: str) -> bool:
    """Return whether an item can be a part of the assistant's message before it."""
    num_calls = len(message.get("tool_calls", ()))
    if kind == "function_call":
        return num_calls < MAX_CALLS_OF_MESSAGE
    return kind == "message" and not message["content"] and not num_calls


def _add(message: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        message["content"] = item["content"] or ""
    elif item["type"] == "reasoning":
        message["reasoning_content"] = "\n".join(part["text"] for part in item["content"])
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        message.setdefault("tool_calls", []).append({"id": item["call_id"], "function": function})


# -- what an answer brings
# -----------------------------------------------------------------------------------------------


class OutputItems:
    """The items of one answer, and the events that tell of their growth."""

    def __init__(
        self, answer_format: AnswerFormat, seal: Callable[[str], str] | None = None
    ) -> None:
        """`seal`: makes the `encrypted_content` of reasoning, where that is wanted."""
        self._format = answer_format
        self._seal = seal
        self._reader = answer_format.reader()
        self._parts: list[str] = []
        """The open item's text."""
        self._tokens: list[ScoredToken] = []
        """The open item's tokens."""
        self._is_open = False
        self.items: list[Item] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """As OpenAI's `reasoning_tokens` counts them."""
        return self._reader.num_reasoning_tokens

    def take(
        self, completion: CompletionOutput, tokens: Sequence[ScoredToken]
    ) -> list[StreamEvent]:
        """Return what a piece of the answer brings. `tokens` have log-probabilities,
        and are only ever of text."""
        is_last = completion.finish_reason is not None
        news = self._reader.feed(completion.text, completion.token_ids, is_last=is_last)
        if tokens and not news:
            news = [Text("")]
        events: list[StreamEvent] = []
        for each in news:
            events += self._grow(each, tokens)
            tokens = ()
        if is_last:
            if not self.items:
                events += self._grow(Text(""), ())
            events += self._close(is_cut=completion.finish_reason == "length")
        return events

    def _grow(self, event: Event, tokens: Sequence[ScoredToken]) -> list[StreamEvent]:
        kind = _KINDS[type(event)]
        is_new = not self._is_open or self.items[-1]["type"] != kind or isinstance(event, CallBegin)
        events = self._begin(kind, event) if is_new else []
        if isinstance(event, CallBegin) or not (event.text or tokens):
            return events
        self._parts.append(event.text)
        self._tokens += tokens
        extra = (
            {"logprobs": [_delta_logprob(token) for token in tokens]} if kind == "message" else {}
        )
        return [
            *events,
            StreamEvent(
                f"response.{_DELTAS[kind]}.delta", {**self._where, "delta": event.text, **extra}
            ),
        ]

    @property
    def _where(self) -> dict[str, Any]:
        """Where the open item, or its only part, is."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if self.items[-1]["type"] == "function_call" else {**place, "content_index": 0}

    def _begin(self, kind: str, event: Event) -> list[StreamEvent]:
        events = self._close(is_cut=False) if self._is_open else []
        self._is_open, self._parts, self._tokens = True, [], []
        item: Item = {"id": new_id(_PREFIXES[kind]), "type": kind, "status": "in_progress"}
        if isinstance(event, CallBegin):
            assert self._format.tools is not None, "calls are read only where there are tools"
            item |= {
                "call_id": call_id(self._format.tools.form),
                "name": event.name,
                "arguments": "",
            }
        else:
            item |= (
                {"role": "assistant", "content": []}
                if kind == "message"
                else {"summary": [], "content": []}
            )
        self.items.append(item)
        events.append(
            StreamEvent(
                "response.output_item.added",
                {"output_index": len(self.items) - 1, "item": dict(item)},
            )
        )
        if kind != "function_call":
            events.append(
                StreamEvent("response.content_part.added", {**self._where, "part": self._part("")})
            )
        return events

    def _close(self, *, is_cut: bool) -> list[StreamEvent]:
        """End the open item, and say what it has become. `is_cut`: by the limit of tokens."""
        item, text, where = self.items[-1], "".join(self._parts), self._where
        self._is_open = False
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "function_call":
            num_before = sum(each["type"] == "function_call" for each in self.items[:-1])
            item["status"] = "completed" if self._reader.num_calls > num_before else "incomplete"
            item["arguments"] = text
            events = [
                StreamEvent(
                    "response.function_call_arguments.done",
                    {**where, "name": item["name"], "arguments": text},
                )
            ]
        else:
            part = self._part(text)
            item["content"] = [part]
            if item["type"] == "reasoning" and self._seal is not None:
                item["encrypted_content"] = self._seal(text)
            extra = (
                {"logprobs": [_delta_logprob(token) for token in self._tokens]}
                if item["type"] == "message"
                else {}
            )
            events = [
                StreamEvent(
                    f"response.{_DELTAS[item['type']]}.done", {**where, "text": text, **extra}
                ),
                StreamEvent("response.content_part.done", {**where, "part": part}),
            ]
        return [
            *events,
            StreamEvent(
                "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}
            ),
        ]

    def _part(self, text: str) -> Item:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = [
            {**token.content, "bytes": token.content["bytes"] or []} for token in self._tokens
        ]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


_KINDS: Mapping[type, str] = {
    ReasoningText: "reasoning",
    Text: "message",
    CallBegin: "function_call",
    CallArguments: "function_call",
}
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_DELTAS = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
}


def _delta_logprob(token: ScoredToken) -> dict[str, Any]:
    top = [{"token": other.name, "logprob": other.logprob} for other in token.top]
    return {"token": token.name, "logprob": token.logprob, "top_logprobs": top}


def is_whole(item: Item) -> bool:
    """Return whether an answer's item can be a part of the conversation that goes on:
    a call that was cut cannot."""
    if item["type"] != "function_call":
        return True
    return bool(item["status"] == "completed") and _is_object(item["arguments"])


def _is_object(arguments: str) -> bool:
    try:
        arguments_of(arguments, "")
    except ApiError:
        return False
    return True
