"""POST /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from aspire_llm.errors import UserError
from aspire_llm.serving.chat import tool_format
from aspire_llm.serving.conversation import check_template_options, template_messages, template_of
from aspire_llm.serving.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from aspire_llm.serving.state import ServerState, state_of
from aspire_llm.serving.tools import ToolCalls

router = APIRouter()


@router.post("/tokenize", summary="Tokens of a text or a conversation")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    state = state_of(request)
    state.check_model(body.model)
    token_ids = await state.in_worker(token_ids_of, body, state)
    made: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": state.llm.max_model_len,
        "tokens": token_ids,
    }
    table = state.llm.inputs.token_bytes
    made["token_strs"] = (
        [table[token].decode("utf-8", "replace") for token in token_ids] if body.return_token_strs else None
    )
    return made


@router.post("/detokenize", summary="Text of tokens")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    state = state_of(request)
    state.check_model(body.model)
    inputs = state.llm.inputs
    table = inputs.token_bytes
    if body.tokens:
        inputs.token_ids(body.tokens)  # refuses those outside the vocabulary
    return {"prompt": b"".join(table[token] for token in body.tokens).decode("utf-8", "replace")}


def token_ids_of(body: TokenizeRequest, state: ServerState) -> list[int]:
    inputs = state.llm.inputs
    if body.messages is not None:
        template = template_of(inputs, with_tools=bool(body.tools))
        chat = ChatRequest(messages=body.messages, tools=body.tools)
        calls = ToolCalls(chat, tool_format(state, template), template)
        options = dict(body.chat_template_kwargs or {})
        check_template_options(inputs, options)
        options["add_generation_prompt"] = body.add_generation_prompt
        if (tools := calls.for_template()) is not None:
            options["tools"] = tools
        return inputs.chat_token_ids(template_messages(body.messages, template), **options)
    if body.tools is not None or body.chat_template_kwargs is not None:
        raise UserError("tools and chat_template_kwargs do nothing without messages", "messages")
    text = body.prompt or ""
    if not text:
        return []
    if not body.add_special_tokens:
        return inputs.token_bytes.encode(text)
    return inputs.token_ids(text)
