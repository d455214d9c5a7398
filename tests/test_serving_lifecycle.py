"""From start to end: readiness, aborts, clients that leave or do not read, time limits, a dead engine, shutdown."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from aspire_llm import AsyncLLM
from aspire_llm.engine.engine import Step
from aspire_llm.engine.garbage import RARELY, YOUNG, keep_collections_short
from aspire_llm.engine.launched import Launched
from aspire_llm.scheduler.plan import StepPlan
from aspire_llm.serving import server as server_module
from aspire_llm.serving.app import attach, create_app
from aspire_llm.serving.logs import JsonFormatter
from aspire_llm.serving.server import Server, listen, tidy
from aspire_llm.serving.settings import make_settings
from aspire_llm.serving.state import Running, ServerState
from serving_server import Served, engine, served, served_model

MODEL = served_model()
LONG = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
TEXT = "/v1/completions"


class Brake:
    """Makes steps slow, and counts them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps = 0

    def __call__(self, step: Step) -> None:
        self.steps += 1
        time.sleep(self.seconds)


@pytest.fixture
def brake() -> Brake:
    return Brake(0.05)


@pytest.fixture
def slow(brake: Brake) -> Iterator[AsyncLLM]:
    llm = engine(MODEL, on_step=brake)
    yield llm
    llm.shutdown()
    if llm.failure is None:
        llm.engine.check()
        assert not llm.engine.has_work


def events_of(stream: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class Gate:
    """Holds every step back, on the engine's thread, until the test lets it go; counts the rows of each plan."""

    def __init__(self, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []  # of each plan that was made
        self._held = threading.Semaphore(0)
        self._free = threading.Semaphore(0)
        launch = llm.engine.runner.launch

        def held(plan: StepPlan) -> Launched:
            self.rows.append(len(plan.rows))
            self._held.release()
            assert self._free.acquire(timeout=60)
            return launch(plan)

        monkeypatch.setattr(llm.engine.runner, "launch", held)

    def wait(self) -> None:
        """Until a step is running."""
        assert self._held.acquire(timeout=60)

    def go(self) -> None:
        self._free.release()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_in_no_later_plan(
    slow: AsyncLLM, brake: Brake, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves while a step runs; that step is its last, though others go on."""
    brake.seconds = 0.0
    gate = Gate(slow, monkeypatch)
    with served(slow) as server:
        body = json.dumps({**LONG, "stream": stream, "n": 3}).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + body)
            for _ in range(3):
                gate.wait()
                gate.go()
            gate.wait()
        deadline = time.monotonic() + 120
        while slow._running and time.monotonic() < deadline:  # until the server has seen it leave
            time.sleep(0.005)
        assert not slow._running
        assert gate.rows[-1] == 3
        gate.go()
        server.assert_idle()
        assert len(gate.rows) == 4  # the step that ran was the last


def test_starting_then_ready() -> None:
    settings = make_settings(port=0)
    app = create_app(None, settings)
    with served_app(app, settings) as server, server.http as client:
        for path in ("/health", "/ready", "/v1/models"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert "loaded" in answer.json()["error"]["message"]
            assert answer.headers["Retry-After"]
        assert client.post(TEXT, json=LONG).status_code == 503
        assert client.get("/version").status_code == 200
        assert "vllm:" not in client.get("/metrics").text
        llm = engine(MODEL)
        server.loop.call_soon_threadsafe(attach, app, llm)
        while client.get("/ready").status_code != 200:
            time.sleep(0.01)
        assert client.post(TEXT, json={**LONG, "max_tokens": 2}).status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"  # the model's own name
        llm.shutdown()
        assert client.get("/health").status_code == 503


def served_app(app: Any, settings: Any) -> Any:
    """As `served`, of an application without an engine."""
    from contextlib import contextmanager

    @contextmanager
    def run() -> Iterator[Served]:
        listener = listen(settings)
        server = Server(app, settings)
        loops: list[asyncio.AbstractEventLoop] = []

        async def main() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(sockets=[listener])

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = listener.getsockname()[1]
        yield Served(f"http://127.0.0.1:{port}", port, app, None, server, loops[0])  # type: ignore[arg-type]
        server.should_exit = True
        thread.join(30)
        app.state.server.close()

    return run()


def test_abort_by_either_id(slow: AsyncLLM) -> None:
    with served(slow) as server, server.http as client, server.http as other:
        for by_header in (True, False):
            body = {**LONG, "stream": True}
            with client.stream("POST", TEXT, json=body, headers={"X-Request-Id": "mine"}) as stream:
                lines = stream.iter_lines()
                first = json.loads(next(lines).removeprefix("data: "))
                answer = other.post("/v1/abort", json={"request_id": "mine" if by_header else first["id"]})
                assert answer.json() == {"aborted": [first["id"]]}
                rest = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
            reasons = [c["finish_reason"] for e in rest for c in e["choices"] if c["finish_reason"]]
            assert reasons == ["abort"]
        server.assert_idle()
        assert other.get("/metrics").text.count('finished_reason="abort"') == 1


def test_requests_that_take_too_long(slow: AsyncLLM) -> None:
    with served(slow, request_timeout=0.4) as server, server.http as client:
        answer = client.post(TEXT, json=LONG)
        assert answer.status_code == 504
        assert "request_timeout=0.4" in answer.json()["error"]["message"]
        with client.stream("POST", TEXT, json={**LONG, "prompt": ["a", "b"], "stream": True}) as stream:
            events = events_of(stream)
        assert events[-1]["error"]["type"] == "timeout_error"
        assert any("choices" in e for e in events)
        server.assert_idle()
        assert client.post(TEXT, json={**LONG, "max_tokens": 1}).status_code == 200


def test_a_client_that_does_not_read(caplog: pytest.LogCaptureFixture) -> None:
    llm = engine(MODEL)
    with served(llm, write_timeout=0.5, send_buffer=32768) as server:
        body = json.dumps({**LONG, "max_tokens": 300, "stream": True, "logprobs": 50}).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(head.encode() + body)
            deadline = time.monotonic() + 120
            while "left its answer unread" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.05)
            server.assert_idle()
            assert not server.server.server_state.connections
            assert "left its answer unread" in caplog.text
        with server.http as client:
            assert client.get("/health").status_code == 200
    llm.shutdown()


def test_a_dead_engine_says_so(slow: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(slow) as server, server.http as client, server.http as other:
        with client.stream("POST", TEXT, json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            monkeypatch.setattr(slow.engine.scheduler, "plan", lambda: 1 / 0)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert (error["type"], "ZeroDivisionError" in error["message"]) == ("service_unavailable_error", True)
        for answer in (other.get("/health"), other.get("/ready"), other.post(TEXT, json=LONG)):
            assert answer.status_code == 503
            assert "ZeroDivisionError" in answer.json()["error"]["message"]
        assert other.get("/metrics").status_code == 200
        assert not server.app.state.server.running
        assert server.app.state.server.places_taken == 0


@pytest.mark.parametrize(("grace", "reason"), [(30.0, "length"), (0.2, "abort")])
def test_shutdown_lets_streams_end(slow: AsyncLLM, brake: Brake, grace: float, reason: str) -> None:
    brake.seconds = 0.02
    with served(slow, shutdown_grace=grace) as server, server.http as client:
        body = {**LONG, "max_tokens": 60, "draft": False, "stream": True}
        with client.stream("POST", TEXT, json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.server.should_exit = True
            rest = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
        reasons = [c["finish_reason"] for e in rest for c in e["choices"] if c["finish_reason"]]
        assert reasons == [reason]
        with server.http as late, pytest.raises(httpx.ConnectError):
            late.get("/health")


def test_json_log() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "a\n%s", ("b",), None)
    record.request_id = "r"
    made = json.loads(JsonFormatter().format(record))
    assert (made["message"], made["level"], made["request_id"]) == ("a\nb", "info", "r")
    assert "\n" not in JsonFormatter().format(record)


def test_full_collections_wait_until_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stop everything, so what is loaded is left out of them, and they come when nobody waits."""
    before = gc.get_threshold()
    try:
        keep_collections_short()
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() == (YOUNG, before[1], RARELY)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
    collected: list[int] = []
    monkeypatch.setattr(server_module, "TIDY_SECONDS", 0.0)
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 1))
    monkeypatch.setattr(gc, "collect", lambda: collected.append(len(state.running)))
    state = ServerState(make_settings())
    state._llm = object()  # type: ignore[assignment]

    async def scenario() -> None:
        tidying = asyncio.create_task(tidy(state))
        state.running["a"] = Running("a", "x")
        for _ in range(5):
            await asyncio.sleep(0)
        assert not collected
        del state.running["a"]
        while not collected:
            await asyncio.sleep(0)
        tidying.cancel()

    asyncio.run(scenario())
    assert set(collected) == {0}
    state.close()
