"""Prompts from the command line, from files and from standard input,
plain or through the model's chat template."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from quire.cli.parser import UsageError
from quire.cli.text_lines import strict_stdin
from quire.common.bounded_files import MAX_SETTINGS_BYTES, MAX_TEXT_BYTES, read_text
from quire.engine.front.prompts import Prompt
from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer

Message = dict[str, str]


class NamedPrompt(NamedTuple):
    """A prompt as the engine takes it, and the text by which people recognise it."""

    text: str
    prompt: Prompt


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """-p, --prompts-file, --chat and what belongs to them."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "-p", "--prompt", action="append", default=[], metavar="TEXT", help="a prompt (repeatable)"
    )
    group.add_argument(
        "--prompts-file",
        metavar="FILE",
        help='one prompt a line, or JSON lines in a .jsonl file ("text", {"prompt": ...} or '
        '{"prompt_token_ids": [...]}); '
        "- is standard input",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="send each prompt as a user's message through the chat template",
    )
    add_chat_options(group)


def add_chat_options(group: argparse._ActionsContainer) -> None:
    """--system and --chat-template."""
    group.add_argument(
        "--system",
        metavar="TEXT",
        help="a system message before the user's (needs a chat template)",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja chat template instead of the model's own"
    )


def read_prompts(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[NamedPrompt]:
    """Return all prompts in order, those of -p first. Raises UsageError if there are none,
    ConfigError for unreadable ones."""
    prompts = [NamedPrompt(text, text) for text in args.prompt]
    if args.prompts_file is not None:
        prompts += _read_file(args.prompts_file)
    if not prompts:
        raise UsageError('there is no prompt; give -p "..." or --prompts-file FILE')
    if not args.chat:
        if args.system is not None or args.chat_template is not None:
            raise UsageError("--system and --chat-template need --chat")
        return prompts
    if not all(isinstance(each.prompt, str) for each in prompts):
        raise UsageError(
            "--chat takes texts; prompts given as token ids cannot go through a chat template"
        )
    encode = ChatEncoder(tokenizer, args.chat_template)
    start = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [
        NamedPrompt(text, encode([*start, {"role": "user", "content": text}]))
        for text, _ in prompts
    ]


class ChatEncoder:
    """Messages to prompts through a chat template: the model's own, or a file's."""

    def __init__(self, tokenizer: Tokenizer | None, template_file: str | None) -> None:
        from quire.text.chat import SHOWS_NOTHING, ChatTemplate

        if tokenizer is None:
            raise ConfigError("a chat template needs a tokenizer, and there is none")
        self._tokenizer = tokenizer
        if template_file is None:
            self._template = ChatTemplate.from_tokenizer(tokenizer)
        else:
            self._template = ChatTemplate(
                _read_text(template_file, MAX_SETTINGS_BYTES), tokenizer.config.named_tokens
            )
            if not self._template.reads_messages:
                raise ConfigError(f"{template_file} {SHOWS_NOTHING}")

    def __call__(self, messages: Sequence[Message]) -> Prompt:
        """Return a prompt that ends where the model's answer begins."""
        from quire.text.chat import encode_chat

        rendered = self._template.render(messages)
        return {"prompt": rendered, "prompt_token_ids": encode_chat(self._tokenizer, rendered)}


def _read_file(name: str) -> Iterable[NamedPrompt]:
    # JSON and prose may hold other ends of lines
    lines = _read_text(name, MAX_TEXT_BYTES).split("\n")
    is_json = name.endswith(".jsonl")
    return [
        _parse_line(line, f"{name}:{number}") if is_json else NamedPrompt(line, line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parse_line(line: str, place: str) -> NamedPrompt:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not valid JSON: {error}") from None
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        value = value["prompt"]
    if isinstance(value, str):
        return NamedPrompt(value, value)
    token_ids = value.get("prompt_token_ids") if isinstance(value, dict) else None
    if isinstance(token_ids, list):
        return NamedPrompt(f"{len(token_ids)} token ids", {"prompt_token_ids": token_ids})
    raise ConfigError(
        f'{place} must be a text, {{"prompt": "..."}} or {{"prompt_token_ids": [...]}}, not '
        f"{line[:80]}"
    )


def _read_text(name: str, max_bytes: int) -> str:
    """The text of a file, or for - of standard input."""
    try:
        if name == "-":
            with strict_stdin() as stdin:
                text = stdin.read(max_bytes + 1)
            if len(text) > max_bytes:
                raise ConfigError(f"standard input holds more than {max_bytes >> 20} Mi characters")
            return text
        return read_text(name, max_bytes, encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
