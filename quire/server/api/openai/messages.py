"""A chat's messages: checked, and brought into the form that chat templates read.

Lists of text parts stay lists, for templates that read them; others get them joined with line
breaks (`template_needs`). Images are read later, if the model reads any (`server.api.images`); what
is neither is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.media.parts import image_part, is_image
from quire.server.http.body import convert_part, shape
from quire.server.http.errors import bad_request, unavailable_feature

MAX_MESSAGES = 4096
MAX_CALLS_OF_MESSAGE = 128
MAX_ID_LEN = 128
Role = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
"""Any name: the chat template decides which it takes (see `PromptEncoder.encode_chat`)."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class Part(msgspec.Struct, kw_only=True):
    """A part of a content: a text or an image."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    image_url: Any = None
    image: Any = None
    image_pil: Any = None
    url: Any = None
    """As others write an image (see `quire.media.parts`)."""
    uuid: Any = None
    detail: Any = None
    source: Any = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call that an assistant made earlier; its arguments are a JSON text."""

    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, kw_only=True):
    """One of an assistant's calls."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(msgspec.Struct, kw_only=True):
    """One message as OpenAI's API has it."""

    role: Role
    content: str | list[Annotated[dict[str, Any], shape(Part)]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: (
        Annotated[
            list[Annotated[dict[str, Any], shape(ToolCall)]], Meta(max_length=MAX_CALLS_OF_MESSAGE)
        ]
        | None
    ) = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of the same."""
    thinking: str | None = None
    """What gpt-oss' template calls it."""
    tool_plan: str | None = None
    """What Cohere's templates show before calls."""


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as templates read them. Raises ApiError 400 naming the part that is
    wrong."""
    if not messages:
        raise bad_request("messages: at least one is needed", param="messages", code="empty_array")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(
            f"messages: {len(messages)} are given, and at most {MAX_MESSAGES} are allowed",
            param="messages",
        )
    return [
        _for_template(message, f"messages[{number}]") for number, message in enumerate(messages)
    ]


def check_continuation(
    add_generation_prompt: bool | None, continue_final_message: bool | None
) -> None:
    """Refuse what both begins a new message and continues the last. Raises ApiError 400."""
    if add_generation_prompt and continue_final_message:
        raise bad_request(
            "continue_final_message: not together with add_generation_prompt=true; leave one "
            "of them out",
            param="continue_final_message",
        )


def _for_template(message: Message, where: str) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, list):
        content = parts_of(content, f"{where}.content")
    if message.role == "tool" and not message.tool_call_id:
        raise bad_request(
            f"{where}: a tool's message needs tool_call_id", param=f"{where}.tool_call_id"
        )
    if content is None and not (
        message.role == "assistant" and (message.tool_calls or message.refusal)
    ):
        raise bad_request(f"{where}: content is missing", param=f"{where}.content")
    shown: dict[str, Any] = {
        "role": message.role,
        "content": message.refusal if content is None else content,
    }
    if message.tool_calls:
        shown["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls)
        ]
    for name in _PASSED_ON:
        if (value := getattr(message, name)) is not None:
            shown[name] = value
    if message.reasoning is not None:
        shown.setdefault("reasoning_content", message.reasoning)
    return shown


_PASSED_ON = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking", "tool_plan")


def parts_of(content: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return parts as templates know them, whatever they are called elsewhere; images with their
    sources. Raises ApiError 400, or InvalidParameterError for an image without one."""
    if not content:
        raise bad_request(f"{where}: the list of parts is empty", param=where)
    return [
        image_part(part, place)
        if is_image(part)
        else {"type": "text", "text": part_text(part, place)}
        for part, place in ((part, f"{where}[{n}]") for n, part in enumerate(content))
    ]


def text_of(content: str | Sequence[dict[str, Any]] | None, where: str) -> str | None:
    """Return the text of a content that is a string or a list of text parts."""
    if content is None or isinstance(content, str):
        return content
    if not content:
        raise bad_request(f"{where}: the list of parts is empty", param=where)
    return "\n".join(part_text(part, f"{where}[{number}]") for number, part in enumerate(content))


def part_text(part: object, where: str) -> str:
    """Return the text of one part, whatever a body has in its place.
    Raises ApiError 400 for one that is no text."""
    if not isinstance(part, Mapping):
        raise bad_request(f"{where}: a part must be an object", param=where)
    kind = part.get("type")
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        if not isinstance(kind, str):
            raise bad_request(f"{where}: a part needs a type", param=f"{where}.type")
        raise unavailable_feature(where, f"parts of type {kind[:40]!r} are not possible here")
    text = part.get(field)
    if not isinstance(text, str):
        raise bad_request(f"{where}: its {field} must be a string", param=f"{where}.{field}")
    return text


def string_field(
    fields: Mapping[str, Any], name: str, where: str, *, max_len: int | None = MAX_ID_LEN
) -> str:
    """Return a field that must be there as a text: of 1 to `max_len` characters,
    or with None of any length. Raises ApiError 400."""
    value = fields.get(name)
    if not isinstance(value, str) or not (max_len is None or 1 <= len(value) <= max_len):
        what = "a text" if max_len is None else f"a text of 1 to {max_len} characters"
        raise bad_request(f"{where}.{name}: it must be {what}", param=f"{where}.{name}")
    return value


def _call(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a call as templates read it: in the client's words and order, its arguments an
    object."""
    call = convert_part(given, ToolCall, where)
    arguments = arguments_of(call.function.arguments, f"{where}.function.arguments")
    return {**given, "type": "function", "function": {**given["function"], "arguments": arguments}}


def arguments_of(text: str, param: str) -> dict[str, Any]:
    """Return a call's arguments as an object: templates write it in the model's own way.
    Raises ApiError 400."""
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(f"{param}: must be a JSON object, written as a string", param=param)
    return arguments
