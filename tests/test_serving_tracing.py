"""A span for each prompt, with vLLM's attribute names, however the request ends; and a clear word where the extra is missing."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from aspire_llm.errors import UserError
from aspire_llm.serving.settings import make_settings
from aspire_llm.serving.state import ServerState
from aspire_llm.serving.tracing import Tracer
from serving_server import NAME, Served, engine, served, served_model

TEXT = "/v1/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    llm = engine(served_model())
    with served(llm) as made:
        yield made
    llm.shutdown()


@pytest.fixture
def exporter(server: Served) -> Iterator[InMemorySpanExporter]:
    made = InMemorySpanExporter()
    server.app.state.server.tracer = Tracer(SimpleSpanProcessor(made))
    yield made
    server.app.state.server.tracer = None


def spans(exporter: InMemorySpanExporter, number: int) -> list[ReadableSpan]:
    deadline = time.monotonic() + 20
    while len(exporter.get_finished_spans()) < number and time.monotonic() < deadline:
        time.sleep(0.01)
    found = list(exporter.get_finished_spans())
    assert len(found) == number
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span(server: Served, exporter: InMemorySpanExporter, stream: bool) -> None:
    before = time.time_ns()
    body = {
        **{"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": stream},
        **{"temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1},
    }
    with httpx.Client(base_url=server.url, timeout=60) as client:
        headers = {"traceparent": PARENT, "X-Request-Id": "trace-me"}
        assert client.post(TEXT, json=body, headers=headers).status_code == 200
    [span] = spans(exporter, 1)
    found: dict[str, Any] = dict(span.attributes or {})
    assert (span.name, span.kind, span.status.status_code) == ("llm_request", SpanKind.SERVER, StatusCode.UNSET)
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == tuple(PARENT.split("-")[1:3])
    assert found["gen_ai.request.id"] == "trace-me"
    assert found["gen_ai.response.model"] == NAME
    for name, value in (("temperature", 0.5), ("top_p", 0.9), ("n", 2), ("max_tokens", 20)):
        assert found[f"gen_ai.request.{name}"] == value
    assert found["gen_ai.usage.prompt_tokens"] == 5
    assert found["gen_ai.usage.completion_tokens"] == 40
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert found["aspire.num_draft_tokens"] > 0
    latency = {name.removeprefix("gen_ai.latency."): value for name, value in found.items() if ".latency." in name}
    assert 0 <= latency["time_in_queue"] < latency["time_to_first_token"] < latency["e2e"]
    parts = latency["time_in_queue"] + latency["time_in_model_prefill"] + latency["time_in_model_decode"]
    assert parts == pytest.approx(latency["e2e"])
    assert span.start_time is not None
    assert span.end_time is not None
    assert before - 10**7 < span.start_time < span.end_time <= time.time_ns()
    assert "hello" not in span.to_json()  # no text of the caller's


def test_every_prompt_and_every_end(
    server: Served, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.post(TEXT, json={"prompt": ["a", "b"], "max_tokens": 2})
        assert {dict(s.attributes or {})["gen_ai.usage.prompt_tokens"] for s in spans(exporter, 2)} == {1}
        exporter.clear()
        with client.stream("POST", TEXT, json=long) as stream:
            next(stream.iter_bytes())
        [left] = spans(exporter, 1)
        assert dict(left.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)
        exporter.clear()
        assert client.post(TEXT, json={"prompt": "x", "oops": 1}).status_code == 400
        assert (
            client.post(TEXT, json={"prompt": "x", "max_tokens": 1}, headers={"traceparent": "junk"}).status_code == 200
        )
        [alone] = spans(exporter, 1)  # what is refused never ran
        assert alone.parent is None
        exporter.clear()

        def broken(*_: object) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(server.llm.engine.runner, "launch", broken)
            assert client.post(TEXT, json={**long, "stream": False}).status_code == 500
        [failed] = spans(exporter, 1)
        assert failed.status.status_code is StatusCode.ERROR
        assert "out of memory" in (failed.status.description or "")
        server.assert_idle()


def test_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ServerState(make_settings(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces"))
    assert state.tracer is not None
    state.close()
    with pytest.raises(UserError, match="must be a URL such as"):
        ServerState(make_settings(otlp_traces_endpoint="localhost:4317"))
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"needs opentelemetry.*pip install 'aspire-llm\[otel\]'"):
        ServerState(make_settings(otlp_traces_endpoint="http://localhost:4318/v1/traces"))
