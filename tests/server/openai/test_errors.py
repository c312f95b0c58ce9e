"""OpenAI behaviours 1 to 16: errors, as the official clients see them."""

from __future__ import annotations

import re
from typing import Any

import httpx
import openai
import pytest
from fake_client import FakeClient, Script
from servers import MODEL, RunningServer, serve
from timing import timed

from quire.config.api import ApiConfig
from quire.engine.process.supervisor import CONVICTED
from quire.errors import EngineError, UnavailableError
from quire.server.quota.tenants import Tenant, key_ring

pytestmark = timed

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def error_of(response: Any) -> dict[str, Any]:
    """The error object, whose shape is checked."""
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert response.headers["x-request-id"]
    return dict(error)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, b"{", 400),
        ("POST", CHAT, b"", 400),
        ("POST", CHAT, b"[]", 400),
        ("POST", CHAT, b'{"messages": NaN}', 400),
        ("POST", CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ("POST", CHAT, b"\xff\xfe", 400),
        ("POST", CHAT, b"[" * 100_000, 400),
        ("POST", "/v1/completions", b'{"prompt": 1}', 400),
        ("POST", "/v1/embeddings", b'{"input": "a"}', 400),
        ("POST", "/v1/responses", b'{"input": 1}', 400),
        ("POST", "/v1/files", b"x", 400),
        ("POST", "/v1/batches", b"{}", 400),
        ("POST", "/tokenize", b"{}", 400),
        ("POST", "/detokenize", b'{"tokens": [99999]}', 400),
        ("GET", "/v1/models/nothing", b"", 404),
        ("GET", "/v1/responses/resp_none", b"", 404),
        ("GET", "/v1", b"", 404),
        ("GET", "/nothing", b"", 404),
        ("GET", CHAT, b"", 405),
        ("DELETE", "/v1/models", b"", 405),
        ("OPTIONS", CHAT, b"", 405),
    ],
)
def test_01_03_10_16_every_error_has_the_same_shape(
    http: httpx.Client, method: str, path: str, body: bytes, status: int
) -> None:
    response = http.request(method, path, content=body)
    assert response.status_code == status
    error_of(response)
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": [{"role": "a king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"stream": "yes"}, "stream"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"stop": 5}, "stop"),
    ],
)
def test_04_a_wrong_type_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(CHAT.removeprefix("/v1"), body={**HELLO, **fields}, cast_to=object)
    assert caught.value.param == param


def test_05_an_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "x"}])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_07_a_prompt_that_is_too_long_says_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "cat " * 600}]
        )
    assert caught.value.code == "context_length_exceeded"
    numbers = [int(number) for number in re.findall(r"[0-9]+", caught.value.message)]
    assert 512 in numbers and max(numbers) > 600


def test_08_max_tokens_is_clamped_when_left_out_and_refused_when_explicit(
    client: openai.OpenAI,
) -> None:
    messages = [{"role": "user", "content": "cat " * 495}]
    answer = client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    assert answer.usage is not None and answer.usage.total_tokens <= 512
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=messages, extra_body={name: 500})  # type: ignore[arg-type]
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", name)


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""]])
def test_09_empty_prompts_and_messages_are_refused(client: openai.OpenAI, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=prompt)
    place = {"[[]]": "prompt[0]", "['a', '']": "prompt[1]"}.get(str(prompt), "prompt")
    assert caught.value.param == place and f"{place}: " in str(caught.value)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[])


def test_11_a_body_that_is_too_large_is_413_and_the_server_lives_on() -> None:
    with (
        serve(FakeClient(), ApiConfig(max_body_bytes=2000)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for content in (b"x" * 3000, (b"x" * 1000 for _ in range(3))):
            response = http.post(CHAT, content=content)
            assert response.status_code == 413
            error_of(response)
        assert http.get("/livez").status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UnavailableError("full", state="overloaded", retry_after_s=7), 429, openai.RateLimitError),
        (
            UnavailableError("leaving", state="draining", retry_after_s=900),
            503,
            openai.InternalServerError,
        ),
        (EngineError("the engine died"), 503, openai.InternalServerError),
        (RuntimeError("secret /root/path 0x7f"), 500, openai.InternalServerError),
    ],
)
def test_02_12_14_statuses_headers_and_silence_on_our_own_failures(
    error: Exception, status: int, kind: type[openai.APIStatusError]
) -> None:
    with serve(FakeClient(Script(raises=error))) as server:
        for stream in (False, True):
            with (
                openai.OpenAI(base_url=server.v1, api_key="x", max_retries=0) as client,
                pytest.raises(kind) as caught,
            ):
                client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": "x"}], stream=stream
                )
            response = caught.value.response
            assert response.status_code == status
            error_of(response)
            if status in (429, 503):
                assert 1 <= int(response.headers["retry-after"]) <= 120
            assert (
                "secret" not in response.text
                and "/root" not in response.text
                and "0x" not in response.text
            )


def test_06_a_missing_or_wrong_key_is_401() -> None:
    keys = key_ring([(Tenant("a"), ["sk-right-key"])])
    with serve(FakeClient(), keys=keys) as server:
        with openai.OpenAI(base_url=server.v1, api_key="sk-wrong-key", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list()
            assert caught.value.code == "invalid_api_key"
            assert caught.value.response.headers["www-authenticate"].startswith("Bearer")
        with openai.OpenAI(base_url=server.v1, api_key="sk-right-key") as client:
            assert client.models.list().data[0].id == "fake"


def test_13_a_useless_retry_is_discouraged() -> None:
    with serve(FakeClient(Script(begins=False)), ApiConfig(request_timeout_s=0.2)) as server:
        response = httpx.post(server.url + CHAT, json={"messages": HELLO["messages"]}, timeout=60)
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"
        error_of(response)


def test_13_what_killed_three_engines_is_not_to_be_asked_again() -> None:
    """OpenAI's client repeats every 5xx twice: two more times three engines."""
    for error, is_useless in ((CONVICTED, True), ("anything else", False)):
        engine = FakeClient(Script(pieces=(), error=error))
        with (
            serve(engine) as server,
            openai.OpenAI(base_url=server.v1, api_key="x") as client,
            pytest.raises(openai.InternalServerError),
        ):
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "x"}]
            )
        assert len(engine.requests) == (1 if is_useless else 3)


def test_15_unknown_fields_are_named_in_a_header_or_refused_in_strict_mode(
    server: RunningServer,
) -> None:
    response = httpx.post(
        server.url + CHAT, json={**HELLO, "sparkle": 1, "store": True}, timeout=60
    )
    assert response.status_code == 200
    assert response.headers["x-quire-ignored-fields"] == "sparkle, store"
    for names, shown in (
        (("a", ""), 'a, ""'),
        ((" ",), "%20"),
        (("x ", "a, b", "\r\ny: z", "\u0416"), "x%20, a%2C%20b, %0D%0Ay:%20z, %D0%96"),
        (("a" * 1000, "b" * 100), "a" * 1000),
    ):  # each of the first three was no answer at all, but a closed connection
        odd = httpx.post(
            f"{server.url}/detokenize", json={"tokens": [5], **dict.fromkeys(names, 1)}
        )
        assert odd.status_code == 200 and odd.headers["x-quire-ignored-fields"] == shown
    with serve(FakeClient(), ApiConfig(strict_fields=True)) as strict:
        response = httpx.post(strict.url + CHAT, json={"messages": HELLO["messages"], "sparkle": 1})
        assert response.status_code == 400
        assert error_of(response)["param"] == "sparkle"
        # known, and without effect
        for name, value in (("store", True), ("reasoning_effort", "low")):
            response = httpx.post(
                strict.url + CHAT, json={"messages": HELLO["messages"], name: value}
            )
            assert response.status_code == 400 and error_of(response)["param"] == name
        response = httpx.post(
            strict.url + CHAT, json={"messages": HELLO["messages"], "store": False, "user": "x"}
        )
        assert response.status_code == 200 and "x-quire-ignored-fields" not in response.headers
