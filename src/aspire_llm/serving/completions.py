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
from aspire_llm.serving.generation import Cursor, Generation, metrics, prepare, usage
from aspire_llm.serving.logprobs import TokenText, completion_logprobs, prompt_logprobs
from aspire_llm.serving.protocol import CompletionRequest
from aspire_llm.serving.sse import DONE, EventStream, event, while_connected
from aspire_llm.serving.state import Running, end_turn, new_id, state_of, x_request_id

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
        running = Running(new_id("cmpl"), x_request_id(request))
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
        self._cursors: dict[tuple[int, int], Cursor] = {}
        self._echoed: set[tuple[int, int]] = set()

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(prompt, output, choice) for prompt, output in enumerate(outputs) for choice in output.outputs
        ]
        return {**self._head, "choices": choices, "usage": usage(outputs), "metrics": metrics(outputs)}

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        last: dict[int, RequestOutput] = {}
        try:
            async with aclosing(generation.outputs()) as outputs:
                async for prompt, output in outputs:
                    last[prompt] = output
                    for choice in output.outputs:
                        if self._has_news(prompt, choice):
                            yield event(self._chunk([self._choice(prompt, output, choice)], last))
            everything = [last[prompt] for prompt in sorted(last)]
            closing = {**self._head, "choices": [], "metrics": metrics(everything)}
            if self._body.include_usage:
                closing["usage"] = usage(everything)
            yield event(closing)
        except (ApiError, UserError) as error:
            yield event((error if isinstance(error, ApiError) else of_user_error(error)).body)
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]], last: dict[int, RequestOutput]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self._body.usage_in_every_chunk:
            chunk["usage"] = usage(list(last.values()))
        elif self._body.include_usage:
            chunk["usage"] = None
        return chunk

    def _cursor(self, prompt: int, choice: CompletionOutput) -> Cursor:
        return self._cursors.setdefault((prompt, choice.index), Cursor())

    def _has_news(self, prompt: int, choice: CompletionOutput) -> bool:
        cursor = self._cursor(prompt, choice)
        if cursor.ended:
            return False
        new_logprobs = self._body.logprobs is not None and len(choice.token_ids) > cursor.tokens
        return len(choice.text) > cursor.characters or new_logprobs or choice.finish_reason is not None

    def _choice(self, prompt: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """What is new of one continuation."""
        cursor = self._cursor(prompt, choice)
        text = cursor.text(choice)
        new = cursor.new_tokens(choice)
        cursor.ended = choice.finish_reason is not None
        token_ids = choice.token_ids[new]
        positions: list[TokenLogprobs | None] = list(choice.logprobs[new]) if choice.logprobs is not None else []
        echo = self._body.echo and (prompt, choice.index) not in self._echoed
        if echo:
            self._echoed.add((prompt, choice.index))
            text = (output.prompt if output.prompt is not None else self._text_of(output.prompt_token_ids)) + text
            token_ids = [*output.prompt_token_ids, *token_ids]
            positions = [*(output.prompt_logprobs or ()), *positions]
        offset = cursor.offset
        cursor.offset += sum(len(self._tokens.text(token_id)) for token_id in token_ids)
        made: dict[str, Any] = {
            "index": prompt * len(output.outputs) + choice.index,
            "text": text,
            "logprobs": completion_logprobs(self._tokens, positions, token_ids, offset)
            if self._body.logprobs is not None
            else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(self._tokens, output.prompt_logprobs)
        return made

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self._tokens.raw, token_ids)).decode("utf-8", "replace")
