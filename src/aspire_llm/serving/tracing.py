"""A span for each prompt, under vLLM's attribute names, which follow OpenTelemetry's GenAI conventions. Extra `otel`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aspire_llm.errors import UserError
from aspire_llm.request import NO_TOKEN_LIMIT, RequestMetrics, SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

CONTEXT_HEADERS = ("traceparent", "tracestate")  # W3C: a caller's span, whose child ours becomes
LEAST = 1e-9


class Tracer:
    """Makes spans when requests are over: nothing of tracing stands in a request's way."""

    def __init__(self, processor: SpanProcessor, service_name: str = "aspire-llm") -> None:
        """processor: takes the finished spans. Raises UserError where OpenTelemetry is not installed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
        except ImportError as error:
            raise not_installed(error) from None
        # a provider of our own: nothing global is set
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service_name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("aspire_llm.serving")

    def record(
        self,
        *,
        request_id: str,
        model: str,
        params: SamplingParams,
        caller: Mapping[str, str],
        metrics: RequestMetrics,
        prompt_tokens: int,
        completion_tokens: int,
        finish_reasons: Sequence[str],
        error: str | None,
    ) -> None:
        """A prompt is over, now. caller: its `CONTEXT_HEADERS`. Times that were not reached are left out."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now = time.time_ns()
        e2e = time.monotonic() - metrics.arrival_time
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(dict(caller)),
            kind=SpanKind.SERVER,
            start_time=now - int(e2e * 1e9),
        )
        speculation = metrics.speculative_decoding
        span.set_attributes(
            {
                "gen_ai.request.id": request_id,
                "gen_ai.response.model": model,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.n": params.n,
                "gen_ai.usage.prompt_tokens": prompt_tokens,
                "gen_ai.usage.completion_tokens": completion_tokens,
                "gen_ai.usage.num_sequences": params.n,
                "gen_ai.response.finish_reasons": list(finish_reasons),
                "gen_ai.latency.e2e": e2e,
                "gen_ai.latency.time_in_queue": metrics.time_in_queue,
                "aspire.num_draft_tokens": speculation["num_draft_tokens"],
                "aspire.num_accepted_draft_tokens": speculation["num_accepted_draft_tokens"],
                "aspire.mean_acceptance_length": speculation["mean_acceptance_length"],
            }
        )
        if params.max_tokens != NO_TOKEN_LIMIT:
            span.set_attribute("gen_ai.request.max_tokens", params.max_tokens)
        first = metrics.time_to_first_token
        if first > LEAST:
            span.set_attributes(
                {
                    "gen_ai.latency.time_to_first_token": first,
                    "gen_ai.latency.time_in_model_prefill": first - metrics.time_in_queue,
                    "gen_ai.latency.time_in_model_decode": e2e - first,
                    "gen_ai.latency.time_in_model_inference": e2e - metrics.time_in_queue,
                }
            )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(now)

    def close(self) -> None:
        """Send what is left, and stop."""
        self._provider.shutdown()


def tracer_to(endpoint: str) -> Tracer:
    """Spans to an OTLP collector (HTTP, protobuf), in batches, from a thread of its own. Raises UserError."""
    if not endpoint.startswith(("http://", "https://")):
        raise UserError(
            f"otlp_traces_endpoint {endpoint!r}: must be a URL such as http://localhost:4318/v1/traces",
            "otlp_traces_endpoint",
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise not_installed(error) from None
    return Tracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


def not_installed(error: ImportError) -> UserError:
    return UserError(f"otlp_traces_endpoint needs {error.name}: pip install 'aspire-llm[otel]'", "otlp_traces_endpoint")
