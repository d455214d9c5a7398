"""The engine on a thread of its own. Commands go in through a queue; word of requests goes out through one function."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aspire_llm.engine.engine import Engine, Step
from aspire_llm.errors import UserError
from aspire_llm.request import Request

Listener = Callable[[Sequence[Request]], None]  # on the engine's thread, after every step: the requests that it changed


@dataclass(frozen=True, slots=True)
class _Add:
    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class _Abort:
    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[], None]


class EngineThread:
    """Steps the engine while there is work and sleeps while there is none. Only its thread touches engine and requests.

    Every command that has come is carried out before each plan, so a request aborted while a step runs is in no plan made
    after that: one step on the CPU, where a step runs while nothing else is planned; on a GPU the step that was launched
    ahead still runs, and its results for the request are dropped.
    """

    def __init__(self, engine: Engine, listener: Listener, on_step: Callable[[Step], None] | None = None) -> None:
        """Both are called on the engine's thread after every step, must be quick and must not raise. The listener hears of
        each request until it is finished, also if the engine dies."""
        self._engine = engine
        self._listener = listener
        self._on_step = on_step
        self._commands: queue.SimpleQueue[_Add | _Abort | _Call | None] = queue.SimpleQueue()
        self._open: dict[int, Request] = {}  # by key: the listener has not heard of their end
        self._lock = threading.Lock()  # guards _closed against a command that comes as the thread ends
        self._closed = False
        self.failure: BaseException | None = None  # what ended the thread, if not `close`
        self._thread = threading.Thread(target=self._loop, name="aspire-llm-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests that were validated."""
        self._send(_Add(requests))

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests before the next plan; those that are finished already are left alone."""
        with self._lock:
            if not self._closed:
                self._commands.put(_Abort(requests))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function between two steps, on the engine's thread."""
        self._send(_Call(function))

    def close(self) -> None:
        """Abort everything and end the thread. The listener hears of the aborts."""
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
                    self._tell([progress.request for progress in step.progress])
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
                    self._add(request)
            elif isinstance(command, _Abort):
                for request in command.requests:
                    self._engine.abort(request)
                self._tell(command.requests)
            else:
                command.run()

    def _add(self, request: Request) -> None:
        self._open[request.key] = request
        try:
            self._engine.add(request)
        except UserError as error:  # checked before, so rare: the pool shrank, say
            request.error = str(error)
            request.finish_reason = "error"
            self._tell([request])

    def _tell(self, changed: Sequence[Request]) -> None:
        heard = [request for request in changed if request.key in self._open]
        for request in heard:
            if request.finished:
                del self._open[request.key]
        if heard:
            self._listener(heard)

    def _end_all(self) -> None:
        while True:  # commands that came too late
            try:
                command = self._commands.get(block=False)
            except queue.Empty:
                break
            if isinstance(command, _Add):
                self._open.update({request.key: request for request in command.requests})
        left = list(self._open.values())
        for request in left:
            if self.failure is None:
                self._engine.abort(request)
            if not request.finished:
                request.finish_reason = "error" if self.failure is not None else "abort"
                request.error = f"{type(self.failure).__name__}: {self.failure}" if self.failure is not None else None
        self._tell(left)
