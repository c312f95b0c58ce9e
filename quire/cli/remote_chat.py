"""`quire chat --url URL`: a conversation with any server that speaks OpenAI's chat API.

Owns the requests and the reading of their streams; how a conversation is held in a terminal is
`quire.cli.conversation`'s. Ctrl-C closes the connection, by which the server learns that no client
listens any more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.cli.conversation import AnswerError, Message, Reply
from quire.cli.options import SAMPLING_OPTIONS
from quire.cli.parser import UsageError
from quire.common.event_reader import EventReader
from quire.common.http_client import HttpClient, HttpError, HttpRequest, key_headers, server_root
from quire.errors import ConfigError

API_KEY_VARIABLE = "OPENAI_API_KEY"
_MAX_ERROR_CHARS = 400


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Options of a chat with a server."""
    group.add_argument(
        "--url",
        metavar="URL",
        help="talk to the server at URL (any of OpenAI's API) instead of loading a model",
    )
    group.add_argument(
        "--model-name",
        metavar="NAME",
        help="with --url: the model's name there (default: the first it names)",
    )
    group.add_argument(
        "--api-key", metavar="KEY", help=f"with --url: the key (default: ${API_KEY_VARIABLE})"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="with --url: longest silence (default: 120)",
    )


class RemoteModel:
    """A model behind a URL. Use in one thread; every answer runs its own event loop."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.system is not None and not args.system.strip():
            raise UsageError("--system is empty")
        self._url = server_root(args.url)
        self._headers = key_headers(args.api_key or os.environ.get(API_KEY_VARIABLE))
        self._timeout_s: float = args.timeout
        self._fields = _fields_of(args)
        self.name: str = args.model_name or asyncio.run(self._first_model())

    def answer(self, messages: Sequence[Message], show: Callable[[str], None]) -> Reply:
        """Stream an answer through `show`. Raises AnswerError, with nothing said;
        what was said before an error counts."""
        return asyncio.run(self._answer(messages, show))

    def close(self) -> None:
        """Nothing is held between answers."""

    async def _first_model(self) -> str:
        async with HttpClient(
            self._url, headers=self._headers, timeout_s=self._timeout_s
        ) as client:
            answer = await client.request(HttpRequest("GET", "/v1/models"))
        if answer.status != 200:
            raise ConfigError(
                f"{self._url} names no model: /v1/models answers "
                f"{_said(answer.status, answer.body)}; "
                + (
                    "give a valid key with --api-key"
                    if answer.status in (401, 403)
                    else "give it with --model-name"
                )
            )
        try:
            name = json.loads(answer.body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            name = None
        if not isinstance(name, str):
            raise ConfigError(f"{self._url} names no model; give it with --model-name")
        return name

    async def _answer(self, messages: Sequence[Message], show: Callable[[str], None]) -> Reply:
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps({**body, **self._fields}).encode()
        request = HttpRequest(
            "POST", "/v1/chat/completions", data, {"content-type": "application/json"}
        )
        reader = _StreamedAnswer(show)
        async with HttpClient(
            self._url, headers=self._headers, timeout_s=self._timeout_s
        ) as client:
            asking = asyncio.ensure_future(client.request(request, EventReader(reader)))
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, asking.cancel)
            try:
                got = await asking
            except asyncio.CancelledError:
                if not reader.answer.text:
                    raise AnswerError("stopped before it began") from None
                reader.answer.is_stopped = True
                return reader.answer
            except HttpError as error:
                return reader.broken_off(str(error))
            finally:
                loop.remove_signal_handler(signal.SIGINT)
        if not 200 <= got.status < 300:
            raise AnswerError(f"the server answers {_said(got.status, got.body)}")
        if reader.error is not None:
            return reader.broken_off(reader.error)
        return reader.answer


class _StreamedAnswer:
    """Takes the events of an answer, and shows its text."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.answer = Reply()
        self.error: str | None = None
        self._show = show
        self._began_s = time.monotonic()

    def __call__(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = "an event of the answer is not JSON"
            return
        if not isinstance(event, dict):
            return
        if event.get("error") is not None:
            self.error = _message_of(event)
            return
        answer = self.answer
        usage = event.get("usage")
        if isinstance(usage, Mapping):
            details = usage.get("prompt_tokens_details")
            answer.num_prompt, answer.num_output = (
                usage.get("prompt_tokens"),
                usage.get("completion_tokens"),
            )
            answer.num_cached = (
                details.get("cached_tokens") if isinstance(details, Mapping) else None
            )
        for choice in event.get("choices") or ():
            text = (choice.get("delta") or {}).get("content")
            if text:
                if answer.first_s is None:
                    answer.first_s = time.monotonic() - self._began_s
                answer.text += text
                self._show(text)

    def broken_off(self, why: str) -> Reply:
        """Return the answer so far, if there is any of it. Raises AnswerError if not."""
        if not self.answer.text:
            raise AnswerError(why)
        self.answer.is_stopped = True
        print(f"\n(broken off: {why})", file=sys.stderr)
        return self.answer


def _fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options that were given, under the names of the API (OpenAI's own,
    and vLLM's beside them)."""
    names = [*(option.name for option in SAMPLING_OPTIONS), "stop", "ignore_eos"]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _said(status: int, body: bytes) -> str:
    try:
        message = _message_of(json.loads(body))
    except ValueError:
        message = body[:_MAX_ERROR_CHARS].decode(errors="replace")
    return f"{status}: {' '.join(message.split())}" if message.strip() else str(status)


def _message_of(body: Any) -> str:
    """Return what an error's body says, in OpenAI's shape or any other."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return str(message if message is not None else error)[:_MAX_ERROR_CHARS]
