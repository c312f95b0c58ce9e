"""Chat messages to a prompt: rendering a model's template, and its tokens with users' text kept
plain.

Owns the contract with chat templates: what they may see, what they may cost, and which of the text
that they give may mean special tokens. Never parses model output, and never takes a template from a
request.

Which special tokens are meant. A rendered chat mixes what the template wrote (`<|im_start|>`) with
what users wrote, and only the first may become special tokens. Searching the users' text for token
names before rendering fails where a template cuts and joins text (`"<|im_" ~ "end|>"` from two
fields, or a removed part in the middle), and marking it breaks templates that look at it
(`content.split("</think>")`). So the template is traced instead: its own text and literals carry a
record of their origin through concatenation, slicing, stripping and joining (`traced.py`), the
rendered *string* is exactly what transformers renders, and a token name counts only where every
character of it has a record. Whatever is not traced is plain text. Three things beside the
template's own text are trusted:

- named tokens that the tokenizer gives (`bos_token`, ...);
- the role of a message when it is one of `KNOWN_ROLES`, since some templates write
  `"<|" + role + "|>"`;
- in assistants' messages, tokens of level 1 (`<think>`, see `Tokenizer.control_level`), since the
  model wrote them.
"""

from __future__ import annotations

import re
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

from quire.errors import ConfigError, InvalidParameterError, RequestError
from quire.text.template_needs import TemplateNeeds
from quire.text.tokenizer import LENIENT_LEVEL, STRICT_LEVEL, Tokenizer
from quire.text.traced import Span, join_traced, spans_of, trace

if TYPE_CHECKING:
    from jinja2 import Template

KNOWN_ROLES: Final = frozenset(
    {
        "system",
        "developer",
        "user",
        "assistant",
        "tool",
        "function",
        "ipython",
        "observation",
        "context",
        "documents",
    }
)
_RESERVED: Final = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "loop",
        "self",
        "caller",
    }
    | {
        "varargs",
        "kwargs",
        "range",
        "dict",
        "namespace",
        "cycler",
        "joiner",
        "raise_exception",
        "strftime_now",
    }
)
SHOWS_NOTHING: Final = (
    "reads no `messages`, so that no prompt would have any; give a chat template in Jinja"
)
"""Of a file that an option names as a chat template."""
_MAX_DEPTH: Final = 64
_MAX_REASON_CHARS: Final = 500  # it may quote what the template looked up
_MAX_SOURCE_CHARS: Final = 1 << 20  # the longest published template has below 64 Ki characters


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one render may cost: characters of any one string, loop turns and calls, and seconds."""

    max_chars: int = 8 << 20
    max_steps: int = 2_000_000
    max_render_s: float = 10.0


class ChatTemplate:
    """A compiled chat template.

    source: its Jinja text. named_tokens: role ("bos_token", ...) to text, as the template sees
    them. now: the clock behind `strftime_now`. Raises ConfigError when the source is not a
    template.
    """

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str] | None = None,
        *,
        limits: RenderLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._named_tokens = {
            role: trace(text, STRICT_LEVEL) for role, text in (named_tokens or {}).items()
        }
        self.source = source
        self._limits = limits or RenderLimits()
        self._template = _compile(source, now)

    @cached_property
    def needs(self) -> TemplateNeeds:
        """What messages and tools must have for this template."""
        return TemplateNeeds(self._probe)

    def _probe(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> str | None:
        try:
            return self.render(messages, tools=tools or None)
        except RequestError:
            return None

    @property
    def reads_messages(self) -> bool:
        """Whether messages can have an effect; else it is no chat template."""
        from jinja2 import meta

        parsed = self._template.environment.parse(self.source)
        return "messages" in meta.find_undeclared_variables(parsed)

    @property
    def reads_documents(self) -> bool:
        """Whether documents that a chat refers to can have an effect."""
        return "documents" in self.source

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, name: str = "default") -> ChatTemplate:
        """Return the named template of a model. Raises ConfigError when it has none of that
        name."""
        templates = tokenizer.config.chat_templates
        if name not in templates:
            known = f"it has {sorted(templates)}" if templates else "it has none"
            raise ConfigError(
                f"the model has no chat template {name!r} ({known}); pass one, or prompt "
                "with plain text"
            )
        return cls(templates[name], tokenizer.config.named_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt's text, as transformers renders it; `encode_chat` turns the very string
        returned into tokens.

        `continue_final_message` leaves the last message open for the model to go on with, and takes
        precedence over `add_generation_prompt`. `template_kwargs` reach the template as variables,
        such as `enable_thinking`; those that it does not use have no effect. Raises RequestError
        when the template refuses the messages or exceeds its limits, and InvalidParameterError for
        values that a template may not get.
        """
        _check_kwargs(template_kwargs or {}, self._named_tokens)
        tag = f"{token_hex(16)} "
        chat = [_trace_message(message) for message in messages]
        if continue_final_message:
            _append_tag(chat, tag)
        variables = {
            **(template_kwargs or {}),
            **self._named_tokens,
            "messages": chat,
            "tools": None if tools is None else _copy(list(tools), 0),
            "documents": None if documents is None else _copy(list(documents), 0),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        rendered = self._run(variables)
        return _cut_at_tag(rendered, tag) if continue_final_message else rendered

    def _run(self, variables: dict[str, Any]) -> str:
        from jinja2.exceptions import SecurityError, TemplateError

        from quire.text.metering import LimitError, Meter, meter_in_use

        limits, clock = self._limits, time.monotonic
        meter = Meter(
            max_steps=limits.max_steps,
            max_chars=limits.max_chars,
            deadline_s=clock() + limits.max_render_s,
            clock=clock,
        )
        token = meter_in_use.set(meter)
        try:
            return self._template.render(variables)
        except LimitError as error:
            raise RequestError(f"the chat template was stopped: {error}") from None
        except SecurityError as error:
            raise RequestError(
                f"the chat template does what templates may not{_line_of(error)}"
            ) from None
        except TemplateError as error:
            reason = str(error)[:_MAX_REASON_CHARS]
            raise RequestError(
                f"the chat template cannot render these messages: {reason}{_line_of(error)}"
            ) from None
        except Exception as error:
            # Its text may quote the messages; the type and the line say enough.
            name = type(error).__name__
            raise RequestError(
                f"the chat template fails on these messages with {name}{_line_of(error)}"
            ) from None
        finally:
            meter_in_use.reset(token)


def without_developer(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> Sequence[Mapping[str, Any]]:
    """Replace OpenAI's newer name for "system", for templates that do not know it."""
    if "developer" in template.source:
        return messages
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message
        for message in messages
    ]


def encode_chat(
    tokenizer: Tokenizer,
    rendered: str,
    marks: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> list[int]:
    """Return token ids of a rendered chat: control tokens where the template wrote them, plain text
    everywhere else.

    `rendered` is what `ChatTemplate.render` gave; a plain `str` has no template text, so all of it
    is encoded as plain. Adds no BOS: templates write it. `marks` says what occurrences of a control
    token stand for, one after the other: texts and control tokens by turns, a text first.
    """
    text, spans = "".join((rendered,)), spans_of(rendered)
    left = {control: iter(stands) for control, stands in (marks or {}).items()}
    pieces, position = [], 0
    for start, end in _find_controls(tokenizer, text, spans):
        control = text[start:end]
        pieces.append(text[position:start])
        position = end
        stands = next(left[control], None) if control in left else None
        if stands is None:
            pieces.append(tokenizer.guard.secret_name(control))
            continue
        pieces += [
            tokenizer.guard.secret_name(each) if number % 2 else each
            for number, each in enumerate(stands)
        ]
    pieces.append(text[position:])
    return tokenizer.encode_secret("".join(pieces))


def _find_controls(
    tokenizer: Tokenizer, text: str, spans: Sequence[Span]
) -> Iterator[tuple[int, int]]:
    """Yield where control tokens are written by those who may: leftmost first, then longest,
    as tokenizers match them."""
    levels, lengths = tokenizer.control_level, tokenizer.control_lengths
    if not spans or not lengths:
        return
    areas = {level: _areas(spans, level) for level in (LENIENT_LEVEL, STRICT_LEVEL)}
    # one character: nothing to backtrack
    first_char = re.compile(f"[{re.escape(''.join(lengths))}]")
    for area_start, area_end in areas[LENIENT_LEVEL]:
        position = area_start
        while (match := first_char.search(text, position, area_end)) is not None:
            start = match.start()
            for length in lengths[match[0]]:
                level = levels.get(text[start : start + length], 0)
                if level and start + length <= _area_end(areas[level], start):
                    yield start, start + length
                    position = start + length
                    break
            else:
                position = start + 1


def _areas(spans: Sequence[Span], min_level: int) -> list[tuple[int, int]]:
    """Return the spans of text that are trusted at `min_level` throughout."""
    areas: list[tuple[int, int]] = []
    for start, end, level in spans:
        if level < min_level:
            continue
        if areas and areas[-1][1] == start:
            areas[-1] = (areas[-1][0], end)
        else:
            areas.append((start, end))
    return areas


def _area_end(areas: Sequence[tuple[int, int]], position: int) -> int:
    """Return the end of the area that holds `position`, or 0."""
    index = bisect_right(areas, position, key=lambda area: area[0]) - 1
    return areas[index][1] if index >= 0 and position < areas[index][1] else 0


def _compile(source: str, now: Callable[[], datetime]) -> Template:
    from jinja2.exceptions import TemplateSyntaxError

    from quire.text.sandbox import TemplateEnvironment

    if len(source) > _MAX_SOURCE_CHARS:
        raise ConfigError(
            f"the chat template has {len(source)} characters; more than {_MAX_SOURCE_CHARS} "
            "are not read"
        )
    environment = TemplateEnvironment(lambda format: now().strftime(format))
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        reason = (error.message or "")[:_MAX_REASON_CHARS]
        raise ConfigError(
            f"the chat template is not valid: {reason} (line {error.lineno})"
        ) from None
    except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
        name = type(error).__name__
        raise ConfigError(
            f"the chat template cannot be compiled ({name}); is it nested too deeply?"
        ) from None


# What templates see of a request.


def _check_kwargs(kwargs: Mapping[str, object], named_tokens: Mapping[str, str]) -> None:
    for name, value in kwargs.items():
        if not isinstance(name, str):
            raise InvalidParameterError(
                f"chat_template_kwargs has the name {str(name)[:100]}, which is no text",
                param="chat_template_kwargs",
            )
        if (
            name in _RESERVED
            or name in named_tokens
            or name.endswith("_token")
            or name.startswith("_")
        ):
            raise InvalidParameterError(
                f"chat_template_kwargs must not set {name!r}: the template gets it from elsewhere",
                param="chat_template_kwargs",
            )
        if value is not None and not isinstance(value, str | int | float):
            raise InvalidParameterError(
                f"chat_template_kwargs[{name!r}] must be text, a number, a boolean or null, "
                f"not {type(value).__name__}",
                param="chat_template_kwargs",
            )


def _trace_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message with what is trusted in it marked."""
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        raise InvalidParameterError(
            'each message must be an object with a "role"', param="messages"
        )
    copy: dict[str, Any] = _copy(message, LENIENT_LEVEL if role == "assistant" else 0)
    copy["role"] = trace(role, STRICT_LEVEL) if role in KNOWN_ROLES else role
    return copy


def _copy(value: Any, level: int, depth: int = 0) -> Any:
    """Return a deep copy of JSON-like data, its strings traced at `level` (0 for not at all)."""
    if depth > _MAX_DEPTH:
        raise InvalidParameterError(
            f"messages are nested more than {_MAX_DEPTH} deep", param="messages"
        )
    if isinstance(value, str):
        return trace(value, level) if level else "".join((value,))
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            _copy(key, 0, depth + 1): _copy(each, level, depth + 1) for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_copy(each, level, depth + 1) for each in value]
    raise InvalidParameterError(
        f"messages and tools must be plain JSON data, not {type(value).__name__}", param="messages"
    )


# Continuing the final message.


def _append_tag(chat: list[dict[str, Any]], tag: str) -> None:
    """Mark the end of the last message's text so that the rendered prompt can be cut there."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = join_traced((content, tag))
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] = join_traced((part["text"], tag))
            return
    raise InvalidParameterError(
        "continue_final_message needs a last message with text to continue",
        param="continue_final_message",
    )


def _cut_at_tag(rendered: str, tag: str) -> str:
    position = rendered.rfind(tag.strip())
    if position < 0:
        raise RequestError(
            "continue_final_message: the chat template does not show the end of the last message; "
            "it cannot be continued with this model"
        )
    cut = rendered[:position]
    # A template that strips contents took the space at the tag's end, and would have stripped
    # before the tag.
    return cut if rendered.startswith(tag, position) else cut.rstrip()


def _line_of(error: BaseException) -> str:
    """Return where in the template an error arose, if known."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == "<template>"
    ]
    return f" (line {lines[-1]} of the template)" if lines else ""
