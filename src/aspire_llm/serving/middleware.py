"""What every request passes on its way in, from the outside: a name and a log line, the key, the size of its body."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aspire_llm.serving.errors import error_response
from aspire_llm.serving.prometheus import HttpCounts
from aspire_llm.serving.settings import ApiKeys

logger = logging.getLogger("aspire_llm.access")

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
CLIENT_LEFT = 499  # as nginx logs it
QUIET = frozenset({"/health", "/ready", "/metrics"})  # asked for every few seconds: logged at debug level


def header(scope: Scope, name: bytes) -> bytes | None:
    """The last header of that name, lower case."""
    found: bytes | None = None
    for key, value in scope["headers"]:
        if key == name:
            found = value
    return found


class Accounting:
    """Names each request (X-Request-Id), logs its end, counts it, and turns what escapes below into a 500."""

    def __init__(self, app: ASGIApp, counts: HttpCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        given = (header(scope, b"x-request-id") or b"").decode("latin-1")
        name = given if REQUEST_ID.fullmatch(given) else str(uuid.uuid4())
        scope["aspire_llm.request_id"] = name
        status, complete, left = 0, False, False

        async def name_and_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        async def watch() -> Message:
            nonlocal left
            message = await receive()
            left = left or (message["type"] == "http.disconnect" and not complete)
            return message

        try:
            if given and name != given:
                message = "X-Request-Id must be 1 to 128 printable ASCII characters without blanks"
                await error_response(400, message, param="X-Request-Id")(scope, watch, name_and_send)
                return
            await self._app(scope, watch, name_and_send)
        except Exception:
            logger.exception("request %s failed", name, extra={"request_id": name})
            if not status:
                await error_response(500, "the server failed; its log says how")(scope, watch, name_and_send)
        finally:
            status = CLIENT_LEFT if left else status
            self._end(scope, name, status, time.perf_counter() - started)

    def _end(self, scope: Scope, name: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._counts.add(scope["method"], route, status)
        client = scope["client"][0] if scope.get("client") else "-"
        path = scope["path"].encode("unicode_escape").decode()  # one line, whatever was asked for; no query
        logger.log(
            logging.DEBUG if path in QUIET else logging.INFO,
            '%s "%s %s" %d %.3f s %s',
            *(client, scope["method"], path, status, seconds, name),
            extra={
                "request_id": name,
                "client": client,
                "method": scope["method"],
                "path": path,
                "status": status,
                "seconds": round(seconds, 6),
            },
        )


class KeyCheck:
    """Refuses requests without a key. Probes and the page itself are open: they show no data of requests."""

    OPEN = frozenset({"/health", "/ready", "/version", "/"})
    OPEN_BELOW = "/static/"

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys.needed or self._open(scope):
            await self._app(scope, receive, send)
            return
        given = header(scope, b"authorization")
        if given is not None and self._keys.opens(given):
            await self._app(scope, receive, send)
            return
        message = "no API key; send the header Authorization: Bearer KEY" if given is None else "this API key is wrong"
        refusal = error_response(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await refusal(scope, receive, send)

    def _open(self, scope: Scope) -> bool:
        path = scope["path"]
        return path in self.OPEN or path.startswith(self.OPEN_BELOW)


class BodyLimit:
    """Reads the body whole before anything else sees it: up to a size, within a time."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = header(scope, b"content-length")
        too_large = error_response(
            413, f"the body is larger than max_body_size={self._max_bytes} bytes", headers={"Connection": "close"}
        )
        if announced is not None and int(announced) > self._max_bytes:  # digits only: the HTTP parser has seen to that
            await too_large(scope, receive, send)
            return
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    more = message.get("more_body", False)
                    if size > self._max_bytes:
                        await too_large(scope, receive, send)
                        return
        except TimeoutError:
            text = f"the body did not come within read_timeout={self._seconds:g} s"
            await error_response(408, text, headers={"Connection": "close"})(scope, receive, send)
            return
        whole: bytes | None = b"".join(chunks)

        async def replay() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()
            body, whole = whole, None
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)


class Turns:
    """Lets a few requests at a time through parsing and checking, which takes a millisecond or two each: in a burst, probes
    and running streams get their turn in between. Requests go on to run all at once."""

    AT_ONCE = 4

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._places = asyncio.Semaphore(self.AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        await self._places.acquire()
        turn = Turn(self._places)
        scope["aspire_llm.turn"] = turn

        async def end_and_send(message: Message) -> None:
            turn.end()
            await send(message)

        try:
            await self._app(scope, receive, end_and_send)
        finally:
            turn.end()


class Turn:
    """Ends when a request's answer begins, or when the endpoint says that only waiting is left."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._ended = False

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._places.release()
