"""What goes wrong in a request, in the words of the HTTP API: status, OpenAI's error body, and
headers for clients.

Owns the shape of every error that leaves the server, and the one translation from `QuireError`s. A
message never holds a prompt, a key, a path, an address or a traceback: what is not a `QuireError`
is answered with a fixed sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.errors import (
    EngineError,
    InvalidParameterError,
    PromptTooLongError,
    QuireError,
    RequestError,
    UnavailableError,
)

MAX_RETRY_AFTER_S = 120
"""OpenAI's client does not retry at all when it is told to wait longer."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    411: "invalid_request_error",
    413: "request_too_large",
    414: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_closed_request",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
    507: "server_error",
}
_MAX_MESSAGE_CHARS = 800
_MAX_PARAM_CHARS = 200
"""Both may quote names that a client made up."""
_OPENAI_TYPES = {
    401: "invalid_request_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
}
"""Where OpenAI's service says it differently from Anthropic's."""


class ApiError(Exception):
    """One refused or failed request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """`details`: what Anthropic's clients decide by, beside the message."""
        super().__init__(message)
        self.status = status
        self.message = (
            message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:_MAX_MESSAGE_CHARS]}..."
        )
        self.param = param[:_MAX_PARAM_CHARS] if param is not None else None
        self.code = code
        self.headers = dict(headers or {})
        self.details = details

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object, with all four keys."""
        kind = _OPENAI_TYPES.get(self.status, _TYPES.get(self.status, "server_error"))
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """Anthropic's envelope; its error object also has OpenAI's keys,
        so that every endpoint has the same four."""
        kind = "api_error" if self.status == 500 else _TYPES.get(self.status, "api_error")
        error: dict[str, Any] = {
            "type": kind,
            "message": self.message,
            "param": self.param,
            "code": self.code,
        }
        if self.details is not None:
            error["details"] = dict(self.details)
        return {"type": "error", "error": error, "request_id": request_id}

    def encode(self) -> bytes:
        """Return the body as JSON."""
        return msgspec.json.encode(self.body())


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself must change."""
    return ApiError(400, message, param=param, code=code)


def unavailable_feature(param: str, what: str) -> ApiError:
    """400 for what the API has and this server cannot honour; never ignored in silence."""
    return ApiError(400, f"{param}: {what}", param=param, code="unsupported_parameter")


def overloaded(message: str, *, code: str, retry_after_s: float, status: int = 429) -> ApiError:
    """429 or 503 with the wait that was computed, in whole seconds that OpenAI's client honours."""
    wait_s = min(MAX_RETRY_AFTER_S, max(1, -int(-retry_after_s // 1)))
    return ApiError(status, message, code=code, headers={"retry-after": str(wait_s)})


def useless_to_retry(error: ApiError) -> ApiError:
    """Tell clients that repeat 5xx on their own that the same request would end the same way."""
    error.headers["x-should-retry"] = "false"
    return error


def internal_error() -> ApiError:
    """500 for a bug of ours; the log has the rest, under the request's id."""
    return ApiError(
        500, "the server had an error while it handled this request", code="internal_error"
    )


def of_prompt(error: RequestError, where: str) -> ApiError:
    """Return the answer to a prompt that cannot be served, which says where it stands in the body:
    one of several would have to be searched for."""
    answer = from_exception(error)
    is_prompt = answer.param in ("prompt", "prompt_token_ids", "input")
    if not is_prompt or where == "prompt":
        return answer
    return ApiError(answer.status, f"{where}: {error}", param=where, code=answer.code)


def from_exception(error: BaseException) -> ApiError:
    """Return the answer to any exception. Only `QuireError`s are quoted,
    since only they are written for users."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), param="prompt", code="context_length_exceeded")
    if isinstance(error, InvalidParameterError):
        return ApiError(400, str(error), param=error.param, code="invalid_value")
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, UnavailableError):
        status = 429 if error.state == "overloaded" else 503
        return overloaded(
            str(error), code=error.state, retry_after_s=error.retry_after_s or 5, status=status
        )
    if isinstance(error, EngineError):
        return overloaded(
            f"the engine cannot serve: {error}",
            code="engine_unavailable",
            retry_after_s=5,
            status=503,
        )
    if isinstance(error, QuireError):
        return ApiError(500, "the server is misconfigured for this request", code="internal_error")
    return internal_error()
