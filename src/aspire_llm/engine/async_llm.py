"""`AsyncLLM`: many concurrent requests on one engine thread, read with `async for`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from aspire_llm.config import EngineConfig
from aspire_llm.engine.engine import Engine, Step
from aspire_llm.engine.inputs import InputProcessor, Message, Prompt
from aspire_llm.engine.llm import LLM
from aspire_llm.engine.metrics import Metric
from aspire_llm.engine.streams import Deliveries, News, OutputKind, OutputStream
from aspire_llm.engine.thread import EngineThread
from aspire_llm.errors import UserError
from aspire_llm.request import Request, RequestOutput, SamplingParams


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt that was checked: its n continuations, ready to run."""

    request_id: str
    prompt: str | None
    requests: list[Request]


class AsyncLLM:
    """An engine for asyncio. Options are those of `LLM`; on_step is called on the engine's thread after every step.

        llm = AsyncLLM("smollm2-135m")
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)  # all of it so far

    Leaving the loop early, or cancelling its task, aborts the request: it is in no step planned after that.
    """

    def __init__(
        self, model: str = "smollm2-135m", *, on_step: Callable[[Step], None] | None = None, **options: Any
    ) -> None:
        self._llm = LLM(model, **options)
        count = self._llm.metrics.on_step

        def after_step(step: Step) -> None:
            count(step)
            if on_step is not None:
                on_step(step)

        self._running: dict[str, OutputStream] = {}  # by request_id
        self._streams: dict[int, OutputStream] = {}  # by request key; the engine's thread looks its streams up here
        self._deliveries: WeakKeyDictionary[asyncio.AbstractEventLoop, Deliveries] = WeakKeyDictionary()
        self._thread = EngineThread(self._llm.engine, self._tell, after_step)

    def _tell(self, changed: Sequence[Request]) -> None:
        """What a step brought, to the readers' loops: one call for each loop. On the engine's thread."""
        by_stream: dict[OutputStream, list[Request]] = {}
        for request in changed:
            stream = self._streams.get(request.key)
            if stream is not None:  # else its reader has left
                by_stream.setdefault(stream, []).append(request)
        by_loop: dict[asyncio.AbstractEventLoop, tuple[Deliveries, list[tuple[OutputStream, News]]]] = {}
        for stream, requests in by_stream.items():
            news = stream.collect(requests)
            if news is not None:
                by_loop.setdefault(stream.loop, (stream.deliveries, []))[1].append((stream, news))
        for loop, (deliveries, batch) in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
                loop.call_soon_threadsafe(deliveries.put, batch)

    @property
    def config(self) -> EngineConfig:
        return self._llm.config

    @property
    def is_running(self) -> bool:
        """False after `shutdown` or a fatal error of the engine."""
        return self._thread.alive

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, if not `shutdown`."""
        return self._thread.failure

    @property
    def engine(self) -> Engine:
        """To be read, for metrics. Only its own thread may change it."""
        return self._llm.engine

    def get_tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output."""
        return self._llm.engine.scheduler.limits.max_model_len

    @property
    def inputs(self) -> InputProcessor:
        return self._llm.inputs

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms as they are now, under vLLM's names."""
        return self._llm.get_metrics()

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Raises UserError after the engine has stopped."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def reset() -> None:
            self._llm.reset_prefix_cache()
            loop.call_soon_threadsafe(done.set)

        self._thread.call(reset)
        await done.wait()

    def prepare(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> Prepared:
        """Tokenise and check a prompt, for `stream`. Starts nothing; may be called on any thread, one at a time.

        Raises UserError for a bad prompt or bad parameters.
        """
        params = sampling_params if sampling_params is not None else SamplingParams()
        requests = self._llm.inputs.requests(prompt, params, request_id)
        self._llm.engine.validate(requests)
        name = request_id if request_id is not None else requests[0].request_id.removesuffix("-0")
        return Prepared(name, prompt if isinstance(prompt, str) else None, requests)

    async def stream(self, prepared: Prepared, *, kind: OutputKind = "cumulative") -> AsyncGenerator[RequestOutput]:
        """Run what `prepare` made, once. As `generate`, with outputs of the given kind."""
        name, requests = prepared.request_id, prepared.requests
        if name in self._running:
            raise UserError(f"request_id {name!r} is in use", "request_id")
        loop = asyncio.get_running_loop()
        deliveries = self._deliveries.setdefault(loop, Deliveries())
        stream = OutputStream(name, prepared.prompt, requests, kind, loop, deliveries)
        self._running[name] = stream
        self._streams.update({request.key: stream for request in requests})
        try:
            self._thread.add(requests)
            finished = False
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            del self._running[name]
            for request in requests:
                del self._streams[request.key]
            self._thread.abort(requests)  # does nothing to finished ones

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Outputs of one prompt as they grow; the last has `finished` set. A slow reader skips to the newest.

        Raises UserError for a bad prompt, bad parameters, a request_id in use, and after the engine has stopped.
        """
        async with aclosing(self.stream(self.prepare(prompt, sampling_params, request_id))) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """As `generate`, of a conversation."""
        prompt = self._llm.inputs.chat_token_ids(messages, **(chat_template_kwargs or {}))
        async with aclosing(self.generate(prompt, sampling_params, request_id)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets what there is, with finish_reason 'abort'. Unknown ids are ignored."""
        if request_id in self._running:
            self._thread.abort(self._running[request_id].requests)

    def shutdown(self) -> None:
        """Abort everything that runs and stop the engine's thread."""
        self._thread.close()
