"""Which fields the objects within Anthropic's requests have, where they are read by hand.
See `openai.shapes`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from quire.server.http.body import shape


class CacheControl(msgspec.Struct):
    """How long to keep the prompt; this server caches every prefix."""

    type: Any = None
    ttl: Any = None


class TextBlock(msgspec.Struct):
    """A block of text, and what blocks of other kinds share with it."""

    type: Any = None
    text: Any = None
    citations: Any = None
    cache_control: Annotated[Any, shape(CacheControl)] = None


class ContentBlock(TextBlock):
    """A block of a turn, of any kind."""

    id: Any = None
    name: Any = None
    input: Any = None
    caller: Any = None
    tool_use_id: Any = None
    content: list[Annotated[Any, shape(TextBlock)]] | None = None
    is_error: Any = None
    thinking: Any = None
    signature: Any = None
    data: Any = None
    source: Any = None


class Thinking(msgspec.Struct):
    """How much to think."""

    type: Any = None
    budget_tokens: Any = None
    display: Any = None


class OfferedTool(msgspec.Struct):
    """A function that is offered."""

    type: Any = None
    name: Any = None
    description: Any = None
    input_schema: Any = None
    strict: Any = None
    cache_control: Annotated[Any, shape(CacheControl)] = None
    allowed_callers: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None


class ToolChoice(msgspec.Struct):
    """Which function is to be called."""

    type: Any = None
    name: Any = None
    disable_parallel_tool_use: Any = None


class OutputFormat(msgspec.Struct):
    """The form of the answer."""

    type: Any = None
    schema: Any = None
    name: Any = None


class OutputConfig(msgspec.Struct):
    """The answer's form and the effort for it."""

    format: Annotated[Any, shape(OutputFormat)] = None
    effort: Any = None
