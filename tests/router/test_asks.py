"""What the router reads of a body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.router.asks import DEFAULT_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS, AskReader, Read

READER = AskReader(64, "X-Session-Id")


def _read(body: Any, tenant: str = "t", **headers: str) -> Read:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return READER.read(names, json.dumps(body).encode(), tenant)


def _chat(*texts: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text} for text in texts]
    return {"model": "m", "messages": messages, **fields}


def test_the_next_turn_begins_as_the_one_before() -> None:
    first, second = _read(_chat("x" * 200)), _read(_chat("x" * 200, "y" * 200))
    assert len(first.ask.chunks) >= 3
    assert second.ask.chunks[: len(first.ask.chunks)] == first.ask.chunks
    assert second.ask.num_prompt_tokens > first.ask.num_prompt_tokens
    assert first.model == "m"


@pytest.mark.parametrize(
    "other",
    [
        _read(_chat("x" * 200, model="other")),
        _read(_chat("x" * 200, cache_salt="s")),
        _read(_chat("x" * 200, tools=[{"type": "function"}])),
        _read(_chat("x" * 200), tenant="u"),
    ],
)
def test_what_cannot_share_a_cache_has_other_digests(other: Read) -> None:
    assert not set(other.ask.chunks) & set(_read(_chat("x" * 200)).ask.chunks)


def test_sessions_and_lengths() -> None:
    assert _read(_chat("a"), x_session_id="h").ask.session == "h"
    assert _read(_chat("a", prompt_cache_key="k", user="u")).ask.session == "k"
    assert _read(_chat("a", user="u")).ask.session == "u"
    assert _read(_chat("a")).ask.session is None
    assert _read(_chat("a")).ask.num_output_tokens == DEFAULT_OUTPUT_TOKENS
    assert _read(_chat("a", max_tokens=7)).ask.num_output_tokens == 7
    assert _read(_chat("a", max_completion_tokens=10**9)).ask.num_output_tokens == MAX_OUTPUT_TOKENS


@given(
    st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["model", "messages", "user", "max_tokens", "input", "x"]),
                    inner,
                )
            ),
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_no_body_is_too_strange(body: bytes) -> None:
    assert READER.read({}, body, "t").ask.num_prompt_tokens >= 0
