"""A conversation in the terminal with any model or server: reading lines, commands, the history,
and what is told of an answer."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Protocol

from quire.cli.terminal import printable
from quire.common.bounded_files import bounded_line
from quire.errors import ConfigError

Message = dict[str, str]

HELP = """\
/reset   forget the conversation (and keep the system message)
/quit    leave (also Ctrl-D)
/help    this list
Ctrl-C   stop the answer"""


class AnswerError(Exception):
    """A message cannot be answered; the conversation can go on without it."""


@dataclass(slots=True)
class Reply:
    """One exchange, as far as it got. Numbers are None where the model or server that
    answered does not give them."""

    text: str = ""
    is_stopped: bool = False
    """By Ctrl-C, or because it broke off."""
    num_prompt: int | None = None
    num_cached: int | None = None
    num_output: int | None = None
    first_s: float | None = None
    """Time to the first token."""


class Model(Protocol):
    """Who answers."""

    name: str

    def answer(self, messages: Sequence[Message], show: Callable[[str], None]) -> Reply:
        """Answer the last message; `show` gets the text as it comes. Raises AnswerError.
        Ctrl-C ends it early."""
        ...


class ChatSession:
    """Messages so far, and the loop that adds to them."""

    def __init__(self, model: Model, start: Sequence[Message], *, is_verbose: bool) -> None:
        self._model = model
        self._start = list(start)
        self._is_verbose = is_verbose
        self._is_terminal = sys.stdin.isatty()
        self.messages = list(start)

    def hold(self) -> None:
        """Read, answer, repeat, until the input ends or /quit."""
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # what is no text is shown, and ends no chat
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for input())
            print(
                f"Chat with {self._model.name}. /help lists commands; Ctrl-D quits.",
                file=sys.stderr,
            )
        for text in self._read_lines():
            if text in ("/quit", "/exit"):
                return
            if text == "/reset":
                self.messages = list(self._start)
                print("(forgotten)", file=sys.stderr)
            elif text.startswith("/"):
                print(
                    HELP if text == "/help" else f"there is no command {text}; /help lists them",
                    file=sys.stderr,
                )
            else:
                self._turn(text)

    def _read_lines(self) -> Iterator[str]:
        while True:
            try:
                text = (input("> ") if self._is_terminal else _next_line()).strip()
            except EOFError:
                if self._is_terminal:
                    print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /quit leaves)", file=sys.stderr)
                continue
            if text:
                yield text

    def _turn(self, text: str) -> None:
        """Answer one message. One that cannot be answered is taken back, and the chat goes on."""
        self.messages.append({"role": "user", "content": text})
        started_s = time.monotonic()
        try:
            answer = self._model.answer(self.messages, _show)
        except AnswerError as error:
            self.messages.pop()
            print(f"(not answered: {error}; /reset starts anew)", file=sys.stderr)
            return
        print(" [stopped]" if answer.is_stopped else "")
        self.messages.append({"role": "assistant", "content": answer.text})
        if self._is_verbose:
            print(_report(answer, time.monotonic() - started_s), file=sys.stderr)


def _next_line() -> str:
    """The next line of a pipe or file. Raises EOFError after the last one, and ConfigError."""
    try:
        line = bounded_line(sys.stdin)
    except OSError as error:
        raise ConfigError(f"standard input cannot be read: {error.strerror}") from None
    if not line:
        raise EOFError
    return line


def _show(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _report(answer: Reply, wall_s: float) -> str:
    parts = []
    if answer.num_prompt is not None:
        cached = (
            "" if answer.num_cached is None else f", {answer.num_cached} of them from the cache"
        )
        parts.append(f"{answer.num_prompt} prompt tokens{cached}")
    rate = ""
    if answer.num_output is not None:
        parts.append(f"{answer.num_output} in the answer")
        rate = f", {answer.num_output / max(wall_s, 1e-9):.1f} tokens/s"
    first_ms = 1000 * (answer.first_s or 0.0)
    return f"({'; '.join([*parts, f'first after {first_ms:.0f} ms{rate}'])})"
