"""The engine on a thread of its own. Commands go in through a queue; progress goes out through listeners."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aspire_llm.engine.engine import Engine, Step
from aspire_llm.errors import UserError
from aspire_llm.request import Request

Listener = Callable[[Request], None]  # on the engine's thread, after every step that changed the request


@dataclass(frozen=True, slots=True)
class _Add:
    requests: Sequence[Request]
    listener: Listener


@dataclass(frozen=True, slots=True)
class _Abort:
    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[], None]


class EngineThread:
    """Steps the engine while there is work and sleeps while there is none. Only its thread touches engine and requests."""

    def __init__(self, engine: Engine, on_step: Callable[[Step], None] | None = None) -> None:
        """on_step: called on the engine's thread after every step; must be quick and must not raise."""
        self._engine = engine
        self._on_step = on_step
        self._commands: queue.SimpleQueue[_Add | _Abort | _Call | None] = queue.SimpleQueue()
        self._listeners: dict[int, tuple[Request, Listener]] = {}
        self._lock = threading.Lock()  # guards _closed against a command that comes as the thread ends
        self._closed = False
        self.failure: BaseException | None = None  # what ended the thread, if not `close`
        self._thread = threading.Thread(target=self._loop, name="aspire-llm-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def add(self, requests: Sequence[Request], listener: Listener) -> None:
        """Queue requests that were validated. The listener hears of each until it is finished, also if the engine dies."""
        self._send(_Add(requests, listener))

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests before the next step; those that are finished already are left alone."""
        with self._lock:
            if not self._closed:
                self._commands.put(_Abort(requests))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function between two steps, on the engine's thread."""
        self._send(_Call(function))

    def close(self) -> None:
        """Abort everything and end the thread. Listeners hear of the aborts."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        self._thread.join()

    def _send(self, command: _Add | _Call) -> None:
        with self._lock:
            if self._closed:
                raise UserError(f"the engine has stopped{f': {self.failure}' if self.failure else ''}")
            self._commands.put(command)

    def _loop(self) -> None:
        try:
            while self._obey(wait=not self._engine.has_work):
                if self._engine.has_work:
                    step = self._engine.step()
                    if self._on_step is not None:  # first: who hears of an end finds it counted
                        self._on_step(step)
                    for progress in step.progress:
                        self._tell(progress.request)
        except BaseException as error:  # a bug or a dead device: nobody must wait for ever
            self.failure = error
        with self._lock:
            self._closed = True
        self._end_all()

    def _obey(self, *, wait: bool) -> bool:
        """Carry out every command that waits; False to end the thread."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if command is None:
                return False
            if isinstance(command, _Add):
                for request in command.requests:
                    self._add(request, command.listener)
            elif isinstance(command, _Abort):
                for request in command.requests:
                    self._engine.abort(request)
                    self._tell(request)
            else:
                command.run()

    def _add(self, request: Request, listener: Listener) -> None:
        self._listeners[request.key] = (request, listener)
        try:
            self._engine.add(request)
        except UserError as error:  # checked before, so rare: the pool shrank, say
            request.error = str(error)
            request.finish_reason = "error"
            self._tell(request)

    def _tell(self, request: Request) -> None:
        heard = self._listeners.get(request.key)
        if heard is None:
            return
        if request.finished:
            del self._listeners[request.key]
        heard[1](request)

    def _end_all(self) -> None:
        while True:  # commands that came too late
            try:
                command = self._commands.get(block=False)
            except queue.Empty:
                break
            if isinstance(command, _Add):
                self._listeners.update({r.key: (r, command.listener) for r in command.requests})
        for request, _ in list(self._listeners.values()):
            if self.failure is None:
                self._engine.abort(request)
            if not request.finished:
                request.finish_reason = "error" if self.failure is not None else "abort"
                request.error = f"{type(self.failure).__name__}: {self.failure}" if self.failure is not None else None
            self._tell(request)
