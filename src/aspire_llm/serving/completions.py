"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from aspire_llm.errors import UserError
from aspire_llm.request import CompletionOutput, RequestOutput, TokenLogprobs
from aspire_llm.serving.errors import ApiError, of_user_error
from aspire_llm.serving.generation import Generation, metrics, num_tokens, prepare, usage
from aspire_llm.serving.logprobs import TokenText, completion_logprobs, prompt_logprobs
from aspire_llm.serving.protocol import CompletionRequest
from aspire_llm.serving.sse import DONE, EventStream, event, while_connected
from aspire_llm.serving.state import end_turn, running_of, state_of

router = APIRouter()


@router.post("/v1/completions", summary="Continue a text")
async def completions(body: CompletionRequest, request: Request) -> Response:
    state = state_of(request)
    tokens = TokenText(state.llm.inputs.token_bytes)
    state.check_model(body.model)
    prompts = body.prompts()
    asks_prompt_logprobs = body.echo and body.logprobs is not None
    params = body.sampling_params(
        logprobs=body.logprobs, **({"prompt_logprobs": body.logprobs} if asks_prompt_logprobs else {})
    )
    places = state.take_places(params.n * len(prompts))
    try:
        running = running_of(request, "cmpl")
        generation = await prepare(state, prompts, params, running)
    except BaseException:
        places.give_back()
        raise
    writer = CompletionWriter(body, running.id, body.model or state.model_names[0], tokens)
    if body.stream:
        return EventStream(writer.events(generation), places.give_back)

    end_turn(request)

    async def answer() -> Response:
        return JSONResponse(writer.whole(await generation.finals()))

    try:
        return await while_connected(request, answer())
    finally:
        places.give_back()


class CompletionWriter:
    """Outputs as response bodies."""

    def __init__(self, body: CompletionRequest, response_id: str, model: str, tokens: TokenText) -> None:
        self._body = body
        self._tokens = tokens
        self._head = {"id": response_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._offsets: dict[tuple[int, int], int] = {}  # by prompt and continuation: characters of the tokens sent
        self._echoed: set[tuple[int, int]] = set()

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(prompt, output, choice) for prompt, output in enumerate(outputs) for choice in output.outputs
        ]
        return {
            **self._head,
            "choices": choices,
            "usage": usage(outputs, num_tokens(outputs)),
            "metrics": metrics(outputs),
        }

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        last: dict[int, RequestOutput] = {}
        tokens = 0
        try:
            async with aclosing(generation.outputs()) as outputs:
                async for prompt, output in outputs:
                    last[prompt] = output
                    tokens += num_tokens([output])
                    for choice in output.outputs:
                        if self._has_news(choice):
                            yield event(self._chunk([self._choice(prompt, output, choice)], last, tokens))
            everything = [last[prompt] for prompt in sorted(last)]
            closing = {**self._head, "choices": [], "metrics": metrics(everything)}
            if self._body.include_usage:
                closing["usage"] = usage(everything, tokens)
            yield event(closing)
        except (ApiError, UserError) as error:
            yield event((error if isinstance(error, ApiError) else of_user_error(error)).body)
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]], last: dict[int, RequestOutput], tokens: int) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self._body.usage_in_every_chunk:
            chunk["usage"] = usage(list(last.values()), tokens)
        elif self._body.include_usage:
            chunk["usage"] = None
        return chunk

    def _has_news(self, choice: CompletionOutput) -> bool:
        new_logprobs = self._body.logprobs is not None and bool(choice.token_ids)
        return bool(choice.text) or new_logprobs or choice.finish_reason is not None

    def _choice(self, prompt: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """What is new of one continuation. Without log-probabilities nothing depends on where tokens begin."""
        place = prompt, choice.index
        text, token_ids = choice.text, choice.token_ids
        positions: list[TokenLogprobs | None] = list(choice.logprobs) if choice.logprobs is not None else []
        echo = self._body.echo and place not in self._echoed
        if echo:
            self._echoed.add(place)
            text = (output.prompt if output.prompt is not None else self._text_of(output.prompt_token_ids)) + text
            token_ids = [*output.prompt_token_ids, *token_ids]
            positions = [*(output.prompt_logprobs or ()), *positions]
        logprobs = None
        if self._body.logprobs is not None:
            offset = self._offsets.get(place, 0)
            logprobs = completion_logprobs(self._tokens, positions, token_ids, offset)
            self._offsets[place] = offset + sum(len(self._tokens.text(token_id)) for token_id in token_ids)
        made: dict[str, Any] = {
            "index": prompt * (self._body.n or 1) + choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(self._tokens, output.prompt_logprobs)
        return made

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self._tokens.raw, token_ids)).decode("utf-8", "replace")
