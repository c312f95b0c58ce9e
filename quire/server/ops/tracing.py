"""OpenTelemetry spans of generations: one a request, with its waiting, its prompt and its answer as
spans within.

Optional: without the packages (`pip install quire-llm[otel]`) or without the standard environment
(`OTEL_TRACES_EXPORTER`, `OTEL_EXPORTER_OTLP_ENDPOINT`, ...) nothing is traced and nothing is
imported. Names follow OpenTelemetry's semantic conventions for generative AI; where they have none,
`gen_ai.latency.*` as vLLM has them, and `quire.*`. A W3C `traceparent` that a request came with is
its span's parent. Spans hold numbers, names and codes, never a text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.common.version import __version__
from quire.errors import ConfigError
from quire.server.api.generation import Finished

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_PARAMETERS = {
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.seed": "seed",
    "gen_ai.request.choice.count": "n",
}


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the environment enables traces, in OpenTelemetry's own words."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return exporter != "none" and bool(exporter or any(environment.get(name) for name in names))


def provider_of(environment: Mapping[str, str]) -> TracerProvider | None:
    """Return a provider as the environment wants it, or None where it wants none.
    Raises ConfigError where it cannot be had."""
    if not is_wanted(environment):
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"OTEL_* asks for traces, but {error.name} is not installed: "
            "pip install 'quire-llm[otel]'"
        ) from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": environment.get("OTEL_SERVICE_NAME", "quire")})
    )
    for name in (environment.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        provider.add_span_processor(BatchSpanProcessor(_exporter(name.strip(), environment)))
    return provider


def _exporter(name: str, environment: Mapping[str, str]) -> Any:
    """Return an exporter; it reads the rest of the environment by itself."""
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if name != "otlp" or protocol not in (None, "", "http/protobuf"):
        raise ConfigError(
            f"traces go out as otlp over http/protobuf or to the console, not as {name} over "
            f"{protocol}"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"OTEL_* asks for traces, but {error.name} is not installed: "
            "pip install 'quire-llm[otel]'"
        ) from None
    return OTLPSpanExporter()


def tracer_of(environment: Mapping[str, str], model: str) -> RequestTracer | None:
    """Return a tracer as the environment wants it, or None where it wants none.
    Raises ConfigError where it cannot be had."""
    provider = provider_of(environment)
    return None if provider is None else RequestTracer(provider, model)


class RequestTracer:
    """Makes spans of finished generations; the moments were taken as they happened."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("quire", __version__)
        self._provider = provider
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def finished(self, job: Finished) -> None:
        """Called in the event loop; the processor's own thread sends."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        metrics = job.metrics
        end_s = time.monotonic()
        to_ns = time.time_ns() - int(end_s * 1e9)
        if metrics is not None and metrics.finished_s is not None:
            end_s = metrics.finished_s
        carrier = {} if job.call.trace_parent is None else {"traceparent": job.call.trace_parent}
        span = self._tracer.start_span(
            f"{_operation(job)} {self._model}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=self._attributes(job),
            start_time=to_ns + int(job.call.started_s * 1e9),
        )
        self._add_phases(span, job, to_ns)
        if job.error is not None:
            span.set_attribute("error.type", job.error)
            span.set_status(Status(StatusCode.ERROR, job.error))
        span.end(to_ns + int(max(end_s, job.call.started_s) * 1e9))

    def close(self) -> None:
        """Send what is left, within the processor's own limit of time."""
        self._provider.shutdown()

    def _attributes(self, job: Finished) -> dict[str, Any]:
        given = {name: getattr(job.params, field) for name, field in _PARAMETERS.items()}
        attributes: dict[str, Any] = {
            name: value for name, value in given.items() if value is not None
        }
        attributes |= {
            "gen_ai.operation.name": _operation(job),
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": job.call.request_id,
            "gen_ai.usage.input_tokens": job.usage.num_prompt_tokens,
            "gen_ai.usage.output_tokens": job.usage.num_output_tokens,
            "gen_ai.response.finish_reasons": list(job.reasons),
            "quire.tenant": job.call.tenant.name,
        }
        metrics = job.metrics
        if metrics is None:
            return attributes
        moments = {
            "gen_ai.latency.time_in_queue": (metrics.arrival_s, metrics.first_scheduled_s),
            "gen_ai.latency.time_to_first_token": (metrics.arrival_s, metrics.first_token_s),
            "gen_ai.latency.time_in_model_prefill": (
                metrics.first_scheduled_s,
                metrics.first_token_s,
            ),
            "gen_ai.latency.time_in_model_decode": (metrics.first_token_s, metrics.last_token_s),
            "gen_ai.latency.time_in_model_inference": (
                metrics.first_scheduled_s,
                metrics.last_token_s,
            ),
            "gen_ai.latency.e2e": (metrics.arrival_s, metrics.finished_s),
        }
        for name, (start, end) in moments.items():
            if start is not None and end is not None:
                attributes[name] = max(0.0, end - start)
        attributes |= {
            "gen_ai.usage.cache_read.input_tokens": metrics.num_prefix_hit_tokens,
            "quire.num_prefill_chunks": metrics.num_prefill_chunks,
            "quire.num_preemptions": metrics.num_preemptions,
            "quire.num_waited_steps": metrics.num_waited_steps,
            "quire.detokenize_s": metrics.detokenize_s,
        }
        if metrics.waited_for is not None:
            attributes["quire.waited_for"] = metrics.waited_for
        return attributes

    def _add_phases(self, span: Span, job: Finished, to_ns: int) -> None:
        """Waiting, prompt and answer, as far as they were reached."""
        from opentelemetry.trace import set_span_in_context

        metrics = job.metrics
        if metrics is None:
            return
        context = set_span_in_context(span)
        phases = (
            ("queue", metrics.arrival_s, metrics.first_scheduled_s),
            ("prefill", metrics.first_scheduled_s, metrics.first_token_s),
            ("decode", metrics.first_token_s, metrics.last_token_s),
        )
        for name, start, end in phases:
            if start is not None and end is not None:
                phase = self._tracer.start_span(
                    name, context=context, start_time=to_ns + int(start * 1e9)
                )
                phase.end(to_ns + int(max(start, end) * 1e9))


def _operation(job: Finished) -> str:
    return "chat" if job.call.is_chat else "text_completion"
