"""Prompts that are computed on other back ends than those that generate: `--prefill-backend`.

A request is sent to a prefill back end first, for one token and with vLLM's `kv_transfer_params`;
what its answer says of where the keys and values are goes with the request to the back end that
answers it. Whatever goes wrong on this way, the request goes on without: the back end that answers
it computes the prompt, with the same bits.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.common.http_client import HttpClient, HttpError, HttpRequest
from quire.config.route import RouteConfig

logger = logging.getLogger(__name__)

PREFILL_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
PARAMS = "kv_transfer_params"
_ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
_REST_S = 5.0
"""A back end that has failed is not tried again for so long, unless all have."""
_OF_ANSWERS = (
    "stream_options", "min_tokens", "best_of", "logprobs", "top_logprobs", "prompt_logprobs",
    "logprob_token_ids", "echo", "n", "stop", "max_completion_tokens", "thinking_token_budget",
    "response_format", "structured_outputs", "repetition_detection",
)  # fmt: skip
"""Fields that say nothing of the prompt, and much of an answer that is thrown away."""


class _PrefillBackend:
    """One back end that computes prompts."""

    def __init__(self, url: str, config: RouteConfig) -> None:
        self.url = url
        self.client = HttpClient(
            url, timeout_s=config.prefill_timeout_s, connect_timeout_s=config.connect_timeout_s
        )
        self.num_bytes = 0
        """Of bodies on their way."""
        self.rests_until_s = 0.0
        self.has_failed = False


class PrefillStage:
    """All back ends that compute prompts."""

    def __init__(self, config: RouteConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError for a wrong URL."""
        self._backends = [_PrefillBackend(url, config) for url in config.prefill_backend]
        self._min_bytes = config.prefill_min_bytes
        self._clock = clock
        self.num_by_outcome = {"handed_over": 0, "failed": 0}

    def close(self) -> None:
        """Close all connections."""
        for each in self._backends:
            each.client.close()

    async def prepare(self, request: HttpRequest) -> HttpRequest:
        """Return the request for the back end that answers it."""
        body = self._body_of(request) if self._backends else None
        if body is None:
            return request
        found = await self._prefilled(request, body)
        self.num_by_outcome["failed" if found is None else "handed_over"] += 1
        if found is None:
            return request
        data = json.dumps({**body, PARAMS: found}).encode()
        return replace(request, body=data)

    def _body_of(self, request: HttpRequest) -> dict[str, Any] | None:
        """Return what is asked, where a prompt of some length is to be computed once."""
        path = request.path.partition("?")[0]
        if path not in PREFILL_PATHS or len(request.body) < self._min_bytes:
            return None
        try:
            body = json.loads(request.body, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError):
            return None  # the back end says what is wrong with it
        if not isinstance(body, dict) or body.get(PARAMS) or _has_several(body.get("prompt")):
            return None
        return body

    async def _prefilled(self, request: HttpRequest, body: dict[str, Any]) -> dict[str, Any] | None:
        backend = self._choose()
        asked = {name: value for name, value in body.items() if name not in _OF_ANSWERS}
        asked |= {"max_tokens": 1, "stream": False, PARAMS: _ASKED}
        data = json.dumps(asked).encode()  # ASCII: a body may have halves of surrogate pairs
        backend.num_bytes += len(data)
        try:
            answer = await backend.client.request(replace(request, body=data))
            found = json.loads(answer.body).get(PARAMS) if answer.status == 200 else None
            if not isinstance(found, dict):
                # other statuses are the request's own fault, or its client's
                if answer.status in (200, 401, 403, 404) or answer.status >= 500:
                    self._fail(backend, f"it answers {answer.status} without {PARAMS}")
                return None
        except (HttpError, ValueError, AttributeError, RecursionError) as error:
            self._fail(backend, str(error))
            return None
        finally:
            backend.num_bytes -= len(data)
        backend.has_failed = False
        return found

    def _choose(self) -> _PrefillBackend:
        """Return the one with the least on its way, of those that have not failed just now."""
        now = self._clock()
        rested = [each for each in self._backends if each.rests_until_s <= now]
        return min(rested or self._backends, key=lambda each: each.num_bytes)

    def _fail(self, backend: _PrefillBackend, reason: str) -> None:
        backend.rests_until_s = self._clock() + _REST_S
        if not backend.has_failed:
            logger.warning(
                "%s does not compute prompts: %s (said once until it does)", backend.url, reason
            )
        backend.has_failed = True


def _finite(text: str) -> float:
    """Raises ValueError for what JSON cannot say of a number that has overflowed: it would be
    written as Infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _has_several(prompt: object) -> bool:
    """Return whether a completion is of several prompts."""
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)
