"""The live page: its files, and the server-sent events that feed it while somebody watches."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException
from fastapi.responses import Response

from aspire_llm.engine.async_llm import AsyncLLM
from aspire_llm.engine.engine import Step
from aspire_llm.serving.live_view import HISTORY, LiveView
from aspire_llm.serving.sse import EventStream

logger = logging.getLogger(__name__)

INTERVAL = 0.2  # seconds between frames
HEARTBEAT = 5.0  # most seconds between two signs of life

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class LiveMonitor:
    """Between the engine's thread, which reports steps, and any number of watchers, who read frames.

    While nobody watches it holds nothing and `on_step` is one check. A frame is built once for all watchers, at most once
    an interval and only if something changed; a watcher that missed one gets the whole state, so nothing queues up.
    """

    def __init__(self) -> None:
        self._view: LiveView | None = None  # None: nobody watches
        self._lock = threading.Lock()  # guards the view
        self._num_watchers = 0
        self._closed = False
        self._tick = -1  # intervals since the clock's zero, at the last frame
        self._number = 0  # of the newest frame
        self._newest: dict[str, Any] = {}
        self._delta = ""
        self._whole: tuple[int, str] | None = None  # the number and event of the newest whole frame

    @property
    def num_watchers(self) -> int:
        return self._num_watchers

    @property
    def is_idle(self) -> bool:
        """Nobody watches, and nothing is kept."""
        return self._view is None

    def on_step(self, step: Step) -> None:
        """A step is done. On the engine's thread; quick, and never raises."""
        if self._view is None:
            return
        try:
            with self._lock:
                if self._view is not None:
                    self._view.add(step, time.monotonic())
        except Exception:  # a page must not end the engine
            logger.exception("the live page lost a step")

    def close(self) -> None:
        """End every stream within one interval, and refuse new ones."""
        self._closed = True

    @contextmanager
    def watch(self, llm: AsyncLLM) -> Iterator[None]:
        """Count one more watcher; with the last one everything goes."""
        self._num_watchers += 1
        if self._num_watchers == 1:
            with self._lock:
                self._view = LiveView(llm.engine)
        try:
            yield
        finally:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                with self._lock:
                    self._view = None
                self._newest, self._delta, self._whole = {}, "", None

    async def events(self, llm: AsyncLLM) -> AsyncGenerator[str, None]:
        """Server-sent events of one watcher, who is counted until the generator is closed: `snapshot`, then `delta` or
        `snapshot`; at the end `stopped`."""
        with self.watch(llm):
            self._advance()
            event = self._snapshot(llm)
            seen, said = self._number, time.monotonic()
            yield event
            while llm.is_running and not self._closed:
                await asyncio.sleep(INTERVAL - time.monotonic() % INTERVAL)  # all watchers wake at the same ticks
                self._advance()
                if seen != self._number:
                    event = self._delta if seen == self._number - 1 else self._snapshot(llm)
                    seen, said = self._number, time.monotonic()
                    yield event
                elif time.monotonic() - said >= HEARTBEAT:
                    said = time.monotonic()
                    yield ": idle\n\n"
            yield _event("stopped", {"reason": _reason(llm)})

    def _advance(self) -> None:
        """Build the frame of this tick, if no watcher has yet."""
        now = time.monotonic()
        tick = int(now / INTERVAL + 1e-6)
        if tick == self._tick:
            return
        self._tick = tick
        with self._lock:
            if self._view is None:
                return
            frame = self._view.frame(now, whole=False)
        if any(lane["cells"] or lane["ended"] for lane in frame["lanes"]) or frame != self._newest:
            self._newest = frame
            self._number += 1
            self._delta = _event("delta", frame)

    def _snapshot(self, llm: AsyncLLM) -> str:
        if self._whole is None or self._whole[0] != self._number:
            with self._lock:
                frame = self._view.frame(time.monotonic(), whole=True) if self._view is not None else {}
            frame |= {"history": HISTORY, "method": llm.config.method, "model": Path(llm.config.model).name}
            self._whole = (self._number, _event("snapshot", frame))
        return self._whole[1]


def live_router(engine: Callable[[], AsyncLLM | None], monitor: LiveMonitor) -> APIRouter:
    """`/` (the page), `/static/…` (its files) and `/live/events`. Give `monitor.on_step` to the AsyncLLM.

    engine: None while it is still being loaded; the page is there already, and waits.
    The events hold request ids and counts, never text. The page sends the API key, if its user gave one, with each.
    """
    router = APIRouter(include_in_schema=False)
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in MEDIA_TYPES}

    @router.get("/")
    async def page() -> Response:
        return _file(files["index.html"])

    @router.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in files:  # a list of names: no path reaches the file system
            raise HTTPException(404)
        return _file(files[name])

    @router.get("/live/events")
    async def events() -> Response:
        llm = engine()
        if llm is None:
            raise HTTPException(503, "the model is being loaded")
        return EventStream(monitor.events(llm), on_close=lambda: None)

    return router


def _file(path: Path) -> Response:
    return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix], headers=HEADERS)


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _reason(llm: AsyncLLM) -> str:
    if llm.is_running:
        return "the server is shutting down"
    return f"{type(llm.failure).__name__}: {llm.failure}" if llm.failure is not None else "it was shut down"
