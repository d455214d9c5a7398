"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

logger = logging.getLogger("aspire_llm.serving")

DONE = "data: [DONE]\n\n"


def event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"


class EventStream(Response):
    """Sends events as they come. When the client leaves, stops reading, or the server ends it, `events` is closed.

    write_timeout: seconds that one event may take to be taken by the client. on_close: called once, at the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str, None], *, write_timeout: float, on_close: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events = events
        self._write_timeout = write_timeout
        self._on_close = on_close
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await either(self._write(send), client_leaves(receive))
        except TimeoutError:
            logger.warning("a client left its stream unread for %g s", self._write_timeout)
        finally:
            self._on_close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._events:
            async with asyncio.timeout(self._write_timeout):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def client_leaves(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def either(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, None]) -> T | None:
    """The result of `work`, or None if `end` came first; then, or when cancelled, the work is cancelled and waited for."""
    tasks = working, ending = asyncio.create_task(work), asyncio.create_task(end)
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
