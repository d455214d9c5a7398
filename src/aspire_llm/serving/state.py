"""What the endpoints share: the engine once it is there, who runs, and whether more may come."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from fastapi import Request

from aspire_llm.config import read_text
from aspire_llm.engine.async_llm import AsyncLLM
from aspire_llm.serving.errors import ApiError
from aspire_llm.serving.settings import ApiKeys, ServerSettings
from aspire_llm.serving.tracing import CONTEXT_HEADERS, Tracer, tracer_to

P = ParamSpec("P")
T = TypeVar("T")

RETRY_SECONDS = "1"  # until a place in the queue, or a server that starts, is worth asking for again


@dataclass(slots=True)
class Running:
    """One HTTP request that the engine works for."""

    id: str  # of the response: cmpl-… or chatcmpl-…
    x_request_id: str
    caller: dict[str, str] = field(default_factory=dict)  # the headers that tell of a caller's span
    engine_ids: list[str] = field(default_factory=list)


class ServerState:
    """Belongs to the event loop; `attach` and `fail` too."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises UserError for keys or files in the settings that cannot be used."""
        self.settings = settings
        self.keys = ApiKeys(settings)
        self.created = int(time.time())
        self.draining = False  # no new requests: the server is going down
        self.running: dict[str, Running] = {}
        self._chat_template = (
            read_text(settings.chat_template, "chat_template") if settings.chat_template is not None else None
        )
        endpoint = settings.otlp_traces_endpoint
        self.tracer: Tracer | None = tracer_to(endpoint) if endpoint is not None else None
        self._llm: AsyncLLM | None = None
        self._places_taken = 0
        # tokenising long prompts and compiling grammars would hold up the event loop; a tokenizer is for one thread
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="aspire-llm-prepare")

    def attach(self, llm: AsyncLLM) -> None:
        """The engine is there: requests may come."""
        if self._chat_template is not None:
            llm.get_tokenizer().chat_template = self._chat_template
        self._llm = llm

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)
        if self.tracer is not None:
            self.tracer.close()

    # ---- the engine

    @property
    def trouble(self) -> str | None:
        """Why no request can be served now; None: all is well."""
        if self._llm is None:
            return "the model is being loaded"
        if not self._llm.is_running:
            failure = self._llm.failure
            return "the engine has stopped" + (f": {type(failure).__name__}: {failure}" if failure else "")
        return "the server is shutting down" if self.draining else None

    @property
    def failed(self) -> bool:
        """The engine was there and has ended: only a restart helps."""
        return self._llm is not None and not self._llm.is_running

    @property
    def llm(self) -> AsyncLLM:
        """Raises ApiError 503 while there is none that works."""
        trouble = self.trouble
        if trouble is not None or self._llm is None:
            raise ApiError(503, str(trouble), headers={"Retry-After": RETRY_SECONDS})
        return self._llm

    @property
    def attached(self) -> AsyncLLM | None:
        """The engine, working or not."""
        return self._llm

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.names_of(self.llm)

    def names_of(self, llm: AsyncLLM) -> tuple[str, ...]:
        return self.settings.served_model_name or (llm.config.model,)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; served: {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )

    async def in_worker(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what takes long on the one worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, lambda: function(*args, **kwargs))

    # ---- who runs

    def take_places(self, count: int) -> Places:
        """Places in batch and queue for `count` engine requests. ApiError 429 where they are taken."""
        room = self.llm.config.max_num_seqs + self.settings.max_queue
        if count > room:
            raise ApiError(
                400, f"n asks for {count} continuations; this server takes at most {room} at once", param="n"
            )
        if self._places_taken + count > room:
            raise ApiError(
                429,
                f"the queue is full: {self._places_taken} requests run or wait, max_queue={self.settings.max_queue}",
                code="queue_full",
                headers={"Retry-After": RETRY_SECONDS},
            )
        self._places_taken += count
        return Places(self, count)

    def give_back(self, count: int) -> None:
        self._places_taken -= count

    @property
    def places_taken(self) -> int:
        return self._places_taken

    @contextmanager
    def listed(self, running: Running) -> Iterator[Running]:
        """While it runs it can be aborted by its ids."""
        self.running[running.id] = running
        try:
            yield running
        finally:
            del self.running[running.id]

    async def abort(self, name: str) -> list[str]:
        """Abort by response id or X-Request-Id; the ids that ran."""
        found = [r for r in self.running.values() if name in (r.id, r.x_request_id)]
        for running in found:
            for engine_id in running.engine_ids:
                await self.llm.abort(engine_id)
        return [running.id for running in found]

    async def abort_all(self) -> None:
        if self._llm is not None:
            for running in list(self.running.values()):
                for engine_id in running.engine_ids:
                    await self._llm.abort(engine_id)


class Places:
    """Given back once, however often that is asked for."""

    def __init__(self, state: ServerState, count: int) -> None:
        self._state = state
        self._count = count

    def give_back(self) -> None:
        count, self._count = self._count, 0
        self._state.give_back(count)


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def running_of(request: Request, prefix: str) -> Running:
    """What a request is called while it runs. prefix: of the response's id."""
    headers = request.headers
    caller = {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
    return Running(new_id(prefix), request.scope["aspire_llm.request_id"], caller)


def end_turn(request: Request) -> None:
    """The request is checked: others may be, while it runs. See `middleware.Turns`."""
    request.scope["aspire_llm.turn"].end()


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
