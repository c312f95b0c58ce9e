"""Pages of other origins: who may, what a preflight is told,
and a real browser that believes it."""

from __future__ import annotations

import argparse
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from browser import find_chromium, open_page
from fake_client import FakeClient, Script
from servers import RunningServer, routes_of, serve

from quire.cli.serve import add_arguments
from quire.config.api import ApiConfig
from quire.errors import ConfigError
from quire.server.app import build_app
from quire.server.quota.tenants import Tenant, key_ring

PAGE = "https://page.example"
OTHER = "http://localhost:3000"
KEY = "sk-the-only-key"
KEYS = key_ring([(Tenant("a"), [KEY])])
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, x-stainless-os",
}
CHROMIUM = find_chromium()


def running(*origins: str, script: Script | None = None) -> Any:
    """A server with a key that allows these origins."""
    return serve(FakeClient(script or Script()), ApiConfig(allow_origin=origins), KEYS)


def cors_of(answer: httpx.Response) -> dict[str, str]:
    """What an answer says to a browser."""
    return {
        name: value for name, value in answer.headers.items() if name.startswith("access-control-")
    }


def test_without_the_option_there_is_no_cors() -> None:
    with running() as server:
        asked = {"origin": PAGE, **PREFLIGHT}
        for answer in (
            httpx.options(f"{server.v1}/models", headers=asked),
            httpx.get(f"{server.url}/livez", headers=asked),
        ):
            assert cors_of(answer) == {} and "vary" not in answer.headers
        assert httpx.options(f"{server.v1}/models", headers=asked).status_code == 401


def test_a_preflight_is_answered_without_a_key_on_every_path() -> None:
    config = ApiConfig(allow_origin=(PAGE, OTHER))
    paths = {route.path for route in routes_of(build_app(config, FakeClient(), KEYS))} | {
        "/nowhere"
    }
    with running(PAGE, OTHER) as server, httpx.Client(base_url=server.url) as client:
        for path in sorted(paths):
            for origin in (PAGE, OTHER):
                answer = client.options(
                    path.replace("{", "").replace("}", ""), headers={"origin": origin, **PREFLIGHT}
                )
                assert (answer.status_code, answer.content) == (204, b""), path
                said = cors_of(answer)
                assert said["access-control-allow-origin"] == origin
                assert (
                    said["access-control-allow-headers"]
                    == PREFLIGHT["access-control-request-headers"]
                )
                assert (
                    said["access-control-allow-credentials"] == "true"
                    and said["access-control-max-age"] == "600"
                )
                assert set(said["access-control-allow-methods"].split(", ")) == {
                    "GET",
                    "HEAD",
                    "POST",
                    "DELETE",
                }
                assert answer.headers.get_list("vary", split_commas=True) == [
                    "access-control-request-headers",
                    "origin",
                ]


@pytest.mark.parametrize(
    "origin", ["https://page.example.evil", "http://page.example", "null", f"{PAGE}:443", "", "*"]
)
def test_other_origins_are_told_no(origin: str) -> None:
    with running(PAGE) as server:
        refused = httpx.options(f"{server.v1}/models", headers={"origin": origin, **PREFLIGHT})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
        for answer in (refused, httpx.get(f"{server.url}/livez", headers={"origin": origin})):
            assert cors_of(answer) == {} and answer.headers["vary"] == "origin", (
                "no cache gives it to the other"
            )


def test_what_is_no_preflight_needs_a_key_and_is_routed() -> None:
    with running(PAGE) as server, httpx.Client(base_url=server.url) as client:
        for headers in ({}, {"origin": PAGE}, {"access-control-request-method": "GET"}):
            assert client.options("/v1/models", headers=headers).status_code == 401
            assert (
                client.options("/v1/models", headers={**headers, "x-api-key": KEY}).status_code
                == 405
            )
        assert client.get("/v1/models", headers={"origin": PAGE, **PREFLIGHT}).status_code == 401


@pytest.mark.parametrize("names", ["a b", "a\tb", "x,", "a,,b", "a;b", "é"])
def test_only_names_of_headers_are_repeated(names: str) -> None:
    with running(PAGE) as server:
        asked: Any = {
            "origin": PAGE,
            **PREFLIGHT,
            "access-control-request-headers": names.encode("latin-1"),
        }
        answer = httpx.options(f"{server.v1}/models", headers=asked)
        assert answer.status_code == 204 and "access-control-allow-headers" not in answer.headers


@pytest.mark.parametrize("origin", [PAGE, "*"])
def test_answers_errors_and_streams_can_be_read(origin: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    with running(origin, script=Script(error="no luck")) as server:
        client = httpx.Client(base_url=server.url, headers={"origin": PAGE, "x-api-key": KEY})
        with client:
            answers = [
                client.get("/v1/models"),
                client.get("/v1/models", headers={"x-api-key": "sk-a-wrong-key"}),
                client.get("/nowhere"),
                client.post("/v1/chat/completions", content=b"{"),
                client.post("/v1/chat/completions", json=chat),
                client.post("/v1/chat/completions", json={**chat, "stream": True}),
                client.post(
                    "/v1/messages", json={"model": "fake", "max_tokens": 3, **chat, "stream": True}
                ),
            ]
        assert [answer.status_code for answer in answers] == [200, 401, 404, 400, 500, 200, 200]
        for answer in answers:
            said = cors_of(answer)
            assert said["access-control-allow-origin"] == origin
            assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(
                said["access-control-expose-headers"].split(", ")
            )
            assert ("access-control-allow-credentials" in said) is (origin != "*"), (
                "never credentials for everybody"
            )
            assert answer.headers.get("vary") == (None if origin == "*" else "origin")


def test_everybody_may_where_the_operator_says_so() -> None:
    with running("*", PAGE) as server:
        for origin in (PAGE, "null", "https://any.example"):
            said = cors_of(
                httpx.options(f"{server.v1}/models", headers={"origin": origin, **PREFLIGHT})
            )
            assert (
                said["access-control-allow-origin"] == "*"
                and "access-control-allow-credentials" not in said
            )


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        PAGE,
        OTHER,
        "http://127.0.0.1:8000",
        "http://[::1]:80801",
        "app://obsidian.md",
        "chrome-extension://abcdefghijklmnop",
    ],
)
def test_origins_that_are_taken(origin: str) -> None:
    assert ApiConfig(allow_origin=(origin,)).allow_origin == (origin,)


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "example.com",
        "https://example.com/",
        "https://example.com/x",
        "https://Example.com",
        "https://a.example,https://b.example",
        "https://*.example.com",
        "https://example.com:443",
        "http://example.com:80",
        "https://user@example.com",
        "https://example.com\n",
    ],
)
def test_what_no_browser_sends_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="allow_origin"):
        ApiConfig(allow_origin=(origin,))


def test_the_option_is_repeatable_and_off() -> None:
    parser = argparse.ArgumentParser(prog="quire serve")
    add_arguments(parser)
    assert (
        not hasattr(parser.parse_args(["m"]), "allow_origin")
        and "--allow-origin ORIGIN" in parser.format_help()
    )
    args = parser.parse_args(["m", "--allow-origin", PAGE, "--allow-origin", "*"])
    assert args.allow_origin == (PAGE, "*")


@contextmanager
def page_server() -> Iterator[str]:
    """Another origin, with an empty page."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><link rel=icon href='data:,'><p>Hello</p>")

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()


def script_of(server: RunningServer, key: str, path: str, body: object) -> str:
    """JavaScript that asks, and tells what it was allowed to read."""
    headers = {
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        "x-stainless-os": "Linux",
    }
    options = json.dumps({"method": "POST", "headers": headers, "body": json.dumps(body)})
    return (
        f"fetch({json.dumps(server.url + path)}, {options})"
        ".then(async a => [a.status, a.headers.get('x-request-id') !== null, await a.text()])"
        ".catch(error => String(error))"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on the path; tools/install-chromium.sh installs it"
)
def test_a_page_of_another_origin_in_a_browser() -> None:
    assert CHROMIUM is not None
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    with (
        page_server() as mine,
        page_server() as stranger,
        running(mine) as server,
        open_page(CHROMIUM) as page,
    ):
        page.open(mine)
        status, has_id, text = page.evaluate(script_of(server, KEY, "/v1/chat/completions", chat))
        assert (status, has_id, json.loads(text)["choices"][0]["message"]["content"]) == (
            200,
            True,
            "one two three",
        )
        status, _, text = page.evaluate(
            script_of(server, KEY, "/v1/chat/completions", {**chat, "stream": True})
        )
        assert status == 200 and text.count("data: ") > 3 and text.endswith("data: [DONE]\n\n")
        status, has_id, text = page.evaluate(
            script_of(server, "sk-a-wrong-key", "/v1/chat/completions", chat)
        )
        assert (status, has_id) == (401, True) and json.loads(text)["error"][
            "code"
        ] == "invalid_api_key"
        page.open(stranger)
        assert "Failed to fetch" in page.evaluate(
            script_of(server, KEY, "/v1/chat/completions", chat)
        )
