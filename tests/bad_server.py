"""An OpenAI server that answers as the prompt says: well, badly, by halves, or not at all. For tests of clients."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)
HOLD = 0.05  # seconds that a good answer takes


def chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}}


@dataclass
class BadServer:
    """counters: what /metrics says, one after the other. most: requests that were under way together."""

    port: int = 0
    models: list[str] = field(default_factory=lambda: ["bad"])
    key: str | None = None
    counters: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:")), 0
                )
                body = await reader.readexactly(length)
                if not await self.answer(head, body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        path = head.split(" ")[1]
        if path == "/v1/models":
            if self.key is not None and f"Bearer {self.key}" not in head:
                return await whole(writer, 401, {"error": {"message": "no key"}})
            return await whole(writer, 200, {"data": [{"id": name} for name in self.models]})
        if path == "/metrics" and self.counters:
            return await whole(writer, 200, self.counters.pop(0), "text/plain")
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return await whole(writer, 404, {"error": {"message": "not here"}})
        asked = json.loads(body)
        self.bodies.append(asked)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            return await self.completion(str(asked.get("prompt", "good")), writer)
        finally:
            self.under_way -= 1

    async def completion(self, script: str, writer: asyncio.StreamWriter) -> bool:
        if script.isdigit():
            return await whole(writer, int(script), {"error": {"message": f"because of {script}", "code": None}})
        if script == "html":
            return await whole(writer, 502, "<h1>Bad\nGateway</h1>", "text/html")
        if script == "whole":
            return await whole(writer, 200, {"choices": [{"text": "in one piece", "finish_reason": "stop"}]})
        if script == "nothing":
            return False
        if script == "silent":
            await asyncio.sleep(30)
            return False
        writer.write(STREAM)
        async for event in events(script):
            data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            line = f"data: {data}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(line), line))
            await writer.drain()
        if script != "cut":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return False


async def events(script: str) -> AsyncIterator[dict[str, Any] | str]:
    if script == "empty":
        yield chunk("", "stop")
        yield "[DONE]"
        return
    if script == "error first":
        yield {"error": {"message": "out of\nluck", "code": 500}}
        return
    yield chunk("once upon")
    if script in ("half", "cut"):
        return
    if script == "garbage":
        yield '{"choices": ['
    if script == "list":
        yield [1, 2]  # type: ignore[misc]
    if script == "odd choices":
        yield {"choices": {"text": "x"}}
    if script == "error":
        yield {"error": {"message": "fell over"}}
    await asyncio.sleep(HOLD)
    yield chunk(" a\u2028time")
    yield chunk("", "length")
    if script != "no usage":
        yield USAGE
    yield "[DONE]"


async def whole(writer: asyncio.StreamWriter, status: int, body: Any, kind: str = "application/json") -> bool:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return True


@contextmanager
def bad_server(**settings: Any) -> Iterator[BadServer]:
    made = BadServer(**settings)
    ready, loops = threading.Event(), []

    async def serve() -> None:
        server = await asyncio.start_server(made.connected, "127.0.0.1", 0)
        made.port = server.sockets[0].getsockname()[1]
        loops.append((asyncio.get_running_loop(), asyncio.current_task()))
        ready.set()
        await asyncio.Event().wait()

    def run() -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(serve())

    thread = threading.Thread(target=run, name="bad server")
    thread.start()
    assert ready.wait(10)
    try:
        yield made
    finally:
        loop, task = loops[0]
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
        assert not thread.is_alive()
