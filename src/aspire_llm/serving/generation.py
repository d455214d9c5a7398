"""From a request's prompts to their outputs: checking, running, time limits, errors. Endpoints put it into words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from aspire_llm.engine.async_llm import Prepared
from aspire_llm.engine.inputs import Prompt
from aspire_llm.errors import UserError
from aspire_llm.request import NO_TOKEN_LIMIT, CompletionOutput, RequestOutput, SamplingParams
from aspire_llm.serving.errors import ApiError
from aspire_llm.serving.state import Running, ServerState

logger = logging.getLogger("aspire_llm.serving")


class Generation:
    """The prompts of one HTTP request."""

    def __init__(self, state: ServerState, running: Running, prepared: Sequence[Prepared]) -> None:
        self._state = state
        self._running = running
        self._prepared = prepared
        running.engine_ids = [p.request_id for p in prepared]

    async def outputs(self, *, final_only: bool = False) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, its newest output), until all are finished. Raises ApiError."""
        llm = self._state.llm
        loop = asyncio.get_running_loop()
        timeout = self._state.settings.request_timeout
        deadline = loop.time() + timeout if timeout is not None else None
        with self._state.listed(self._running):
            streams = [llm.stream(prepared, final_only=final_only) for prepared in self._prepared]
            async with aclosing(merged(streams)) as newest:
                while True:
                    try:
                        # around each wait only: between them the reader's own waiting must not be cut short
                        async with asyncio.timeout_at(deadline):
                            index, output = await anext(newest)
                    except StopAsyncIteration:
                        return
                    except TimeoutError:
                        raise ApiError(504, f"not finished within request_timeout={timeout:g} s") from None
                    except UserError as error:
                        if llm.is_running:
                            raise
                        raise ApiError(503, str(error)) from None
                    self._check(output)
                    yield index, output

    async def finals(self) -> list[RequestOutput]:
        """The finished outputs, in the order of the prompts."""
        last: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs(final_only=True)) as outputs:
            async for index, output in outputs:
                last[index] = output
        return [last[index] for index in range(len(self._prepared))]

    def _check(self, output: RequestOutput) -> None:
        if output.error is None:
            return
        logger.error("request %s failed: %s", self._running.id, output.error)
        status = 503 if self._state.failed else 500
        raise ApiError(status, f"the request failed in the engine: {output.error}")


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The newest output of each stream, as they come. All streams are closed at the end, however it comes."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    newest: dict[int, RequestOutput] = {}
    changed = asyncio.Event()

    async def follow(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        async with aclosing(stream):
            async for output in stream:
                newest[index] = output
                changed.set()

    tasks = [asyncio.create_task(follow(index, stream)) for index, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(lambda _: changed.set())
    try:
        while newest or not all(task.done() for task in tasks):
            if not newest:
                await changed.wait()
            changed.clear()
            for task in tasks:
                if task.done():
                    task.result()
            while newest:
                index = next(iter(newest))
                yield index, newest.pop(index)
        for task in tasks:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def prepare(
    state: ServerState, prompts: Sequence[Prompt], params: SamplingParams, running: Running
) -> Generation:
    """Check every prompt before any is started. Raises UserError and ApiError."""
    prepared = [
        await state.in_worker(state.llm.prepare, prompt, params, f"{running.id}-{index}")
        for index, prompt in enumerate(prompts)
    ]
    for one in prepared:
        check_length(state, len(one.requests[0].prompt_token_ids), params)
    return Generation(state, running, prepared)


def check_length(state: ServerState, prompt_tokens: int, params: SamplingParams) -> None:
    longest = state.settings.max_prompt_tokens
    if longest is not None and prompt_tokens > longest:
        raise ApiError(
            400,
            f"prompt has {prompt_tokens} tokens; max_prompt_tokens={longest}",
            param="prompt",
            code="context_length_exceeded",
        )
    room = state.llm.max_model_len - prompt_tokens
    if params.max_tokens != NO_TOKEN_LIMIT and params.max_tokens > room:
        raise ApiError(
            400,
            f"max_tokens = {params.max_tokens}: after a prompt of {prompt_tokens} tokens "
            f"max_model_len={state.llm.max_model_len} leaves {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )


class Cursor:
    """How much of one continuation has been sent."""

    def __init__(self) -> None:
        self.characters = 0
        self.tokens = 0
        self.offset = 0  # characters of the tokens sent
        self.ended = False

    def text(self, output: CompletionOutput) -> str:
        """What is new of the text."""
        start, self.characters = self.characters, len(output.text)
        return output.text[start:]

    def new_tokens(self, output: CompletionOutput) -> slice:
        start, self.tokens = self.tokens, len(output.token_ids)
        return slice(start, self.tokens)


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs if output.metrics is not None)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def metrics(outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
    """Times and speculation of one prompt; of several, the speculation of all."""
    known = [output.metrics for output in outputs if output.metrics is not None]
    if len(known) == 1:
        return {name: value for name, value in asdict(known[0]).items() if name != "arrival_time"}
    return {"speculative_decoding": _summed([one.speculative_decoding for one in known])} if known else None


def _summed(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    steps, drafted, accepted = (
        sum(one[name] for one in each) for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    longest = max(len(one["acceptance_histogram"]) for one in each)
    return {
        "mean_acceptance_length": 1.0 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [
            sum(one["acceptance_histogram"][i] for one in each if i < len(one["acceptance_histogram"]))
            for i in range(longest)
        ],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max(one["num_spec_tokens"] for one in each),
    }
