"""Encode prompts for the server: chats are rendered, the context's length is enforced, and how the
answers are read is settled.

Long texts are worked on in a thread, since the tokenizer releases the interpreter lock and the
event loop must answer others. Owns no limits but the model's context length; never logs a text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

import msgspec

from quire.common.bounded_files import MAX_SETTINGS_BYTES, read_text
from quire.core.images import PlacedImage
from quire.core.params import ThinkTags
from quire.core.structure import StructuredOutputsParams
from quire.engine.front.image_marks import marks_of
from quire.engine.front.model_info import ModelInfo
from quire.engine.front.think_tags import tokens_of_tags
from quire.errors import ConfigError
from quire.media.parts import take_images
from quire.media.reader import ImageReader
from quire.server.api.answer_format import AnswerFormat, ReasoningTags, is_json
from quire.server.api.conversation import ChatPrompt, Conversation, EncodedChat
from quire.server.api.images import read_images
from quire.server.api.structure import Asked, asks_for_json, settle
from quire.server.api.tools import Demand, Function, ToolUse, settle_tools
from quire.server.http.errors import ApiError, bad_request, unavailable_feature
from quire.server.http.off_loop import SMALL, off_loop
from quire.text.chat import SHOWS_NOTHING, ChatTemplate, encode_chat, without_developer
from quire.text.reasoning import REASONING_FORMATS, is_thinking, reasoning_of_template
from quire.text.tokenizer import Tokenizer
from quire.text.tools import FORMATS, ToolFormat, format_of_template

_INLINE_CHARS = 4096
"""Shorter texts are encoded at once: below about a millisecond,
handing over to a thread costs more than it frees."""
_INLINE_MESSAGES = 512
"""More of them are looked at beside the event loop, however small:
5 MB of tiny ones would take it half a second."""
_GROUP_CHARS = 64 << 10
"""Of prompts that are encoded together: some 30 ms."""
_THREADS = 2
_USUAL_ROLES = frozenset({"system", "user", "assistant", "tool"})
"""What a template makes of others is looked at."""
NOT_IN_TEMPLATE = "the chat template of this model does not read it"
_MAX_CHARS_PER_TOKEN = 256
"""A text longer than the context times this is refused unread;
the longest tokens of published vocabularies have 128."""
_T = TypeVar("_T")


class Parsers(NamedTuple):
    """How the operator says that answers are read: "auto" is as the chat template writes."""

    tools: str = "auto"
    reasoning: str = "auto"


AUTO = Parsers()


class PromptEncoder:
    """The model's tokenizer and chat template, and how answers to its chats are read."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model: ModelInfo,
        template_source: str | None = None,
        images: ImageReader | None = None,
        parsers: Parsers = AUTO,
    ) -> None:
        self._images = images
        self._tokenizer = tokenizer
        self.max_model_len = model.max_model_len
        self._vocab_size = model.vocab_size
        self._template: ChatTemplate | None = None
        self._why_no_template = "this server has no tokenizer"
        if tokenizer is not None:
            self._load_template(tokenizer, template_source)
        self._tool_format = (
            format_of_template(self.template_source)
            if parsers.tools == "auto"
            else FORMATS[parsers.tools]
        )
        self.tags = self._tags(parsers.reasoning)
        """What sets the model's reasoning apart from its answers, where that is known."""
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="quire-text")

    def _load_template(self, tokenizer: Tokenizer, source: str | None) -> None:
        if source is not None:
            self._template = ChatTemplate(source, tokenizer.config.named_tokens)
            return
        try:
            self._template = ChatTemplate.from_tokenizer(tokenizer)
        except ConfigError as error:
            self._why_no_template = str(error)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ApiError 400 where the server works on token ids alone."""
        if self._tokenizer is None:
            raise bad_request(
                "this server has no tokenizer: it takes prompts of token ids alone", param="prompt"
            )
        return self._tokenizer

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._images is not None:
            self._images.close()

    async def chat(
        self, conversation: Conversation, encoded: EncodedChat | None = None
    ) -> ChatPrompt:
        """Render and encode a conversation, unless it has been, and settle the format of its
        answers. Raises ApiError 400."""
        text, token_ids, images = encoded or await self.encode_chat(conversation)
        form = await settle(conversation.asked)
        answer_format = self._answer_format(
            conversation.tools, form, text, conversation.continued_text
        )
        return ChatPrompt(text, token_ids, answer_format, form, images)

    async def tools(
        self, offered: tuple[Sequence[Function], Demand], asked: Sequence[Asked]
    ) -> ToolUse | None:
        """Settle which of the offered tools may be called, beside the requested form of text
        answers. Raises ApiError 400."""
        functions, demand = offered
        has_form = asks_for_json(asked)
        return await settle_tools(functions, demand, self._tool_notation, has_form=has_form)

    async def thinking(
        self,
        budget: int | None,
        answer_format: AnswerFormat | None = None,
        param: str = "thinking_token_budget",
    ) -> dict[str, Any]:
        """Return the sampling parameters that a budget for reasoning needs, for an answer that is
        read so, or not read at all.

        None and -1 are no budget. Raises ApiError 400 for a model whose reasoning cannot be told
        apart.
        """
        if budget is None or budget < 0:
            return {}
        tokenizer = self._tokenizer
        if self.tags is not None and not self.tags.form.is_countable:
            raise unavailable_feature(
                param,
                f"the marks of {self.tags.form.name} are several tokens, which are not counted",
            )
        if self.tags is None or tokenizer is None:
            why = (
                "what this model thinks is not told apart from its answers, so it cannot be counted"
            )
            raise unavailable_feature(
                param, f"{why} (the operator can say how it marks its thoughts: --reasoning-parser)"
            )
        # the output schema leaves no room for reasoning
        if answer_format is not None and answer_format.tags is None:
            return {}
        marks = ThinkTags(
            self.tags.form.begin,
            self.tags.form.end,
            None if answer_format is None else answer_format.is_inside,
        )
        num_tokens = self._vocab_size
        await self.work(num_tokens, lambda: tokens_of_tags(tokenizer, marks[:2], num_tokens))
        return {"thinking_token_budget": budget, "thinking_marks": marks}

    def _answer_format(
        self,
        tools: ToolUse | None,
        form: StructuredOutputsParams | None,
        prompt: str,
        continued: str | None = None,
    ) -> AnswerFormat:
        """Return how the answers to a request are read. `prompt` is the rendered chat, `continued`
        the message that the answer goes on with, if it does. Reasoning may come before JSON; forms
        of other kinds leave no room for them.
        """
        is_call = tools is not None and tools.is_enforced
        tags = self.tags if form is None or is_call or is_json(form) else None
        return AnswerFormat(
            tags, tags is not None and is_thinking(tags.form, prompt, continued), tools
        )

    def _tags(self, parser: str) -> ReasoningTags | None:
        is_auto = parser == "auto"
        form = (
            reasoning_of_template(self.template_source)
            if is_auto
            else REASONING_FORMATS.get(parser)
        )
        if form is None:
            return None
        (begin, is_first_special), (end, is_last_special) = (
            self._token(form.begin),
            self._token(form.end),
        )
        is_special = (is_first_special and is_last_special) or form.has_special_parts
        return ReasoningTags(form, begin, end, is_special)

    @property
    def _tool_notation(self) -> tuple[ToolFormat | None, int | None]:
        """How the model writes calls, if that is known,
        and the id of the marker where that is a special token."""
        form = self._tool_format
        first = "" if form is None else form.first_mark
        marker, is_special = self._token(first) if first else (None, False)
        return form, marker if is_special else None

    def _token(self, text: str) -> tuple[int | None, bool]:
        """(id of the token that has this text, if any; whether it is a special one)."""
        tokenizer = self._tokenizer
        token_id = None if tokenizer is None else tokenizer.token_to_id(text)
        return (
            token_id,
            tokenizer is not None
            and token_id is not None
            and token_id in tokenizer.special_token_ids,
        )

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return token ids of a raw prompt; `parse_special` reads the names of
        special tokens as the tokens."""
        tokenizer = self.tokenizer
        self.check_chars(len(text))
        return await self.work(
            len(text),
            lambda: tokenizer.encode(
                text, add_special_tokens=add_special_tokens, parse_special=parse_special
            ),
        )

    async def encode_many(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return token ids of raw prompts, a group of them after the other,
        so that others' texts have their turn in between."""
        if not texts:
            return []
        tokenizer = self.tokenizer
        for text in texts:
            self.check_chars(len(text))
        encoded: list[list[int]] = []
        for group in groups(texts, len):

            def encode(group: Sequence[str] = group) -> list[list[int]]:
                return [
                    tokenizer.encode(
                        each, add_special_tokens=add_special_tokens, parse_special=True
                    )
                    for each in group
                ]

            encoded += await self.work(sum(map(len, group)), encode)
        return encoded

    async def encode_chat(self, conversation: Conversation) -> EncodedChat:
        """Render a conversation and encode it, its images read; special tokens that users spelt out
        stay plain text."""
        tokenizer, template = self.tokenizer, self._template
        messages, sources = take_images(conversation.messages)
        tools = conversation.shown_tools
        if template is None:
            raise bad_request(f"this model cannot chat: {self._why_no_template}", param="messages")
        chosen = template
        if conversation.documents and not chosen.reads_documents:
            raise unavailable_feature(
                "documents", f"{NOT_IN_TEMPLATE}; put their text into a message"
            )

        def count() -> int:
            num_chars = _num_chars(messages) + len(
                msgspec.json.encode([tools, conversation.documents])
            )
            self.check_chars(num_chars)
            return num_chars

        def render() -> tuple[str, list[int]]:
            """The text with its origins, and its tokens."""
            text = _render(chosen, conversation, messages)
            return text, encode_chat(tokenizer, text)

        is_large = len(messages) > _INLINE_MESSAGES
        num_chars = await off_loop(SMALL + 1 if is_large else conversation.num_body_bytes, count)
        rendered, token_ids = await self.work(num_chars, render)
        text = "".join((rendered,))
        images = await read_images(self._images, sources, conversation.media_scope)
        if self._images is None:
            return EncodedChat(text, token_ids)
        marks = marks_of(self._images.limits.vision, tokenizer, images)
        if marks:
            token_ids = await self.work(num_chars, lambda: encode_chat(tokenizer, rendered, marks))
        return EncodedChat(text, *self._images.expand(token_ids, images, "messages"))

    async def num_tokens_before(
        self, mark: str, conversation: Conversation, text: str, images: Sequence[PlacedImage]
    ) -> int | None:
        """Return how many tokens a prompt has in common with the conversation that it was made of,
        which has a mark in it now; None where a template does not show the mark. `text` and
        `images` are the prompt's.

        Where the tokens at the mark are others than in the prompt, one too many."""
        tokenizer, template = self.tokenizer, self._template
        assert template is not None, "the prompt was rendered"

        def count() -> int | None:
            marked = _render(template, conversation, take_images(conversation.messages)[0])
            if mark not in marked:
                return None
            return len(encode_chat(tokenizer, marked[: _num_common(text, marked)]))

        num_tokens = await self.work(max(len(text), conversation.num_body_bytes), count)
        if num_tokens is not None:
            for place, image in images:
                num_tokens += image.num_tokens - 1 if place < num_tokens else 0
        return num_tokens

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template; None where there is none."""
        return self._template

    @property
    def template_source(self) -> str:
        """The chat template's source, or ""."""
        return self._template.source if self._template is not None else ""

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        tokenizer = self.tokenizer
        # most mistakes are found here, without a thread
        self.check_ids(token_ids[:_INLINE_CHARS], "tokens")

        def decode() -> str:
            self.check_ids(token_ids, "tokens")
            return tokenizer.decode(token_ids, skip_special_tokens=False)

        return await self.work(4 * len(token_ids), decode)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the same for ids that were checked, at once."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse ids that the model does not have."""
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            return
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise bad_request(
                    f"{param}: token id {_short(token_id)} is not in the model's vocabulary "
                    f"of {self._vocab_size}",
                    param=param,
                )

    def truncate(
        self, token_ids: list[int], keep: int | None, side: str | None = None
    ) -> list[int]:
        """Return the last `keep` tokens, or the first ones where the `side` to cut is "right"; none
        of them with 0.

        -1 keeps what the context holds beside one token of output.
        """
        if keep is None:
            return token_ids
        keep = self.max_model_len - 1 if keep < 0 else keep
        if side == "right":
            return token_ids[:keep]
        return token_ids[-keep:] if keep else []

    def max_tokens(
        self, num_prompt_tokens: int, wanted: int | None, *, default: int | None, param: str
    ) -> int:
        """Return output tokens of a request: what it wants if that fits, else `default` or the rest
        of the context.

        Raises ApiError 400 `context_length_exceeded` where the prompt, or the prompt and an
        explicit wish, do not fit.
        """
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise _too_long(
                f"the prompt has {num_prompt_tokens} tokens, and the context of this model "
                f"holds {self.max_model_len}, of "
                "which at least 1 is for the answer; shorten the prompt",
                None,
            )
        if wanted is None:
            return min(room, default) if default is not None else room
        if wanted > room:
            raise _too_long(
                f"the prompt's {num_prompt_tokens} tokens and {param}={_short(wanted)} "
                "exceed the context of this model, "
                f"{self.max_model_len} tokens; lower {param} to {room} or less, or leave it out",
                param,
            )
        return wanted

    def check_chars(self, num_chars: int, where: str | None = None) -> None:
        """Refuse a text that cannot fit, before it is read; `where` it stands is said."""
        if num_chars > self.max_model_len * _MAX_CHARS_PER_TOKEN:
            raise _too_long(
                f"{'the prompt' if where is None else where} has {num_chars} characters, and the "
                f"context of this model, {self.max_model_len} tokens, cannot hold as many",
                where,
            )

    async def work(self, num_chars: int, work: Callable[[], _T]) -> _T:
        """Do something whose cost grows with the number of characters it reads or writes:
        in a thread, if they are many."""
        if num_chars <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def groups(items: Sequence[_T], num_chars: Callable[[_T], int]) -> Iterator[Sequence[_T]]:
    """Texts one after the other, as many together as make a moment's work."""
    first = total = 0
    for place, each in enumerate(items):
        total += num_chars(each)
        if total >= _GROUP_CHARS:
            yield items[first : place + 1]
            first, total = place + 1, 0
    if first < len(items):
        yield items[first:]


def _num_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return all characters of all messages, wherever they are:
    calls and their arguments count as the contents do."""
    num_chars, left = 0, list[Any](messages)
    while left:
        value = left.pop()
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, Mapping):
            left += value.keys()
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        else:
            num_chars += 1
    return num_chars


def effort_kwargs(source: str, effort: str) -> dict[str, Any]:
    """Return what a chat template is told of a wished effort of reasoning, as vLLM tells it: its
    degree, and whether to think at all.

    Empty for a template that knows neither.
    """
    known = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {name: value for name, value in known.items() if name in source}


def _render(
    template: ChatTemplate, conversation: Conversation, messages: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text of a conversation, with its origins; its messages without their images.
    Raises RequestError."""
    tools = conversation.shown_tools
    shown = template.needs.fit_messages(without_developer(messages, template))
    draw = partial(
        template.render,
        tools=None if tools is None else template.needs.fit_tools(tools),
        documents=conversation.documents,
        template_kwargs=conversation.template_kwargs,
    )
    text = draw(
        shown,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.is_continued,
    )
    _check_roles(shown, draw)
    return text


def _num_common(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginnings."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def read_template(path: str | None) -> str | None:
    """Return the operator's chat template, where there is one. Raises ConfigError."""
    if path is None:
        return None
    try:
        source = read_text(path, MAX_SETTINGS_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"chat_template={path!r} cannot be read: {reason}") from None
    if not ChatTemplate(source).reads_messages:
        raise ConfigError(f"chat_template={path!r} {SHOWS_NOTHING}")
    return source


def _too_long(message: str, param: str | None) -> ApiError:
    return bad_request(message, param=param, code="context_length_exceeded")


def _check_roles(
    messages: Sequence[Mapping[str, Any]], render: Callable[[list[Mapping[str, Any]]], str]
) -> None:
    """Refuse a role that the template passes over in silence: its message would be missing from the
    prompt.

    Rendered once more, with marks in place of what such messages say. Raises ApiError 400 naming
    the role.
    """
    marks = {
        number: token_hex(16)
        for number, message in enumerate(messages)
        if message.get("role") not in _USUAL_ROLES
    }
    if not marks:
        return
    marked = [
        {**each, "content": marks[number]} if number in marks else each
        for number, each in enumerate(messages)
    ]
    rendered = render(marked)
    for number, mark in marks.items():
        if mark not in rendered:
            role = messages[number].get("role")
            raise bad_request(
                f"messages: the chat template of this model does not take the role {role!r}",
                param="messages",
            )


def _short(value: int) -> str:
    return str(value) if value.bit_length() <= 128 else "<a huge number>"
