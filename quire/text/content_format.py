"""How the contents of messages reach a chat template: as text, or as lists of parts.

Owns the conversion alone. Some templates only know one of the two, and programs that were written
for one model's template use the form that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from quire.errors import InvalidParameterError, NotAvailableError

ContentFormat = Literal["auto", "string", "openai"]


def as_content_format(
    messages: Sequence[Mapping[str, Any]], form: str
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with every content in a form; "auto" leaves each as it was given.

    Texts of several parts are joined by line breaks. Raises NotAvailableError for parts that are no
    text.
    """
    if form not in get_args(ContentFormat):
        raise InvalidParameterError(
            f"chat_template_content_format={form!r} is unknown; choose "
            f"{' or '.join(map(repr, get_args(ContentFormat)))}",
            param="chat_template_content_format",
        )
    if form == "auto":
        return messages
    convert = _as_text if form == "string" else _as_parts
    return [
        {**message, "content": convert(message["content"])} if "content" in message else message
        for message in messages
    ]


def _as_text(content: Any) -> Any:
    return "\n".join(map(_text_of, content)) if isinstance(content, list | tuple) else content


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise NotAvailableError(
            f"a message has a part of type {kind!r}, and this version reads text only; leave it out"
        )
    return text
