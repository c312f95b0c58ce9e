"""Spans of generations, read back from OpenTelemetry's own in-memory exporter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_client import FakeClient, Script
from servers import serve, serve_model

from quire.errors import ConfigError
from quire.server.ops.tracing import RequestTracer, is_wanted, provider_of
from quire.server.quota.tenants import Tenant, key_ring

sdk = pytest.importorskip("opentelemetry.sdk.trace")
CHAT = {
    "messages": [{"role": "user", "content": "Tell me a secret-word story."}],
    "max_tokens": 5,
    "temperature": 0.5,
}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[Any]:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    exporter.tracer = RequestTracer(provider, "m")  # type: ignore[attr-defined]
    yield exporter
    provider.shutdown()


def test_a_request_is_a_span_with_its_phases_under_the_callers_trace(spans: Any) -> None:
    with serve_model(tracer=spans.tracer) as server:
        answer = httpx.post(
            f"{server.v1}/chat/completions", json=CHAT, headers={"traceparent": PARENT}, timeout=60
        )
        assert answer.status_code == 200
        assert (
            httpx.post(
                f"{server.v1}/completions", json={"prompt": "A", "max_tokens": 2}, timeout=60
            ).status_code
            == 200
        )
    chat = next(span for span in spans.get_finished_spans() if span.name == "chat m")
    assert (
        f"{chat.context.trace_id:032x}" == PARENT.split("-")[1]
        and f"{chat.parent.span_id:016x}" == PARENT.split("-")[2]
    )
    phases = {
        each.name: each
        for each in spans.get_finished_spans()
        if each.parent and each.parent.span_id == chat.context.span_id
    }
    assert set(phases) == {"queue", "prefill", "decode"}
    assert (
        chat.start_time
        <= phases["queue"].start_time
        <= phases["queue"].end_time
        == phases["prefill"].start_time
    )
    assert (
        phases["prefill"].end_time
        == phases["decode"].start_time
        <= phases["decode"].end_time
        <= chat.end_time
    )
    usage, given = answer.json()["usage"], dict(chat.attributes)
    assert given["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert given["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert given["gen_ai.operation.name"] == "chat" and given["gen_ai.request.temperature"] == 0.5
    assert given["gen_ai.response.finish_reasons"] == (
        answer.json()["choices"][0]["finish_reason"],
    )
    assert (
        given["gen_ai.latency.e2e"]
        >= given["gen_ai.latency.time_to_first_token"]
        >= given["gen_ai.latency.time_in_queue"]
    )
    assert "secret-word" not in str([each.to_json() for each in spans.get_finished_spans()])
    other = next(span for span in spans.get_finished_spans() if span.name == "text_completion m")
    assert other.parent is None


def test_what_failed_says_so(spans: Any) -> None:
    with serve(FakeClient(Script(error="broken")), tracer=spans.tracer) as server:
        assert httpx.post(f"{server.v1}/chat/completions", json=CHAT).status_code == 500
    (span,) = [each for each in spans.get_finished_spans() if each.name == "chat m"]
    assert span.attributes["error.type"] == "engine_error" and not span.status.is_ok


def test_a_client_that_leaves_is_a_span_too(spans: Any) -> None:
    client = FakeClient(Script(pieces=("x", "y"), gate=threading.Event(), num_before_gate=1))
    with serve(client, tracer=spans.tracer) as server:
        with httpx.stream(
            "POST", f"{server.v1}/chat/completions", json={**CHAT, "stream": True}
        ) as answer:
            next(answer.iter_lines())
        server.run(lambda: _until_idle(client))
    (span,) = [each for each in spans.get_finished_spans() if each.name == "chat m"]
    assert span.attributes["error.type"] == "aborted"


async def _until_idle(client: FakeClient) -> None:
    import asyncio

    while client.streams:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("value", ["x", PARENT.upper(), PARENT + "-00", ""])
def test_nonsense_for_a_parent_is_no_parent(spans: Any, value: str) -> None:
    with serve(
        FakeClient(), keys=key_ring([(Tenant("a"), ["sk-right-key"])]), tracer=spans.tracer
    ) as server:
        headers = {"traceparent": value, "x-api-key": "sk-right-key"}
        assert (
            httpx.post(f"{server.v1}/chat/completions", json=CHAT, headers=headers).status_code
            == 200
        )
    (span,) = [each for each in spans.get_finished_spans() if each.name == "chat m"]
    assert span.parent is None and span.attributes["quire.tenant"] == "a"


def test_the_environment_decides() -> None:
    assert not is_wanted({}) and provider_of({}) is None
    assert not is_wanted(
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}
    )
    assert not is_wanted({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"})
    assert is_wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}) and is_wanted(
        {"OTEL_TRACES_EXPORTER": "console"}
    )
    provider = provider_of({"OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "s"})
    assert provider is not None and provider.resource.attributes["service.name"] == "s"
    provider.shutdown()
    for wrong in (
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ):
        with pytest.raises(ConfigError, match="traces"):
            provider_of(wrong)
