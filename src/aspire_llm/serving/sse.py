"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = "data: [DONE]\n\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)  # made once: events are many


def event(value: Any) -> str:
    return f"data: {ENCODER.encode(value)}\n\n"


class EventStream(Response):
    """Sends events as they come. When the client leaves or the server ends it, `events` is closed, then on_close called."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], on_close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events = events
        self._on_close = on_close
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await either(self._write(send), client_leaves(receive))
        finally:
            self._on_close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def client_leaves(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def either(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, None]) -> T | None:
    """The result of `work`, or None if `end` came first; then, or when cancelled, the work is cancelled and waited for."""
    working = asyncio.create_task(work)
    tasks = working, asyncio.create_task(end)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes. If the client leaves, work is cancelled, and what is answered reaches nobody."""
    response = await either(work, client_leaves(request.receive))
    return response if response is not None else Response(status_code=499)
