"""Runs the application: listens at once, loads the engine meanwhile, and goes down without cutting answers short."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from aspire_llm.engine.async_llm import AsyncLLM
from aspire_llm.engine.garbage import keep_collections_short
from aspire_llm.errors import UserError
from aspire_llm.serving.app import attach, create_app
from aspire_llm.serving.live import LiveMonitor
from aspire_llm.serving.settings import ServerSettings
from aspire_llm.serving.state import ServerState

logger = logging.getLogger("aspire_llm.serving")

AFTER_ABORT = 5.0  # seconds for aborted requests to say goodbye
SWITCH_SECONDS = 0.0005
MOST_HEADER_BYTES = 64 * 1024
ACCEPTS = 16  # connections taken in one turn of the event loop
BACKLOG = 2048  # connections that may wait to be taken
TIDY_SECONDS = 5.0


class Line:
    """Where requests that cost something wait to be read, so that a burst of hundreds does not hold up probes and streams:
    a few in every turn of the event loop."""

    PER_TURN = 4

    def __init__(self) -> None:
        self._waiting: deque[tuple[Protocol, bytes]] = deque()

    def put(self, protocol: Protocol, data: bytes) -> None:
        if not self._waiting:
            protocol.loop.call_soon(self._serve)
        self._waiting.append((protocol, data))

    def _serve(self) -> None:
        for _ in range(min(self.PER_TURN, len(self._waiting))):
            protocol, data = self._waiting.popleft()
            protocol.take(data)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._serve)


class Protocol(H11Protocol):
    """Lets POST requests stand in line; closes connections whose client takes too long over a request's head, or does not
    read its answer. uvicorn by itself waits for ever."""

    line: Line
    read_seconds: float
    write_seconds: float

    _num_in_line = 0  # pieces of data that came and wait to be read

    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.access_log = False  # ours leaves out the query, where some put their key

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._num_in_line or data.startswith(b"POST "):
            self._num_in_line += 1
            self.line.put(self, data)
        else:
            self._read(data)

    def take(self, data: bytes) -> None:
        """What stood in line has its turn."""
        self._num_in_line -= 1
        if not self.transport.is_closing():
            self._read(data)

    def _read(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_reading()  # a head has come
        elif self._reading is None and self.conn.their_state is h11.IDLE:
            self._expect_head()  # the next one has begun

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self.write_seconds, self._unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self._stop_writing()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._reading = self.loop.call_later(self.read_seconds, self._no_head)

    def _no_head(self) -> None:
        self._reading = None
        if not self.transport.is_closing():
            self.transport.close()

    def _unread(self) -> None:
        self._writing = None
        logger.warning("a client left its answer unread for %g s", self.write_seconds)
        self.transport.abort()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


def protocol(settings: ServerSettings) -> type[Protocol]:
    """uvicorn makes the protocols, and passes them nothing of ours."""

    class Timed(Protocol):
        line = Line()
        read_seconds = settings.read_timeout
        write_seconds = settings.write_timeout

    return Timed


class Server(uvicorn.Server):
    """On SIGTERM: no new requests; running ones get their time, then are aborted and may still say so."""

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=protocol(settings),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=MOST_HEADER_BYTES,
                timeout_graceful_shutdown=int(settings.shutdown_grace + AFTER_ABORT) + 1,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                backlog=ACCEPTS,  # asyncio takes so many at once: a burst must not hold up those who are here
            )
        )
        self._app = app
        self._grace = settings.shutdown_grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state: ServerState = self._app.state.server
        state.draining = True
        if self._app.state.monitor is not None:
            self._app.state.monitor.close()
        if state.running:
            logger.info("%d requests run; they get %g s", len(state.running), self._grace)
        aborting = asyncio.create_task(self._abort_late(state))
        try:
            await super().shutdown(sockets)
        finally:
            aborting.cancel()
            self._captured_signals.clear()  # uvicorn would raise them again, and the process die before it has cleaned up

    async def _abort_late(self, state: ServerState) -> None:
        await asyncio.sleep(self._grace)
        await state.abort_all()


def serve(settings: ServerSettings, load: Callable[[Callable[..., None] | None], AsyncLLM]) -> None:
    """Serve until SIGTERM or SIGINT. load: makes the engine, with a function to call after every step.

    Raises UserError for settings that cannot be used, a port that is taken, and what `load` raises.
    """
    # The engine's thread and the event loop take turns. At Python's 5 ms, every write to a socket may wait so long for the
    # engine: with 500 streams on two cores, /health took 17 ms in the median, and 11 ms so.
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        asyncio.run(_serve(settings, load))
    finally:
        gc.unfreeze()  # or extension modules find objects of theirs at exit, and complain


async def _serve(settings: ServerSettings, load: Callable[[Callable[..., None] | None], AsyncLLM]) -> None:
    check_certificate(settings)
    monitor = LiveMonitor() if settings.live_page else None
    app = create_app(None, settings, monitor)
    listener = listen(settings)
    server = Server(app, settings)
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[AsyncLLM] = loop.create_future()

    def loading() -> None:
        try:
            llm = load(monitor.on_step if monitor is not None else None)
            keep_collections_short()
        except BaseException as error:
            loop.call_soon_threadsafe(_settle, loaded, None, error)
        else:
            loop.call_soon_threadsafe(_settle, loaded, llm, None)

    def ready(done: asyncio.Future[AsyncLLM]) -> None:
        if done.exception() is not None:
            server.should_exit = True
            return
        attach(app, done.result())
        logger.info("ready: %s", address(settings, listener))

    loaded.add_done_callback(ready)
    # a daemon, so that a signal while a large model is being loaded ends the process at once
    threading.Thread(target=loading, name="aspire-llm-load", daemon=True).start()
    logger.info("listening on %s, loading the model", address(settings, listener))
    tidying = asyncio.create_task(tidy(app.state.server))
    try:
        await server.serve(sockets=[listener])
    finally:
        tidying.cancel()
        app.state.server.close()
        listener.close()
        if loaded.done() and loaded.exception() is None:
            await asyncio.to_thread(loaded.result().shutdown)
    if loaded.done():
        loaded.result()  # raises what loading raised


async def tidy(state: ServerState) -> None:
    """Collect garbage when nothing runs. Objects of 500 running streams take 0.1 s to look through."""
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        if state.attached is not None and not state.running and gc.get_count()[2]:
            gc.collect()


def _settle(future: asyncio.Future[AsyncLLM], llm: AsyncLLM | None, error: BaseException | None) -> None:
    if future.done():
        return
    if llm is not None:
        future.set_result(llm)
    elif error is not None:
        future.set_exception(error)


def check_certificate(settings: ServerSettings) -> None:
    """Raises UserError where HTTPS is asked for and cannot be had."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise UserError("ssl_keyfile does nothing without ssl_certfile", "ssl_keyfile")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:  # SSLError is one
        reason = error.strerror or str(error)
        raise UserError(f"ssl_certfile {settings.ssl_certfile!r}: {reason}", "ssl_certfile") from None


def listen(settings: ServerSettings) -> socket.socket:
    """A socket on the address asked for. Raises UserError where that is not to be had."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except OSError as error:
        raise UserError(f"host {settings.host!r}, port {settings.port}: {error.strerror or error}", "port") from None
    return listener


def address(settings: ServerSettings, listener: socket.socket) -> str:
    scheme = "https" if settings.ssl_certfile is not None else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}{settings.root_path}"
