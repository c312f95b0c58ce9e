"""One form for a conversation, whichever API it came by.

OpenAI's chats and responses and Anthropic's messages are each read into a `Conversation`: messages
as chat templates read them, the tools on offer, and the form that a text answer must have. What
follows is the same for all, and `PromptEncoder.chat` does it: render, encode, settle the format of
answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.core.images import PlacedImage
from quire.core.structure import StructuredOutputsParams
from quire.server.api.answer_format import AnswerFormat
from quire.server.api.structure import Asked
from quire.server.api.tools import ToolUse
from quire.text.template_needs import joined_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to answer."""

    messages: Sequence[Mapping[str, Any]]
    """With the keys that chat templates read."""
    tools: ToolUse | None = None
    asked: Sequence[Asked] = ()
    """Fields of the request that ask for a form of text answers."""
    add_generation_prompt: bool = True
    is_continued: bool = False
    """Whether the answer goes on with the last message, which is the assistant's."""
    template_kwargs: Mapping[str, object] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    num_body_bytes: int = 0
    """Of the request that it came with."""
    media_scope: str = ""
    """Whose its images are (`Tenant.media_scope`)."""

    @property
    def shown_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools as chat templates read them."""
        return None if self.tools is None else self.tools.shown

    @property
    def continued_text(self) -> str | None:
        """The text that the answer goes on with, if it does."""
        return joined_text(self.messages[-1]["content"]) if self.is_continued else None


class ChatPrompt(NamedTuple):
    """A conversation rendered and encoded, and how its answers are read."""

    text: str
    token_ids: list[int]
    answer_format: AnswerFormat
    form: StructuredOutputsParams | None
    images: tuple[PlacedImage, ...] = ()
    """Whose places the token ids have."""


class EncodedChat(NamedTuple):
    """A conversation rendered and encoded."""

    text: str
    token_ids: list[int]
    images: tuple[PlacedImage, ...] = ()
