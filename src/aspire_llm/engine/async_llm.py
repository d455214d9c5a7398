"""`AsyncLLM`: many concurrent requests on one engine thread, read with `async for`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from aspire_llm.config import EngineConfig
from aspire_llm.engine.engine import Step
from aspire_llm.engine.inputs import Message, Prompt
from aspire_llm.engine.llm import LLM
from aspire_llm.engine.outputs import request_output
from aspire_llm.engine.thread import EngineThread
from aspire_llm.errors import UserError
from aspire_llm.request import Request, RequestOutput, SamplingParams


class AsyncLLM:
    """An engine for asyncio. Options are those of `LLM`; on_step is called on the engine's thread after every step.

        llm = AsyncLLM("smollm2-135m")
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)  # all of it so far

    Leaving the loop early, or cancelling its task, aborts the request within one engine step.
    """

    def __init__(
        self, model: str = "smollm2-135m", *, on_step: Callable[[Step], None] | None = None, **options: Any
    ) -> None:
        self._llm = LLM(model, **options)
        self._thread = EngineThread(self._llm.engine, on_step)
        self._running: dict[str, list[Request]] = {}

    @property
    def config(self) -> EngineConfig:
        return self._llm.config

    @property
    def is_running(self) -> bool:
        """False after `shutdown` or a fatal error of the engine."""
        return self._thread.alive

    def get_tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one prompt as they grow; the last has `finished` set. A slow reader skips to the newest.

        Raises UserError for a bad prompt, bad parameters, a request_id in use, and after the engine has stopped.
        """
        params = sampling_params if sampling_params is not None else SamplingParams()
        requests = self._llm.inputs.requests(prompt, params, request_id)
        name = request_id if request_id is not None else requests[0].request_id.removesuffix("-0")
        if name in self._running:
            raise UserError(f"request_id {name!r} is in use", "request_id")
        self._llm.engine.validate(requests)
        text = prompt if isinstance(prompt, str) else None
        newest: asyncio.Queue[RequestOutput] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(request: Request) -> None:  # on the engine's thread: a snapshot, since the request moves on
            loop.call_soon_threadsafe(newest.put_nowait, request_output(name, text, requests))

        self._running[name] = requests
        try:
            self._thread.add(requests, listen)
            finished = False
            while not finished:
                output = await newest.get()
                while not newest.empty():
                    output = newest.get_nowait()
                finished = output.finished
                yield output
        finally:
            del self._running[name]
            self._thread.abort(requests)  # does nothing to finished ones

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, of a conversation."""
        prompt = self._llm.inputs.chat_token_ids(messages, **(chat_template_kwargs or {}))
        async for output in self.generate(prompt, sampling_params, request_id):
            yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets what there is, with finish_reason 'abort'. Unknown ids are ignored."""
        if request_id in self._running:
            self._thread.abort(self._running[request_id])

    def shutdown(self) -> None:
        """Abort everything that runs and stop the engine's thread."""
        self._thread.close()
