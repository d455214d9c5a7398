"""What the server refuses, and how: status, OpenAI's shape, the parameter and its value; and that service goes on."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from aspire_llm.serving.live import LiveMonitor
from aspire_llm.serving.server import Line
from serving_server import NAME, Served, engine, raw_request, served, served_model

MODEL = served_model()
KEY = "sk-right"
AUTH = {"Authorization": f"Bearer {KEY}"}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    llm = engine(MODEL)
    with served(
        llm,
        api_key=[KEY, "sk-second"],
        max_body_size=200_000,
        max_prompt_tokens=500,
        max_queue=4,
        read_timeout=1.5,
        cors_allow_origins=["http://page.example"],
    ) as made:
        yield made
        made.assert_idle()
    llm.shutdown()


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30, headers=AUTH) as made:
        yield made


def refused(
    response: httpx.Response, status: int, *words: str, param: str | None = None, code: str | None = None
) -> Any:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"], error
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert response.headers["X-Request-Id"]
    assert "\n" not in error["message"]
    return error


BAD_TEXT: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"temperature": -1}, "temperature", ("-1", "[0")),
    ({"temperature": "hot"}, "temperature", ("'hot'", "number")),
    ({"top_p": 0}, "top_p", ("0", "(0")),
    ({"n": 0}, "n", ("0", "[1")),
    ({"n": 1_000_000_000}, "n", ("1000000000", "12")),
    ({"n": 2, "temperature": 0}, "n", ("2",)),
    ({"max_tokens": 0}, "max_tokens", ("0",)),
    ({"max_tokens": 1020}, "max_tokens", ("1020", "max_model_len=1024")),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", ("9", "3")),
    ({"stop": [""]}, "stop", ()),
    ({"stop_token_ids": [257]}, "stop_token_ids", ("257", "256")),
    ({"stop_token_ids": [10**30]}, "stop_token_ids", (str(10**30),)),
    ({"logit_bias": {"x": 1}}, "logit_bias", ("'x'",)),
    ({"logit_bias": {"5": 101}}, "logit_bias", ("101",)),
    ({"allowed_token_ids": []}, "allowed_token_ids", ()),
    ({"logprobs": 258}, "logprobs", ("258",)),
    ({"seed": 2**64}, "seed", (str(2**64),)),
    ({"bogus": 3}, "bogus", ("bogus", "3")),
    ({"guided_json": {}}, "guided_json", ()),
    ({"suffix": "x"}, "suffix", ()),
    ({"best_of": 3}, "best_of", ("3",)),
    ({"stream_options": {"include_usage": True}}, "stream_options", ("stream",)),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", ()),
    ({"response_format": {"type": "xml"}}, "response_format.type", ("xml",)),
    ({"response_format": {"type": "json_schema"}}, "response_format", ()),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", ("schema",)),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", ("exactly one",)),
    ({"structured_outputs": {"self": 1}}, "self", ("self",)),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", ()),
    ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs", ()),
    ({"prompt": ""}, "prompt", ("empty",)),
    ({"prompt": []}, "prompt", ("empty",)),
    ({"prompt": [[]]}, "prompt", ("empty",)),
    ({"prompt": [1, 300]}, "prompt", ("300",)),
    ({"prompt": "x" * 600}, "prompt", ("600", "max_prompt_tokens=500")),
    ({"prompt": "x" * 1100}, "prompt", ("1100", "max_model_len")),
    ({"prompt": None}, "prompt", ()),
]
TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
BROKEN_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
BAD_CHAT: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"messages": []}, "messages", ("empty",)),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", ("king",)),
    ({"messages": [{"role": "user"}]}, "messages.0.content", ()),
    ({"messages": [{"role": "user", "content": IMAGE}]}, "messages.0.content", ("image_url",)),
    ({"messages": [{"role": "user", "content": "refuse"}]}, "messages", ("no",)),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", ("3", "4")),
    ({"top_logprobs": 3}, "top_logprobs", ("logprobs",)),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ("21",)),
    ({"tool_choice": "auto"}, "tool_choice", ("tools",)),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", ("'g'",)),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", ("a b",)),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type", ("retrieval",)),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", ()),
    ({"chat_template_kwargs": {"nonsense": 1}}, "chat_template_kwargs", ("nonsense",)),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", ("chat_template",)),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ()),
    ({"continue_final_message": True}, "continue_final_message", ()),
    ({"store": True}, "store", ()),
    ({"messages": [{"role": "assistant", "tool_calls": [BROKEN_CALL]}]}, "messages.0.tool_calls", ("JSON",)),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD_TEXT, ids=lambda v: str(v)[:40])
def test_completions_refuse(client: httpx.Client, body: dict[str, Any], param: str, words: tuple[str, ...]) -> None:
    refused(client.post(TEXT, json={"prompt": "hello", **body}), 400, *words, param=param)


@pytest.mark.parametrize(("body", "param", "words"), BAD_CHAT, ids=lambda v: str(v)[:40])
def test_chats_refuse(client: httpx.Client, body: dict[str, Any], param: str, words: tuple[str, ...]) -> None:
    refused(client.post(CHAT, json={"messages": USER, **body}), 400, *words, param=param)


def test_template_options_that_exist_are_taken(client: httpx.Client) -> None:
    body = {"messages": USER, "return_token_strs": True}
    plain = client.post("/tokenize", json=body).json()
    thinking = client.post("/tokenize", json={**body, "chat_template_kwargs": {"thinking": True}}).json()
    assert "".join(thinking["token_strs"]) == "".join(plain["token_strs"]) + "<think>"


def test_bodies_that_are_no_json(client: httpx.Client) -> None:
    for body in (
        b"",
        b"{",
        b"[1, 2",
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b"nul",
        b'"text"',
        b"[]",
        b"3",
    ):
        refused(client.post(TEXT, content=body, headers={"Content-Type": "application/json"}), 400)
    refused(client.post(TEXT, content=b"prompt=x", headers={"Content-Type": "application/x-www-form-urlencoded"}), 400)
    deep: Any = "x"
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    for body in (  # type: ignore[assignment]
        {"response_format": {"type": "json_schema", "json_schema": {"schema": deep}}},
        {"structured_outputs": {"json": deep}},
    ):
        refused(client.post(TEXT, json={"prompt": "x", **body}), 400, "deep")  # type: ignore[dict-item]
    for text, status in (('"\\ud800"', 400), ('"x", "\\ud800": 1', 400), ('"x", "model": "\\ud800"', 404)):
        body = f'{{"prompt": {text}}}'.encode()
        refused(client.post(TEXT, content=body, headers={"Content-Type": "application/json"}), status)
    nan = b'{"prompt": "x", "temperature": NaN}'
    refused(client.post(TEXT, content=nan, headers={"Content-Type": "application/json"}), 400, param="temperature")


def test_keys(server: Served) -> None:
    with httpx.Client(base_url=server.url) as stranger:
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "Bearer"}, {"Authorization": KEY}):
            for path in ("/v1/models", "/metrics", "/nowhere"):
                answer = stranger.get(path, headers=headers)
                refused(answer, 401, code="invalid_api_key")
                assert answer.headers["WWW-Authenticate"] == "Bearer"
            refused(stranger.post(TEXT, json={"prompt": "x"}, headers=headers), 401)
        for path in ("/health", "/ready", "/version"):
            assert stranger.get(path).status_code == 200
        for key in (KEY, "sk-second"):
            assert stranger.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200


def test_paths_methods_and_models(client: httpx.Client) -> None:
    refused(client.get("/v2/models"), 404, "/v2/models")
    refused(client.get("/v1/completions"), 405, "GET")
    refused(client.post(TEXT, json={"prompt": "x", "model": "gpt"}), 404, "'gpt'", NAME, code="model_not_found")
    refused(client.post("/tokenize", json={"prompt": "x", "model": "gpt"}), 404)
    refused(client.post("/tokenize", json={}), 400, "prompt")
    refused(client.post("/tokenize", json={"prompt": "x", "tools": [TOOL]}), 400)
    refused(client.post("/detokenize", json={"tokens": [257]}), 400, "257")
    refused(client.post("/v1/abort", json={"request_id": "x"}), 404, "'x'")
    for path in ("/static/../app.py", "/static/..%2f..%2fapp.py", "/static/%2e%2e/app.py", "/%2e%2e/etc/passwd"):
        assert client.get(path).status_code == 404


def test_no_path_leaves_the_pages_files() -> None:
    """As sent on the wire: HTTP clients tidy paths up before they send them."""
    llm = engine(MODEL)
    with served(llm, LiveMonitor()) as made:
        for path in (
            *("/static/../live.py", "/static/%2e%2e/live.py", "/static/..%2flive.py", "/static/..%5clive.py"),
            *("/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/....//live.py", "/../../../etc/passwd"),
            *("/static/index.html%00.js", "/static/./app.js", "//static/../../etc/passwd", "/static/.."),
        ):
            request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            answer = raw_request(made.port, request.encode())
            assert answer.split()[1] in (b"400", b"404"), (path, answer[:200])
            assert b"import" not in answer
            assert b"root:" not in answer
        good = raw_request(made.port, b"GET /static/app.js HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert good.split()[1] == b"200"
    llm.shutdown()


def test_a_burst_stands_in_line() -> None:
    """Hundreds of requests that come at once are read a few in a turn of the event loop, in order; what was closed is not."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        line, turns, taken = Line(), 0, []

        class Client:
            def __init__(self, number: int) -> None:
                self.number, self.loop = number, loop

            def take(self, data: bytes) -> None:
                taken.append((turns, self.number, data))

        for number in range(50):
            line.put(Client(number), b"%d" % number)  # type: ignore[arg-type]
        while len(taken) < 50:
            await asyncio.sleep(0)
            turns += 1
        assert [number for _, number, _ in taken] == list(range(50))
        for turn in range(turns):
            assert sum(at == turn for at, _, _ in taken) <= Line.PER_TURN

    asyncio.run(scenario())


def test_pieces_of_one_request_keep_their_order(server: Served) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    whole = head.encode() + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    for size in (1, 7, 60):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(whole), size):
                connection.sendall(whole[start : start + size])
            received = b""
            while chunk := connection.recv(65536):
                received += chunk
        assert received.startswith(b"HTTP/1.1 200"), (size, received)


def test_tokenize_and_back(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"prompt": "Grüße 👋"}).json()
    assert tokens["count"] == len("Grüße 👋".encode()) == len(tokens["tokens"])
    assert tokens["max_model_len"] == 1024
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "Grüße 👋"}
    assert client.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_large_and_slow_bodies(client: httpx.Client, server: Served) -> None:
    refused(client.post(TEXT, json={"prompt": "x" * 300_000}), 413, "max_body_size=200000")

    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 10_000

    refused(client.post(TEXT, content=chunks()), 413)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n{{"
    started = time.monotonic()
    assert b" 408 " in raw_request(server.port, head.encode())
    assert raw_request(server.port, b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ") == b""  # a head that does not end
    assert raw_request(server.port, b"") == b""
    assert time.monotonic() - started < 20
    assert client.get("/health").status_code == 200


def test_smuggling_and_odd_requests(server: Served, client: httpx.Client) -> None:
    def send(*lines: str, body: str = "") -> bytes:
        head = "\r\n".join([*lines, f"Authorization: Bearer {KEY}", "Connection: close", "", body])
        return raw_request(server.port, head.encode("latin-1"), 5)

    for lines in (
        ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Length: 5", "Transfer-Encoding: chunked"),
        ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Length: 5", "Content-Length: 6"),
        ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Length: -1"),
        ("POST /v1/completions HTTP/1.1", "Host: x", "Transfer-Encoding: chunked, gzip"),
        ("GET /health HTTP/1.1", "Host: x", "Bad Header: 1"),
        ("GET /health HTTP/1.1", "Host: x", "X-A: a\x00b"),
        ("\x16\x03\x01",),
    ):
        answer = send(*lines, body="0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.count(b"HTTP/1.1 ") <= 1, answer  # never a second, smuggled answer
        assert not answer or answer.split()[1][:1] in (b"4", b"5"), answer
    assert send("GET /health HTTP/1.1", "Host: x", "X-Big: " + "a" * 1_000_000)[:13] == b"HTTP/1.1 400 "
    for name in ("a b", "\x7f", "é", "x" * 200):
        assert b" 400 " in send("GET /version HTTP/1.1", "Host: x", f"X-Request-Id: {name}")
    assert client.get("/health").status_code == 200


def test_request_ids(client: httpx.Client) -> None:
    assert client.get("/version", headers={"X-Request-Id": "trace-7"}).headers["X-Request-Id"] == "trace-7"
    assert client.get("/version").headers["X-Request-Id"] != client.get("/version").headers["X-Request-Id"]


def test_cors(client: httpx.Client) -> None:
    ask = {
        "Origin": "http://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    with httpx.Client(base_url=client.base_url) as page:
        allowed = page.options(TEXT, headers=ask)
        assert allowed.status_code == 200
        assert allowed.headers["Access-Control-Allow-Origin"] == "http://page.example"
        assert page.options(TEXT, headers={**ask, "Origin": "http://evil.example"}).status_code == 400
        refusal = page.get("/v1/models", headers={"Origin": "http://page.example"})
        assert refusal.status_code == 401
        assert refusal.headers["Access-Control-Allow-Origin"] == "http://page.example"  # so that the page can read it


def test_a_full_queue_says_when_to_come_back(client: httpx.Client, server: Served) -> None:
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "n": 12, "stream": True}
    with client.stream("POST", TEXT, json=body) as stream:
        assert stream.status_code == 200
        answer = client.post(TEXT, json={"prompt": "x", "max_tokens": 1})
        refused(answer, 429, "max_queue=4", code="queue_full")
        assert int(answer.headers["Retry-After"]) >= 1
        next(stream.iter_bytes())
    server.assert_idle()
    assert client.post(TEXT, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_no_secrets_in_the_log(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    loggers = [logging.getLogger(name) for name in ("aspire_llm", "aspire_llm.access", "uvicorn")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.DEBUG)
        with httpx.Client(base_url=server.url, headers=AUTH) as client:
            client.post(TEXT + "?api_key=sk-query", json={"prompt": "my prompt", "max_tokens": 2})
            client.post(TEXT, json={"prompt": "my prompt", "oops": 1})
            client.get("/v1/models", headers={"Authorization": "Bearer sk-guess"})
            client.get("/line%0abreak")
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
    text = caplog.text
    assert "/v1/completions" in text
    for secret in (KEY, "sk-query", "sk-guess", "my prompt"):
        assert secret not in text
    assert "line\nbreak" not in text


def test_a_client_that_leaves_at_once(server: Served) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 900, "ignore_eos": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(0.05)
    server.assert_idle(5)
