"""The outermost ASGI middleware: every request passes here before routing, and every response and
error leaves through here.

Owns request ids, the limits on request lines and headers, authentication, body limits, the
translation of every exception into an error body, and the access log. Default-deny: without a valid
key only the paths in `PUBLIC_PATHS`, compared as raw bytes, are reachable, so no spelling of a path
slips past. A browser's preflight, which has no key, is answered here and goes no further (see
`cors`).
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from itertools import chain
from typing import Protocol

import msgspec
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.common.failures import log_failure
from quire.config.api import ApiConfig
from quire.errors import UnavailableError
from quire.server.http.body import read_body, too_large
from quire.server.http.call import Call, attach
from quire.server.http.cors import Cors
from quire.server.http.errors import ApiError, bad_request, from_exception
from quire.server.http.quota_check import QuotaCheck
from quire.server.ops.static_page import PATHS as PAGE_PATHS
from quire.server.quota.tenants import EVERYBODY, MAX_KEY_LEN, NOBODY, KeyRing, Tenant

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("quire.access")

PUBLIC_PATHS = frozenset({b"/livez", b"/readyz", b"/ping", *(path.encode() for path in PAGE_PATHS)})
"""The page's files are the same on every server;
they request everything else with their user's key."""
MAX_URL_LEN = 8192
MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 << 10
_DRAIN_S = 10.0
"""How long the rest of a refused body is read and dropped,
so that the client gets to read the answer before the close: 100 MB at 10 MB/s."""
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_METHODS = _BODILESS | {"POST", "PUT", "PATCH"}
"""Those that logs and metrics know; any other is whatever a client wrote."""
_STREAMED_PATHS = ("/v1/files",)
"""Endpoints that read their own body, within limits of their own."""
_TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")
_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,6})?\Z")

Headers = list[tuple[bytes, bytes]]
Fields = dict[bytes, bytes]
"""Headers by name; the last of those that have the same one.
What must be there only once is looked for in `Headers`."""


class ExchangeCounter(Protocol):
    """What is told of every exchange."""

    def http_finished(self, method: str, path: str, status: int, elapsed_s: float) -> None:
        """Count one."""
        ...


class Gateway:
    """ASGI application around the router."""

    def __init__(
        self,
        app: ASGIApp,
        config: ApiConfig,
        keys: KeyRing,
        metrics: ExchangeCounter,
        quota: QuotaCheck | None = None,
    ) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._metrics = metrics
        self.quota = quota
        self.cors = Cors(config.allow_origin)
        self._root_path = config.root_path.encode()

    @property
    def num_tokens_waiting(self) -> int:
        """Prompt tokens of the requests that wait: what to scale on."""
        return 0 if self.quota is None else self.quota.num_tokens_waiting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Lifespan events pass through;
        anything else is not HTTP and is dropped."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _Exchange(self, scope, receive, send).run()

    async def enter(self, exchange: _Exchange) -> None:
        """Check, authenticate, bound, and hand on to the router."""
        scope, fields = exchange.scope, exchange.fields
        _check_size(scope, fields)
        preflight = self.cors.preflight(scope["method"], fields)
        if preflight is not None:
            await exchange.send(
                {"type": "http.response.start", "status": 204, "headers": preflight}
            )
            await exchange.send({"type": "http.response.body", "body": b""})
            return
        exchange.tenant = tenant = self._authenticate(scope)
        is_chat = not scope["path"].endswith("/v1/completions")
        call = Call(
            exchange.request_id, tenant, trace_parent=_trace_parent(fields), is_chat=is_chat
        )
        call.is_strict = self._config.strict_fields
        _set_deadlines(call, fields, self._config)
        attach(scope, call)
        scope["app"] = self._app
        receive: Receive = exchange.receive
        if not get_route_path(scope).startswith(_STREAMED_PATHS):
            receive = await self._bounded(exchange)
        if self.quota is not None:
            await self.quota.enter(scope, tenant)
        await self._app(scope, receive, exchange.send)

    async def _bounded(self, exchange: _Exchange) -> Receive:
        """Return a `receive` that gives the whole body at once, then waits for the client to
        leave."""
        if exchange.fields.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(
                415,
                "compressed request bodies are not supported; send it plain",
                code="unsupported_encoding",
            )
        max_bytes = 0 if exchange.scope["method"] in _BODILESS else self._config.max_body_bytes
        if exchange.declared_len > max_bytes:
            raise too_large(max_bytes)
        body = b""
        if exchange.has_body:
            body = await read_body(
                exchange.receive, max_bytes=max_bytes, timeout_s=self._config.body_timeout_s
            )
        is_given = False

        async def receive() -> Message:
            nonlocal is_given
            if not is_given:
                is_given = True
                return {"type": "http.request", "body": body, "more_body": False}
            while (message := await exchange.receive())["type"] != "http.disconnect":
                pass
            return message

        return receive

    def _authenticate(self, scope: Scope) -> Tenant:
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        # a proxy that does not strip it
        if self._root_path and raw_path.startswith(self._root_path + b"/"):
            raw_path = raw_path[len(self._root_path) :]
            scope["root_path"] = self._config.root_path
        if raw_path in PUBLIC_PATHS and scope["method"] in ("GET", "HEAD"):
            return NOBODY
        if self._keys.is_open:
            return EVERYBODY
        tenant = self._keys.find(_presented_key(scope["headers"]))
        if tenant is None:
            raise ApiError(
                401,
                "a valid API key is needed",
                code="invalid_api_key",
                headers={"www-authenticate": 'Bearer realm="quire"'},
            )
        return tenant

    @property
    def config(self) -> ApiConfig:
        """The limits in force."""
        return self._config

    def finished(self, exchange: _Exchange) -> None:
        """Log and count one exchange."""
        elapsed_s = time.monotonic() - exchange.started_s
        path = getattr(exchange.scope.get("route"), "path", "other")
        method = exchange.scope["method"] if exchange.scope["method"] in _METHODS else "other"
        self._metrics.http_finished(method, path, exchange.status, elapsed_s)
        if not access_logger.isEnabledFor(logging.INFO):
            return
        access_logger.info(
            "request",
            extra={
                "request_id": exchange.request_id,
                "tenant": exchange.tenant.name,
                "method": method,
                "route": path,
                "status": exchange.status,
                "elapsed_ms": round(1000 * elapsed_s, 3),
            },
        )


class _Exchange:
    """One request and what has been sent for it."""

    def __init__(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        self._gateway = gateway
        self._send = send
        self._receive = receive
        self.scope = scope
        self.fields: Fields = dict(scope["headers"])
        self.declared_len = _declared_len(self.fields)
        self.has_body = self.declared_len > 0 or b"transfer-encoding" in self.fields
        self.request_id = _request_id(self.fields)
        self.tenant = NOBODY
        self.started_s = time.monotonic()
        self.status = 0
        self.is_body_read = False
        """Whether the body was taken from the connection to its end."""
        self._is_head_sent = False
        self._is_anthropic = "/v1/messages" in scope["path"]

    async def run(self) -> None:
        try:
            await self._gateway.enter(self)
        except ClientDisconnect:
            self.status = self.status or 499
        except HTTPException as error:
            await self._fail(_from_http(error, self.scope))
        except ApiError as error:
            await self._fail(error)
        except Exception as error:
            answer = from_exception(error)
            # draining, say, is no failure
            if answer.status >= 500 and not isinstance(error, UnavailableError):
                log_failure(logger, f"request {self.request_id} failed", error)
            await self._fail(answer)
        finally:
            self._gateway.finished(self)

    async def receive(self) -> Message:
        """Return what the client sends next, and note the end of the body."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.is_body_read = True
        return message

    async def send(self, message: Message) -> None:
        """Pass a message on with our headers. How long a client may take to take it
        is the protocol's business."""
        if message["type"] == "http.response.start":
            self._is_head_sent = True
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._own_headers()]}
        await self._send(message)

    def _own_headers(self) -> Headers:
        elapsed_ms = int(1000 * (time.monotonic() - self.started_s))
        quota = self._gateway.quota
        rates = [] if quota is None else quota.headers(self.scope, self.tenant)
        for_anthropic = [(b"request-id", self.request_id.encode())] if self._is_anthropic else []
        return [
            *for_anthropic,
            *rates,
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", str(elapsed_ms).encode()),
            (b"x-content-type-options", b"nosniff"),
            *self._gateway.cors.headers(self.fields),
        ]

    async def _fail(self, error: ApiError) -> None:
        if self._is_head_sent or error.status == 499:
            self.status = self.status or 499
            return
        body = error.anthropic_body(self.request_id) if self._is_anthropic else error.body()
        await self._drain(error)
        await send_json(self.send, error.status, body, error.headers)

    async def _drain(self, error: ApiError) -> None:
        """Take what is left of a small body, so that the connection stays usable;
        else announce that it will be closed."""
        if self.is_body_read or not self.has_body or error.status == 408:
            return
        try:
            await read_body(_dropping(self.receive), max_bytes=1, timeout_s=_DRAIN_S)
            if error.headers.get("connection") != "close":
                return
        except (ApiError, ClientDisconnect):
            pass
        error.headers["connection"] = "close"


def _dropping(receive: Receive) -> Receive:
    """Return a body whose bytes are thrown away as they come."""

    async def receive_nothing() -> Message:
        message = await receive()
        return {**message, "body": b""} if message["type"] == "http.request" else message

    return receive_nothing


async def send_json(
    send: Send, status: int, body: object, headers: dict[str, str] | None = None
) -> None:
    """Send a complete JSON response."""
    data = msgspec.json.encode(body)
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    fields += [
        (name.encode(), value.encode("latin-1", "replace"))
        for name, value in (headers or {}).items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": data})


def _check_size(scope: Scope, fields: Fields) -> None:
    headers: Headers = scope["headers"]
    raw_path: bytes = scope.get("raw_path") or b""
    if len(raw_path) + len(scope.get("query_string", b"")) > MAX_URL_LEN:
        raise ApiError(414, f"the URL is longer than {MAX_URL_LEN} bytes", code="url_too_long")
    if len(headers) > MAX_HEADERS or sum(map(len, chain.from_iterable(headers))) > MAX_HEADER_BYTES:
        raise ApiError(
            431,
            f"there are more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them",
            code="headers_too_large",
            headers={"connection": "close"},
        )
    # the protocol refuses it, too, and two of either
    if b"content-length" in fields and b"transfer-encoding" in fields:
        raise ApiError(
            400,
            "the request's length is given twice",
            code="ambiguous_length",
            headers={"connection": "close"},
        )


def _declared_len(fields: Fields) -> int:
    """Return what `content-length` says; more than any limit where that is no number of bytes."""
    value = fields.get(b"content-length", b"0")
    return int(value) if value.isdigit() and len(value) <= 18 else 1 << 62


def _presented_key(headers: Headers) -> bytes:
    """Return the one key that the headers give, or b"". Anthropic's clients send it as
    `x-api-key`."""
    bearer = [value for name, value in headers if name == b"authorization"]
    plain = [value for name, value in headers if name == b"x-api-key"]
    if len(bearer) + len(plain) != 1:
        return b""
    if plain:
        return plain[0].strip()[: MAX_KEY_LEN + 1]
    scheme, _, key = bearer[0].strip().partition(b" ")
    return key.strip()[: MAX_KEY_LEN + 1] if scheme.lower() == b"bearer" else b""


def _request_id(fields: Fields) -> str:
    for name in (b"x-client-request-id", b"x-request-id"):
        if _SAFE_ID.match(fields.get(name, b"")):
            return fields[name].decode()
    return f"req_{secrets.token_hex(12)}"


def _trace_parent(fields: Fields) -> str | None:
    """Return the header `traceparent` where it looks like one; the tracer reads it."""
    value = fields.get(b"traceparent", b"")
    return value.decode() if _TRACE_PARENT.match(value) else None


def _set_deadlines(call: Call, fields: Fields, config: ApiConfig) -> None:
    """Set the operator's deadlines, which a client may only bring forward."""
    call.deadline_s = call.started_s + _seconds(
        "x-request-timeout-s", fields, config.request_timeout_s
    )
    call.queue_deadline_s = call.started_s + _seconds(
        "x-queue-timeout-s", fields, config.queue_timeout_s
    )


def _seconds(name: str, fields: Fields, most: float) -> float:
    """Return what the header `name` says, and `most` at most."""
    value = fields.get(name.encode())
    if value is None:
        return most
    if not _SECONDS.match(value.strip()) or float(value) <= 0:
        raise bad_request(
            f"the header {name} must be a number of seconds above 0",
            param=name,
            code="invalid_header",
        )
    return min(most, float(value))


def _methods_of(scope: Scope) -> set[str]:
    """Return what a path may be called with, over all routes that have it: Starlette names the
    methods of the first one alone."""
    routes = [each for each in scope["router"].routes if isinstance(each, Route)]
    found = (each.methods or () for each in routes if each.matches(scope)[0] is not Match.NONE)
    return {method for methods in found for method in methods}


def _from_http(error: HTTPException, scope: Scope) -> ApiError:
    """Starlette's own refusals: an unknown path, or a method that the path does not have."""
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return ApiError(404, "there is no such path", code="unknown_url")
    if error.status_code == 405:
        return ApiError(
            405,
            f"{scope['method']} is not allowed here",
            code="method_not_allowed",
            headers={"allow": ", ".join(sorted(_methods_of(scope)))},
        )
    return ApiError(error.status_code, "the request cannot be served", headers=headers)
