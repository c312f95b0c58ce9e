"""What the router reads of a request's body: enough to choose, and nothing that it would change.

Only the fields below are looked at; prompts stay the bytes that they came as. A body that is not
what it should be gives an `Ask` that knows nothing, and the back end says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from quire.routing.ask import Ask, digests

BYTES_PER_TOKEN = 4
"""Of JSON in English; the policies compare estimates with one another only."""
DEFAULT_OUTPUT_TOKENS = 256
"""Where a request does not say how long its answer may be."""
MAX_OUTPUT_TOKENS = 4096
"""Few answers are as long as they may be."""
_MAX_SESSION_CHARS = 512


class _Body(msgspec.Struct):
    """Fields that matter here, undecoded."""

    model: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()


class Read(NamedTuple):
    """What was read of a request."""

    ask: Ask
    model: str | None = None


_decoder = msgspec.json.Decoder(_Body)


class AskReader:
    """Reads requests with one router's settings."""

    def __init__(self, chunk_bytes: int, session_header: str) -> None:
        self._chunk_bytes = chunk_bytes
        self._session_header = session_header.lower()

    def read(self, headers: Mapping[str, str], body: bytes, tenant: str) -> Read:
        """Return what there is to know. Never raises."""
        session = headers.get(self._session_header)
        if body.lstrip()[:1] != b"{":
            return Read(Ask(session, num_output_tokens=0))
        try:
            fields = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return Read(Ask(session))
        model = _text(fields.model)
        session = session or _text(fields.prompt_cache_key) or _text(fields.user)
        prompt = b"".join(
            map(bytes, (fields.tools, fields.system, fields.instructions, fields.messages,
                        fields.prompt, fields.input))
        )  # fmt: skip
        seed = "\0".join((tenant, model or "", _text(fields.cache_salt) or ""))
        ask = Ask(
            None if session is None else session[:_MAX_SESSION_CHARS],
            digests(seed.encode("utf-8", "surrogatepass"), prompt, self._chunk_bytes),
            max(1, self._chunk_bytes // BYTES_PER_TOKEN),
            len(prompt) // BYTES_PER_TOKEN,
            _output_tokens(fields),
            headers.get("x-request-id", ""),
        )
        return Read(ask, model)


def _output_tokens(fields: _Body) -> int:
    for raw in (fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens):
        text = bytes(raw)
        if text.isdigit() and len(text) < 20:
            return min(int(text), MAX_OUTPUT_TOKENS)
    return DEFAULT_OUTPUT_TOKENS


def _text(raw: msgspec.Raw) -> str | None:
    """Return a field that is a string, or None."""
    if bytes(raw)[:1] != b'"':
        return None
    try:
        value: str = msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value
