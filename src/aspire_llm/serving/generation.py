"""From a request's prompts to their outputs: checking, running, time limits, errors. Endpoints put it into words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Self

from aspire_llm.engine.async_llm import Prepared
from aspire_llm.engine.inputs import Prompt
from aspire_llm.engine.outputs import speculative_decoding_metrics
from aspire_llm.engine.streams import OutputKind
from aspire_llm.errors import UserError
from aspire_llm.request import NO_TOKEN_LIMIT, RequestMetrics, RequestOutput, SamplingParams, SpeculationStats
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

    async def outputs(self, kind: OutputKind = "delta") -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, its next output), until all are finished. Raises ApiError."""
        llm = self._state.llm
        loop = asyncio.get_running_loop()
        timeout = self._state.settings.request_timeout
        deadline = loop.time() + timeout if timeout is not None else None
        with self._state.listed(self._running), Traces(self._state, self._running, self._prepared) as traces:
            streams = [llm.stream(prepared, kind=kind) for prepared in self._prepared]
            async with aclosing(merged(streams)) as outputs:
                while True:
                    try:
                        # around each wait only: between them the reader's own waiting must not be cut short
                        async with asyncio.timeout_at(deadline):
                            index, output = await anext(outputs)
                    except StopAsyncIteration:
                        return
                    except TimeoutError:
                        raise ApiError(504, f"not finished within request_timeout={timeout:g} s") from None
                    except UserError as error:
                        if llm.is_running:
                            raise
                        raise ApiError(503, str(error)) from None
                    traces.saw(index, output)
                    self._check(output)
                    yield index, output

    async def finals(self) -> list[RequestOutput]:
        """The finished outputs, in the order of the prompts."""
        last: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs("final_only")) as outputs:
            async for index, output in outputs:
                last[index] = output
        return [last[index] for index in range(len(self._prepared))]

    def _check(self, output: RequestOutput) -> None:
        if output.error is None:
            return
        logger.error("request %s failed: %s", self._running.id, output.error)
        status = 503 if self._state.failed else 500
        raise ApiError(status, f"the request failed in the engine: {output.error}")


class Traces:
    """Follows the outputs of an HTTP request's prompts, and records a span for each when it is over, however it ends."""

    def __init__(self, state: ServerState, running: Running, prepared: Sequence[Prepared]) -> None:
        self._state = state
        self._running = running
        self._prepared = prepared
        self._newest: dict[int, RequestOutput] = {}
        self._num_tokens = [0] * len(prepared)
        self._reasons: list[dict[int, str]] = [{} for _ in prepared]

    def saw(self, index: int, output: RequestOutput) -> None:
        """The next output of a prompt; it tells what is new."""
        if self._state.tracer is not None:
            self._newest[index] = output
            self._num_tokens[index] += num_tokens([output])
            self._reasons[index] |= {c.index: c.finish_reason for c in output.outputs if c.finish_reason is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        llm = self._state.attached
        if self._state.tracer is None or llm is None:
            return
        for index, prepared in enumerate(self._prepared):
            output = self._newest.get(index)
            params = prepared.requests[0].params
            reasons = [self._reasons[index].get(i, "abort") for i in range(params.n)]
            self._state.tracer.record(
                request_id=self._running.x_request_id,
                model=self._state.names_of(llm)[0],
                params=params,
                caller=self._running.caller,
                metrics=output.metrics if output is not None and output.metrics is not None else unstarted(prepared),
                prompt_tokens=len(prepared.requests[0].prompt_token_ids),
                completion_tokens=self._num_tokens[index],
                finish_reasons=reasons,
                error=output.error if output is not None else None,
            )


def unstarted(prepared: Prepared) -> RequestMetrics:
    """Of a prompt that brought nothing."""
    return RequestMetrics(
        arrival_time=prepared.requests[0].arrival,
        time_in_queue=0.0,
        time_to_first_token=0.0,
        time_per_output_token=0.0,
        num_cached_tokens=0,
        num_preemptions=0,
        steps={},
        speculative_decoding=speculative_decoding_metrics(SpeculationStats()),
    )


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of all streams, as they come. All streams are closed at the end, however it comes.

    A stream is read on when its output has been taken: what a slow reader leaves waits in the stream, put together.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    coming = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = coming.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                yield index, output
                coming[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


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


def usage(outputs: Sequence[RequestOutput], completion: int) -> dict[str, Any]:
    """outputs: one of each prompt. completion: tokens generated for all of them."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs if output.metrics is not None)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def num_tokens(outputs: Sequence[RequestOutput]) -> int:
    """Generated tokens in these outputs."""
    return sum(len(choice.token_ids) for output in outputs for choice in output.outputs)


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
