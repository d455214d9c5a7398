"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.errors import UserError
from aspire_llm.request import CompletionOutput, RequestOutput, SamplingParams
from aspire_llm.serving.conversation import check_template_options, template_messages, template_of
from aspire_llm.serving.errors import ApiError, of_user_error
from aspire_llm.serving.generation import Generation, metrics, num_tokens, prepare, usage
from aspire_llm.serving.logprobs import TokenText, chat_logprobs, prompt_logprobs
from aspire_llm.serving.protocol import ChatRequest
from aspire_llm.serving.sse import DONE, EventStream, event, while_connected
from aspire_llm.serving.state import ServerState, end_turn, new_id, running_of, state_of
from aspire_llm.serving.tools import Call, Format, ToolCalls, ToolParser, find_format

router = APIRouter()


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    state = state_of(request)
    inputs = state.llm.inputs
    tokens = TokenText(inputs.token_bytes)
    state.check_model(body.model)
    template = template_of(inputs, with_tools=bool(body.tools))
    calls = ToolCalls(body, tool_format(state, template), template)
    params = chat_params(body, calls)
    places = state.take_places(params.n)
    try:
        running = running_of(request, "chatcmpl")
        prompt = await state.in_worker(chat_prompt, body, inputs, template, calls)
        generation = await prepare(state, [prompt], params, running)
    except BaseException:
        places.give_back()
        raise
    writer = ChatWriter(body, running.id, body.model or state.model_names[0], tokens, calls)
    if body.stream:
        return EventStream(writer.events(generation), places.give_back)

    end_turn(request)

    async def answer() -> Response:
        return JSONResponse(writer.whole((await generation.finals())[0]))

    try:
        return await while_connected(request, answer())
    finally:
        places.give_back()


def tool_format(state: ServerState, template: str) -> Format | None:
    choice = state.settings.tool_call_parser
    if choice == "auto":
        return find_format(template)
    return None if choice == "none" else choice


def chat_params(body: ChatRequest, calls: ToolCalls) -> SamplingParams:
    changes: dict[str, Any] = {"max_tokens": body.token_limit}
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    required = calls.structured_outputs()
    if required is not None:
        if body.structured_outputs is not None or body.response_format is not None:
            raise UserError("tool_choice asks for a call, and response_format for something else", "tool_choice")
        changes["structured_outputs"] = required
    return body.sampling_params(**changes)


def chat_prompt(body: ChatRequest, inputs: InputProcessor, template: str, calls: ToolCalls) -> list[int]:
    """Token ids of the conversation."""
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    check_template_options(inputs, options)
    options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        options["continue_final_message"] = True
    if (tools := calls.for_template()) is not None:
        options["tools"] = tools
    return inputs.chat_token_ids(template_messages(body.messages, template), **options)


@dataclass(slots=True)
class Choice:
    """One continuation on its way out."""

    parser: ToolParser | None
    calls: int = 0

    def events(self, output: CompletionOutput) -> list[str | Call]:
        """The pieces of text and the calls in what is new."""
        text = output.text
        if self.parser is None:
            return [text] if text else []
        events = self.parser.push(text)
        return events + self.parser.finish() if output.finish_reason is not None else events

    def finish_reason(self, output: CompletionOutput) -> str | None:
        return "tool_calls" if self.calls and output.finish_reason == "stop" else output.finish_reason

    def tool_call(self, call: Call) -> dict[str, Any]:
        self.calls += 1
        return {
            "id": new_id("call"),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


class ChatWriter:
    """Outputs as response bodies."""

    def __init__(self, body: ChatRequest, response_id: str, model: str, tokens: TokenText, calls: ToolCalls) -> None:
        self._body = body
        self._id = response_id
        self._model = model
        self._created = int(time.time())
        self._tokens = tokens
        self._calls = calls

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        made = {
            **self._head("chat.completion"),
            "choices": [self._whole_choice(choice) for choice in output.outputs],
            "usage": usage([output], num_tokens([output])),
            "metrics": metrics([output]),
        }
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(self._tokens, output.prompt_logprobs)
        return made

    def _whole_choice(self, output: CompletionOutput) -> dict[str, Any]:
        choice = Choice(self._calls.parser())
        events = choice.events(output)
        text = "".join(e for e in events if isinstance(e, str))
        calls = [choice.tool_call(e) for e in events if isinstance(e, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {
            "index": output.index,
            "message": message,
            "logprobs": chat_logprobs(self._tokens, output.logprobs) if output.logprobs is not None else None,
            "finish_reason": choice.finish_reason(output),
            "stop_reason": output.stop_reason,
        }

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        choices: dict[int, Choice] = {}
        last: RequestOutput | None = None
        tokens = 0
        try:
            async with aclosing(generation.outputs()) as outputs:
                async for _, output in outputs:
                    last = output
                    tokens += num_tokens([output])
                    for choice in self._chunks(choices, output):
                        yield event(self._chunk([choice], output, tokens))
            assert last is not None
            closing = {**self._chunk([], last, tokens), "metrics": metrics([last])}
            if self._body.include_usage:
                closing["usage"] = usage([last], tokens)
            if self._body.prompt_logprobs is not None:
                closing["prompt_logprobs"] = prompt_logprobs(self._tokens, last.prompt_logprobs)
            yield event(closing)
        except (ApiError, UserError) as error:
            yield event((error if isinstance(error, ApiError) else of_user_error(error)).body)
        yield DONE

    def _chunk(self, choices: Sequence[dict[str, Any]], output: RequestOutput, tokens: int) -> dict[str, Any]:
        chunk = {**self._head("chat.completion.chunk"), "choices": list(choices)}
        if self._body.usage_in_every_chunk:
            chunk["usage"] = usage([output], tokens)
        elif self._body.include_usage:
            chunk["usage"] = None
        return chunk

    def _chunks(self, choices: dict[int, Choice], output: RequestOutput) -> Iterator[dict[str, Any]]:
        """A chunk for each piece of news of each continuation."""
        for completion in output.outputs:
            choice = choices.get(completion.index)
            if choice is None:
                choice = choices[completion.index] = Choice(self._calls.parser())
                yield self._delta(completion, {"role": "assistant", "content": ""})
            deltas = [self._event_delta(choice, e) for e in choice.events(completion)]
            logprobs = completion.logprobs or []
            if logprobs and not deltas:
                deltas.append({"content": ""})
            for i, delta in enumerate(deltas):
                yield self._delta(
                    completion, delta, logprobs=chat_logprobs(self._tokens, logprobs) if logprobs and not i else None
                )
            if completion.finish_reason is not None:
                yield self._delta(completion, {}, choice.finish_reason(completion))

    def _event_delta(self, choice: Choice, piece: str | Call) -> dict[str, Any]:
        if isinstance(piece, str):
            return {"content": piece}
        index = choice.calls
        return {"tool_calls": [{"index": index, **choice.tool_call(piece)}]}

    def _delta(
        self,
        output: CompletionOutput,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        made = {"index": output.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**made, "stop_reason": output.stop_reason} if finish_reason is not None else made
