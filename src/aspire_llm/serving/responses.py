"""POST /v1/responses: OpenAI's newer form of a chat. Nothing is stored, so every request carries its whole conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from aspire_llm.errors import UserError
from aspire_llm.request import RequestOutput
from aspire_llm.serving.chat import Choice, chat_params, chat_prompt, tool_format
from aspire_llm.serving.conversation import template_of
from aspire_llm.serving.errors import ApiError, of_user_error
from aspire_llm.serving.generation import Generation, metrics, num_tokens, prepare
from aspire_llm.serving.protocol import Body, ChatRequest, JsonObject
from aspire_llm.serving.sse import EventStream, event, while_connected
from aspire_llm.serving.state import end_turn, new_id, running_of, state_of
from aspire_llm.serving.tools import Call, ToolCalls

router = APIRouter()

Item = dict[str, Any]


class InputPart(Body):
    type: Literal["input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class InputItem(Body):
    """A message, a call that the model made, or what the call gave."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | None = None
    # what clients send back of an answer
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def message(self) -> dict[str, Any]:
        """As a chat has it."""
        if self.type == "function_call":
            function = {"name": self.name or "", "arguments": self.arguments}
            call = {"id": self.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "tool_call_id": self.call_id, "content": self.output or ""}
        if self.role is None:
            raise UserError("input: a message must have a role", "input")
        if isinstance(self.content, list):
            return {"role": self.role, "content": "".join(part.text or part.refusal or "" for part in self.content)}
        return {"role": self.role, "content": self.content or ""}


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedTool(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None


class ResponsesRequest(Body):
    """What holds for one stateless answer in text and function calls."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    # accepted with the one value that holds here
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # labels of the caller's
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _is_a_chat(self) -> Self:
        if not self.input:
            raise UserError("input is empty; at least 1 token is needed", "input")
        self.as_chat()
        return self

    def as_chat(self) -> ChatRequest:
        """The same as a chat. Raises UserError."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages += [item.message() for item in items]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        return ChatRequest.model_validate(
            {
                "messages": messages,
                "max_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tools": [tool.as_chat() for tool in self.tools] if self.tools else None,
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": self._response_format(),
            }
        )

    def _response_format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": wanted.name or "schema", "schema": wanted.schema_}}


@router.post("/v1/responses", summary="Answer a conversation, in OpenAI's newer form")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    state = state_of(request)
    chat = body.as_chat()
    inputs = state.llm.inputs
    state.check_model(body.model)
    template = template_of(inputs, with_tools=bool(chat.tools))
    calls = ToolCalls(chat, tool_format(state, template), template)
    params = chat_params(chat, calls)
    places = state.take_places(1)
    try:
        running = running_of(request, "resp")
        prompt = await state.in_worker(chat_prompt, chat, inputs, template, calls)
        generation = await prepare(state, [prompt], params, running)
    except BaseException:
        places.give_back()
        raise
    writer = ResponseWriter(body, running.id, body.model or state.model_names[0], calls)
    if body.stream:
        return EventStream(writer.events(generation), places.give_back)
    end_turn(request)

    async def answer() -> Response:
        [output] = await generation.finals()
        for _ in writer.push(output):
            pass
        return JSONResponse(writer.response(output))

    try:
        return await while_connected(request, answer())
    finally:
        places.give_back()


class ResponseWriter:
    """Builds the items of a response as its output comes, and says so in events."""

    def __init__(self, body: ResponsesRequest, response_id: str, model: str, calls: ToolCalls) -> None:
        self._body = body
        self._id = response_id
        self._model = model
        self._created = int(time.time())
        self._choice = Choice(calls.parser())
        self._items: list[Item] = []
        self._text: list[str] | None = None  # of the message that is open
        self._num_events = 0
        self._num_tokens = 0

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        last: RequestOutput | None = None
        yield self._event("response.created", response=self.response(None))
        yield self._event("response.in_progress", response=self.response(None))
        try:
            async with aclosing(generation.outputs()) as outputs:
                async for _, output in outputs:
                    last = output
                    for text in self.push(output):
                        yield text
            assert last is not None
            made = self.response(last)
            yield self._event(f"response.{made['status']}", response=made)
        except (ApiError, UserError) as error:
            fault = error if isinstance(error, ApiError) else of_user_error(error)
            yield self._event("error", code=fault.code, message=fault.message, param=fault.param)

    def push(self, output: RequestOutput) -> Iterator[str]:
        """Take in what is new, as events."""
        self._num_tokens += num_tokens([output])
        for new in output.outputs:
            for piece in self._choice.events(new):
                if isinstance(piece, Call):
                    yield from self._close()
                    yield from self._call(piece)
                else:
                    yield from self._write(piece)
            if new.finish_reason is not None:
                yield from self._close()

    def _write(self, text: str) -> Iterator[str]:
        if self._text is None:
            self._text = []
            item = {"id": new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}
            self._items.append(item)
            yield self._item_event("added")
            yield self._part_event("response.content_part.added", part=part(""))
        self._text.append(text)
        yield self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def _close(self) -> Iterator[str]:
        if self._text is None:
            return
        text, self._text = "".join(self._text), None
        yield self._part_event("response.output_text.done", text=text, logprobs=[])
        yield self._part_event("response.content_part.done", part=part(text))
        self._items[-1] |= {"status": "completed", "content": [part(text)]}
        yield self._item_event("done")

    def _call(self, call: Call) -> Iterator[str]:
        item = {"id": new_id("fc"), "type": "function_call", "call_id": new_id("call"), "name": call.name}
        self._items.append({**item, "arguments": "", "status": "in_progress"})
        yield self._item_event("added")
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        self._items[-1] |= {"arguments": call.arguments, "status": "completed"}
        yield self._item_event("done")

    def _item_event(self, what: str) -> str:
        return self._event(f"response.output_item.{what}", output_index=len(self._items) - 1, item=self._items[-1])

    def _part_event(self, kind: str, **more: Any) -> str:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, **place, **more)

    def _event(self, kind: str, **more: Any) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        return f"event: {kind}\n" + event({"type": kind, "sequence_number": number, **more})

    def response(self, output: RequestOutput | None) -> dict[str, Any]:
        """The response as it is; output: the last one, None while there is more to come."""
        body = self._body
        choice: Any = body.tool_choice
        made: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature if body.temperature is not None else 1.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": body.top_p if body.top_p is not None else 1.0,
            "truncation": "disabled",
            "usage": None,
        }
        if body.text is not None and body.text.format is not None:
            made["text"] = {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
        if output is None:
            return made
        reasons = [new.finish_reason for new in output.outputs]
        made["status"] = "incomplete" if "length" in reasons or "abort" in reasons else "completed"
        if made["status"] == "incomplete":
            made["incomplete_details"] = {"reason": "max_output_tokens"} if "length" in reasons else None
            if self._items and self._items[-1]["type"] == "message":
                self._items[-1]["status"] = "incomplete"
        prompt = len(output.prompt_token_ids)
        cached = output.metrics.num_cached_tokens if output.metrics is not None else 0
        made["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + self._num_tokens,
        }
        made["metrics"] = metrics([output])
        return made


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
