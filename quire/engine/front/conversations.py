"""Conversations that `LLM.chat` is given, as prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.engine.front.image_marks import Marks, marks_of
from quire.engine.front.prompts import Prompt, PromptDict
from quire.media.parts import take_images, with_parts
from quire.media.sources import ImageSource
from quire.text.chat import ChatTemplate, encode_chat
from quire.text.content_format import ContentFormat, as_content_format

if TYPE_CHECKING:
    from quire.media.reader import ImageReader
    from quire.text.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]
"""Messages, each `{"role": ..., "content": ...}`."""


class ConversationPrompts:
    """Makes prompts of conversations for one model, by one template."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, images: ImageReader | None
    ) -> None:
        self._template, self._tokenizer, self._images = template, tokenizer, images

    def prompts(
        self,
        messages: Conversation | Sequence[Conversation],
        render: Callable[[Conversation], str],
        content_format: ContentFormat,
        settings: Mapping[str, Any] | None,
    ) -> list[Prompt]:
        """Return the prompt of one conversation, or of each of several, as `render` writes them
        with the template; `settings` are of the processor of images."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Conversation] = [messages] if is_one else messages  # type: ignore[list-item, assignment]
        return [self._prompt(each, render, content_format, settings) for each in conversations]

    def _prompt(
        self,
        conversation: Conversation,
        render: Callable[[Conversation], str],
        content_format: ContentFormat,
        settings: Mapping[str, Any] | None,
    ) -> Prompt:
        plain, sources = take_images(with_parts(conversation, self._template.source))
        shown = as_content_format(plain, content_format)
        if self._images is not None and content_format == "auto":
            shown = self._template.needs.fit_messages(shown)
        rendered, marks = render(shown), None
        if self._images is not None and sources:
            sources, marks = self._marked(self._images, sources, settings)
        prompt: PromptDict = {
            "prompt": rendered,
            "prompt_token_ids": encode_chat(self._tokenizer, rendered, marks),
        }
        if sources:
            prompt["multi_modal_data"] = {"image": sources}
        if settings:
            prompt["mm_processor_kwargs"] = settings
        return prompt

    def _marked(
        self, reader: ImageReader, sources: list[ImageSource], settings: Mapping[str, Any] | None
    ) -> tuple[list[ImageSource], Marks | None]:
        """Read the images of a chat whose text depends on them, and return them with what it has in
        their places; leave others to be read with their prompt."""
        if reader.limits.vision.frame is None:
            return sources, None
        read = reader.read([each._replace(settings=settings) for each in sources])
        known = [each._replace(content=got) for each, got in zip(sources, read, strict=True)]
        return known, marks_of(reader.limits.vision, self._tokenizer, read)
