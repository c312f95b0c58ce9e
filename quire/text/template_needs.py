"""What a chat template cannot do without: found out by trying, and given to it.

A prompt is what transformers renders of the same messages and tools, key for key. But some
templates fail, or write "None", where an API's client may leave something out: an assistant's
content beside calls, a function's description. Where transformers renders such a chat nothing is
changed; only where it does not, the empty value is filled in. Lists of text parts go to templates
that read them, and are joined with line breaks for others. A template that reads reasoning before
a call under the name `thinking` alone is given it so, and one that shows only the first of a
message's calls, or refuses several, is given a message for each call, its results behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Final

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message]], str | None]
"""A template's text for messages and tools; None where it refuses them."""

_CALL: Final = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "probe", "arguments": {"a": "x"}},
}
_USER: Final = {"role": "user", "content": "Hi"}
_ANSWERS: Final = ({"role": "tool", "tool_call_id": "abcdefghi", "name": "probe", "content": "3"},)
_PARAMETERS: Final = {
    "type": "object",
    "properties": {"a": {"type": "string", "description": "an a"}},
}
_FUNCTION: Final = {"name": "probe", "description": "probes", "parameters": _PARAMETERS}
_NOTHINGS: Final = ("None", "null", "Undefined")
_PARTS: Final = ("alpha", "omega")
_OTHER_CALL: Final[Message] = {
    "id": "ihgfedcba",
    "type": "function",
    "function": {"name": "inquire", "arguments": {"a": "y"}},
}
_OTHER_ANSWER: Final[Message] = {
    "role": "tool",
    "tool_call_id": "ihgfedcba",
    "name": "inquire",
    "content": "4",
}


class TemplateNeeds:
    """One template's needs. Each is determined when a chat first has
    something that could touch it."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._content = cache(self._find_content)
        self._reads_parts = lru_cache(64)(self._find_reads_parts)  # any name may come as a role
        self._needs_parts = lru_cache(64)(self._find_needs_parts)
        self._lacks = cache(self._find_lacks)
        self._reads_thinking = cache(self._find_reads_thinking)
        self._refuses_text_beside = cache(self._find_refuses_text_beside)
        self._needs_single_calls = cache(self._find_needs_single_calls)

    def fit_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with contents that the template can render."""
        if any(len(message.get("tool_calls") or ()) > 1 for message in messages):
            messages = _one_call_each(messages) if self._needs_single_calls() else messages
        return [self._fit_thinking(self._fit_message(message)) for message in messages]

    def _fit_thinking(self, message: Message) -> Message:
        thought, content = message.get("reasoning_content"), message.get("content")
        if not (thought and message.get("tool_calls") and self._reads_thinking()):
            return message
        if not content:
            return {"thinking": thought, **message}
        if "thinking" in message or not isinstance(content, str):
            return message
        if self._refuses_text_beside():
            return {**message, "thinking": f"{thought}\n{content}", "content": ""}
        return {**message, "thinking": thought}

    def _render_called(self, **extra: Any) -> str:
        """Render a chat with a call whose message has more than that."""
        called = {"role": "assistant", "content": "", "tool_calls": [_CALL], **extra}
        return self._render([_USER, called, *_ANSWERS], []) or ""

    def _find_reads_thinking(self) -> bool:
        """Return whether reasoning before a call is shown under that name, and no other."""
        return _PARTS[0] in self._render_called(thinking=_PARTS[0]) and _PARTS[
            0
        ] not in self._render_called(reasoning_content=_PARTS[0])

    def _find_refuses_text_beside(self) -> bool:
        """Return whether a message with a call may not have both reasoning and a content."""
        return not self._render_called(thinking=_PARTS[0], content=_PARTS[1])

    def _find_needs_single_calls(self) -> bool:
        """Return whether calls are shown only if each has a message of its own."""
        called = {"role": "assistant", "content": "", "tool_calls": [_CALL, _OTHER_CALL]}
        chat: list[Message] = [_USER, called, *_ANSWERS, _OTHER_ANSWER]
        name = _OTHER_CALL["function"]["name"]
        if name in (self._render(_without_names(chat), []) or ""):
            return False
        return name in (self._render(_without_names(_one_call_each(chat)), []) or "")

    def fit_tools(self, tools: Sequence[Message]) -> list[Message]:
        """Return the tools with what the template cannot do without."""
        return [self._fit_tool(tool) for tool in tools]

    def _fit_message(self, message: Message) -> Message:
        content, role = message.get("content"), str(message.get("role"))
        if isinstance(content, list) and any(part.get("type") == "image" for part in content):
            return message
        if isinstance(content, list) and not self._reads_parts(role):
            if self._needs_parts(role):
                return message
            return {**message, "content": joined_text(content)}
        if isinstance(content, str) and content and self._needs_parts(role):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message if content is not None else {**message, "content": self._content()}

    def _find_content(self) -> str | None:
        """Return what stands for a content that is null, beside calls: null itself,
        if the template can do with it."""

        def render(content: str | None) -> str | None:
            called = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
            return self._render(
                [_USER, called, *_ANSWERS], [{"type": "function", "function": _FUNCTION}]
            )

        with_text, text = render(""), render(None)
        is_fine = text is not None and all(
            text.count(word) <= (with_text or "").count(word) for word in _NOTHINGS
        )
        return None if is_fine or with_text is None else ""

    def _find_needs_parts(self, role: str) -> bool:
        """Return whether a text is left out, or refused, unless it is a part of a list."""
        text = _PARTS[0]
        return text not in (self._render_content(role, text) or "") and text in (
            self._render_content(role, [{"type": "text", "text": text}]) or ""
        )

    def _find_reads_parts(self, role: str) -> bool:
        """Return whether a list of texts is rendered as these texts."""

        def render(content: Any) -> str | None:
            return self._render_content(role, content)

        parts = [{"type": "text", "text": text} for text in _PARTS]
        single, plain, both = render(parts[:1]), render(_PARTS[0]), render(parts)
        return (
            single is not None
            and single == plain
            and both is not None
            and all(both.count(text) == 1 for text in _PARTS)
        )

    def _render_content(self, role: str, content: Any) -> str | None:
        """Render a chat with a message of this content."""
        before: list[Message] = [] if role in ("system", "developer", "user") else [_USER]
        before += (
            [{"role": "assistant", "content": "", "tool_calls": [_CALL]}] if role == "tool" else []
        )
        after = [] if role == "user" else [_USER]
        extra = {"tool_call_id": "abcdefghi", "name": "probe"} if role == "tool" else {}

        return self._render([*before, {"role": role, "content": content, **extra}, *after], [])

    def _fit_tool(self, tool: Message) -> Message:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            return tool
        parameters = function.get("parameters")
        filled = dict(function)
        for name, value in (
            ("description", ""),
            ("parameters", {"type": "object", "properties": {}}),
        ):
            if filled.get(name) is None and self._lacks(name, name in filled):
                filled[name] = value
        if (
            isinstance(parameters, Mapping)
            and "properties" not in parameters
            and self._lacks("properties", False)
        ):
            filled["parameters"] = {**parameters, "properties": {}}
        return {**tool, "function": filled}

    def _find_lacks(self, name: str, is_null: bool) -> bool:
        """Return whether the template fails on a function without this, or with null in its
        place."""

        def render(function: Message) -> str | None:
            return self._render([_USER], [{"type": "function", "function": function}])

        if name == "properties":
            return (
                render({**_FUNCTION, "parameters": {"type": "object"}}) is None
                and render(_FUNCTION) is not None
            )
        without = {key: value for key, value in _FUNCTION.items() if key != name} | (
            {name: None} if is_null else {}
        )
        return render(without) is None and render(_FUNCTION) is not None


def _without_names(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose results do not name their functions, so that only calls do."""
    return [{key: value for key, value in message.items() if key != "name"} for message in messages]


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one for each call, followed by its results: those with its id, and
    behind a message's last call those without any. Text and reasoning stay with the first."""
    out: list[Message] = []
    position = 0
    while position < len(messages):
        message, position = messages[position], position + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            out.append(message)
            continue
        end = position
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        results, position = list(messages[position:end]), end
        rest = {"role": message["role"], "content": ""}
        for number, call in enumerate(calls):
            out.append({**(rest if number else message), "tool_calls": [call]})
            is_last = number == len(calls) - 1
            own = [r for r in results if is_last or r.get("tool_call_id") == call.get("id")]
            results = [r for r in results if r not in own]
            out += own
    return out


def joined_text(content: object) -> str:
    """Return the text of a content in any form; parts are joined with line breaks."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
