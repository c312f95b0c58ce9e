"""Which fields the objects within OpenAI's requests have, where they are read by hand.

Owns names alone: what is not among them is reported as an unknown field of the body is (see
`body.shape`). Names without an effect, such as an item's `id`, are known too, since clients send
back what they were given.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from quire.server.api.openai.messages import Part
from quire.server.http.body import shape


class NamedSchema(msgspec.Struct):
    """A schema with a name."""

    name: Any = None
    description: Any = None
    schema: Any = None
    strict: Any = None


class ResponseFormat(msgspec.Struct):
    """A chat's `response_format`; `schema` is llama.cpp's, beside `json_object`."""

    type: Any = None
    json_schema: Annotated[Any, shape(NamedSchema)] = None
    schema: Any = None


class TextFormat(NamedSchema):
    """A response's `text.format`."""

    type: Any = None


class TextOptions(msgspec.Struct):
    """A response's `text`."""

    format: Annotated[Any, shape(TextFormat)] = None
    verbosity: Any = None


class Reasoning(msgspec.Struct):
    """A response's `reasoning`."""

    effort: Any = None
    summary: Any = None
    generate_summary: Any = None


class FunctionFields(msgspec.Struct):
    """A function that is offered."""

    name: Any = None
    description: Any = None
    parameters: Any = None
    strict: Any = None


class ChatTool(msgspec.Struct):
    """A chat's tool."""

    type: Any = None
    function: Annotated[Any, shape(FunctionFields)] = None


class ResponseTool(FunctionFields):
    """A response's tool."""

    type: Any = None


class Named(msgspec.Struct):
    """A function that is chosen."""

    type: Any = None
    name: Any = None


class ChosenTool(Named):
    """The same in a chat."""

    function: Annotated[Any, shape(Named)] = None


class AllowedTools(msgspec.Struct):
    """Functions that may be called."""

    mode: Any = None
    tools: list[Annotated[Any, shape(ChosenTool)]] | None = None


class ToolChoice(ChosenTool):
    """A `tool_choice` that is an object."""

    mode: Any = None
    tools: list[Annotated[Any, shape(ChosenTool)]] | None = None
    allowed_tools: Annotated[Any, shape(AllowedTools)] = None


class InputItem(msgspec.Struct):
    """An item of a response's input, of any kind."""

    type: Any = None
    id: Any = None
    status: Any = None
    role: Any = None
    phase: Any = None
    content: list[Annotated[Any, shape(Part)]] | None = None
    call_id: Any = None
    name: Any = None
    namespace: Any = None
    arguments: Any = None
    output: list[Annotated[Any, shape(Part)]] | None = None
    summary: list[Annotated[Any, shape(Part)]] | None = None
    encrypted_content: Any = None


class ResponseStreamOptions(msgspec.Struct):
    """A response's `stream_options`."""

    include_obfuscation: Any = None
