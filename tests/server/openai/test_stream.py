"""OpenAI behaviours 61 to 80: streams, as bytes and as the official clients read them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import httpx
import openai
import pytest
from fake_client import FakeClient, Script
from served import until
from servers import MODEL, RunningServer, serve
from timing import timed

from quire.config.api import ApiConfig

pytestmark = timed

CAT: list[Any] = [{"role": "user", "content": "Tell me of a cat."}]
BODY = {"model": MODEL, "messages": CAT, "max_tokens": 8, "seed": 7, "stream": True}


def events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The parsed events of one stream; its framing is checked."""
    response = http.post("/v1/chat/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return parse(response.text)


def parse(text: str) -> list[dict[str, Any]]:
    """Events up to `[DONE]`, which must be last."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    blocks = [block for block in blocks if block != ": keepalive"]
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: {") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def content(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """One choice's text."""
    choices = [
        choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index
    ]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_61_63_64_69_chunks(http: httpx.Client) -> None:
    chunks = events(http)
    assert (
        len(
            {
                json.dumps([chunk[key] for key in ("id", "created", "model", "system_fingerprint")])
                for chunk in chunks
            }
        )
        == 1
    )
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert sum("role" in choice["delta"] for chunk in chunks for choice in chunk["choices"]) == 1
    assert all("choices" in chunk for chunk in chunks)


def test_65_66_68_choices_begin_in_order_and_end_once(http: httpx.Client) -> None:
    chunks = events(http, n=3)
    seen: list[int] = []
    ended: set[int] = set()
    for chunk in chunks:
        assert chunk["choices"] and "usage" not in chunk
        for choice in chunk["choices"]:
            assert choice["index"] not in ended
            if choice["index"] not in seen:
                seen.append(choice["index"])
            if choice["finish_reason"] is not None:
                ended.add(choice["index"])
    assert seen == [0, 1, 2] and ended == {0, 1, 2}


@pytest.mark.parametrize("is_running", [False, True])
def test_67_usage_is_last(http: httpx.Client, is_running: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": is_running}
    *chunks, last = events(http, stream_options=options)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
    assert all("usage" in chunk for chunk in chunks)
    assert all((chunk["usage"] is not None) is is_running for chunk in chunks)
    if is_running:
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(set(counts)) and (counts[0], counts[-1]) == (0, 8), (
            "the chunk of the role has no token yet"
        )
        assert (
            content(chunks) == content(events(http))
            and chunks[-1]["choices"][0]["finish_reason"] == "length"
        )


def test_67_running_usage_counts_what_was_sent_and_not_what_waits() -> None:
    """Several outputs are there before the first is taken; each chunk counts its own."""
    body = {
        "prompt": "x",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    chat = {**body, "messages": CAT}
    del chat["prompt"]
    with serve(FakeClient(Script(pieces=["a", "b", "c", "d"]))) as server:
        for path, fields in (("completions", body), ("chat/completions", chat)):
            lines = httpx.post(f"{server.v1}/{path}", json=fields).text.splitlines()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            texts = [
                choice.get("text") or choice.get("delta", {}).get("content")
                for c in chunks
                for choice in c["choices"]
            ]
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert "".join(text or "" for text in texts) == "abcd" and counts[-1] == 4
            shown = 0
            for chunk, count in zip(chunks, counts, strict=True):
                for choice in chunk["choices"]:
                    shown += len(choice.get("text") or choice.get("delta", {}).get("content") or "")
                assert count == shown


@pytest.mark.parametrize(
    "fields", [{}, {"stop": "the"}, {"temperature": 1.5, "max_tokens": 24}, {"logprobs": True}]
)
def test_71_72_75_deltas_add_up_to_the_whole(http: httpx.Client, fields: dict[str, Any]) -> None:
    chunks = events(http, **fields)
    whole = http.post("/v1/chat/completions", json={**BODY, **fields, "stream": False}).json()[
        "choices"
    ][0]
    assert content(chunks) == whole["message"]["content"]
    if fields.get("logprobs"):
        parts = [
            choice["logprobs"]["content"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["logprobs"]
        ]
        assert [token for part in parts for token in part] == whole["logprobs"]["content"]


WIDE = "na\u00efve \u732b\U0001f431 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u0e01\u0e33 end"


@pytest.mark.slow
def test_37_72_characters_of_several_tokens_come_whole_also_before_a_stop(
    http: httpx.Client,
) -> None:
    fields: dict[str, Any] = {
        "structured_outputs": {"choice": [WIDE]},
        "max_tokens": 100,
        "logprobs": True,
    }
    chunks = events(http, **fields)
    assert content(chunks) == WIDE
    tokens = [
        token
        for chunk in chunks
        for choice in chunk["choices"]
        for token in (choice["logprobs"] or {"content": []})["content"]
    ]
    pieces = [bytes(token["bytes"] or ()) for token in tokens]
    assert any(b"\xf0" in piece and len(piece) < 4 for piece in pieces), "no character is in pieces"
    assert b"".join(pieces) == WIDE.encode() and tokens[-1]["bytes"] is None, (
        "the token that ended it is no text"
    )
    for stop in ("\U0001f431", "\u200d", "\u732b\U0001f431 ", "n", "\u0e33 e"):
        cut = WIDE[: WIDE.index(stop)]
        assert content(events(http, **fields, stop=stop)) == cut
        whole = http.post(
            "/v1/chat/completions", json={**BODY, **fields, "stop": stop, "stream": False}
        ).json()["choices"][0]
        assert (whole["message"]["content"], whole["finish_reason"]) == (cut, "stop")


def test_73_nothing_is_sent_while_a_stop_is_possible(http: httpx.Client) -> None:
    text = content(events(http))
    chunks = events(http, stop=text[2:20] + "\U0001f408")
    deltas = [
        choice["delta"]
        for chunk in chunks[1:]
        for choice in chunk["choices"]
        if choice["finish_reason"] is None
    ]
    assert all(delta["content"] for delta in deltas)
    assert content(chunks) == text


def test_t33_no_part_of_a_stop_string_leaks(http: httpx.Client) -> None:
    text = content(events(http, max_tokens=16))
    for start in range(0, len(text) - 4, 3):
        stop = text[start : start + 4]
        chunks = events(http, max_tokens=16, stop=[stop])
        assert content(chunks) == text[: text.index(stop)]


def test_76_an_error_after_the_start_is_the_last_event() -> None:
    with serve(FakeClient(Script(error="the engine failed on this step: RuntimeError"))) as server:
        response = httpx.post(
            f"{server.v1}/chat/completions", json={"messages": CAT, "stream": True}
        )
        *chunks, last = parse(response.text)
        assert response.status_code == 200 and content(chunks) == "one two three"
        assert set(last) == {"error"} and set(last["error"]) == {"message", "type", "param", "code"}
        with openai.OpenAI(base_url=server.v1, api_key="x", max_retries=0) as client:
            stream = client.chat.completions.create(model="fake", messages=CAT, stream=True)
            with pytest.raises(openai.APIError, match="failed"):
                list(stream)


def test_76_an_error_before_the_first_token_is_a_plain_one_or_an_event_after_a_comment() -> None:
    body = {"messages": CAT, "stream": True}
    script = Script(pieces=(), error="no luck")
    with serve(FakeClient(script)) as server:
        assert httpx.post(f"{server.v1}/chat/completions", json=body).status_code == 500
    late = Script(begins=False)
    with serve(FakeClient(late), ApiConfig(keep_alive_s=0.05, request_timeout_s=1.0)) as server:
        response = httpx.post(f"{server.v1}/chat/completions", json=body)
        assert response.status_code == 200 and response.text.startswith(": keepalive\n\n")
        (last,) = parse(response.text)
        assert last["error"]["code"] == "deadline_exceeded"


def test_62_keep_alives_are_comments() -> None:
    config = ApiConfig(keep_alive_s=0.05)
    with serve(FakeClient(Script(pause_s=0.2)), config) as server:
        response = httpx.post(
            f"{server.v1}/chat/completions", json={"messages": CAT, "stream": True}
        )
        assert ": keepalive\n\n" in response.text and "id:" not in response.text.split('"')[0]
        assert "event:" not in response.text
        with openai.OpenAI(base_url=server.v1, api_key="x") as client:
            stream = client.chat.completions.create(model="fake", messages=CAT, stream=True)
            assert (
                "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "one two three"
            )


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("begins", [True, False])
def test_77_a_client_that_leaves_ends_its_request(is_stream: bool, begins: bool) -> None:
    client = FakeClient(
        Script(pieces=["x", "y"], gate=threading.Event(), num_before_gate=1, begins=begins)
    )
    with serve(client) as server:
        body = json.dumps({"messages": CAT, "stream": is_stream}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + body)
            until(lambda: len(client.streams) == 1)
            if is_stream and begins:
                assert connection.recv(100)
        until(lambda: client.num_aborted == 1)
        assert client.streams == []


def test_78_a_reader_that_is_too_slow_loses_its_own_request_only() -> None:
    client = FakeClient(Script(pieces=["x" * 50_000] * 400, pause_s=0.0))
    with serve(client, ApiConfig(write_timeout_s=0.3)) as server:
        body = json.dumps({"messages": CAT, "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(head + body)
            until(lambda: bool(client.requests))
            client.script = Script()
            other = httpx.post(f"{server.v1}/chat/completions", json={"messages": CAT})
            assert other.status_code == 200
            until(lambda: client.streams == [])


def test_51_79_the_stream_helper(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": CAT, "max_tokens": 6, "seed": 7}
    with (
        client.chat.completions.stream(**fields) as stream,
        pytest.raises(openai.LengthFinishReasonError),
    ):
        stream.get_final_completion()
    text = client.chat.completions.create(**fields).choices[0].message.content
    fields["stop"] = text[8:11]
    with client.chat.completions.stream(**fields, logprobs=True) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {
        "chunk",
        "content.delta",
        "content.done",
        "logprobs.content.delta",
        "logprobs.content.done",
    } <= set(kinds)
    assert final.choices[0].message.content == text[: text.index(text[8:11])]
    assert final.choices[0].message.role == "assistant"
    with client.chat.completions.stream(
        **{**fields, "n": 3, "temperature": 1.5, "stop": "."}, max_completion_tokens=90
    ) as stream:
        texts = [choice.message.content for choice in stream.get_final_completion().choices]
    assert len(set(texts)) == 3 and all(texts)


def test_80_raw_and_streaming_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=CAT, max_tokens=2)
    assert raw.headers["x-request-id"] and raw.parse().choices
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=CAT, max_tokens=2
    ) as response:
        assert json.loads(response.read())["choices"]


@pytest.mark.slow
def test_80_a_hundred_streams_on_one_async_client(server: RunningServer) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=CAT, max_tokens=3, seed=seed % 5, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=server.v1, api_key="x", max_retries=0, timeout=60
        ) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(100)))

    texts = asyncio.run(main())
    assert all(texts) and all(text == texts[number % 5] for number, text in enumerate(texts))


def test_92_a_long_answer_in_one_piece_is_not_cut_off() -> None:
    with serve(FakeClient(Script(pause_s=0.2)), ApiConfig(write_timeout_s=0.2)) as server:
        response = httpx.post(f"{server.v1}/chat/completions", json={"messages": CAT}, timeout=60)
        assert response.json()["choices"][0]["message"]["content"] == "one two three"
