"""From the messages of a chat request to what the model's chat template takes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.errors import UserError
from aspire_llm.serving.protocol import ChatMessage

TEMPLATE_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


def template_of(inputs: InputProcessor, *, with_tools: bool = False) -> str:
    """The text of the chat template. Raises UserError where the model has none."""
    if inputs.tokenizer is None or getattr(inputs.tokenizer, "chat_template", None) is None:
        raise UserError("this model has no chat template; use /v1/completions", "messages")
    template: str = inputs.tokenizer.get_chat_template(None, tools=[{}] if with_tools else None)
    return template


def check_template_options(inputs: InputProcessor, options: dict[str, Any]) -> None:
    """A template takes any name in silence: refuse those it does not use, and those that are not the caller's."""
    if not options:
        return
    template = template_of(inputs)
    ours = TEMPLATE_VARIABLES | inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    for name in options:
        if name in ours or not name.isidentifier() or not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(
                f"chat_template_kwargs.{name}: this chat template has no such option", "chat_template_kwargs"
            )


def template_messages(messages: Sequence[ChatMessage], template: str) -> list[dict[str, Any]]:
    """Raises UserError for content that is not text."""
    made = []
    for index, message in enumerate(messages):
        entry: dict[str, Any] = {"role": message.role, "content": _text(message, f"messages.{index}.content")}
        if message.role == "developer" and "developer" not in template:
            entry["role"] = "system"  # OpenAI's newer name for it
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(message, name) is not None:
                entry[name] = getattr(message, name)
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    **({"id": call.id} if call.id is not None else {}),
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments, f"messages.{index}.tool_calls"),
                    },
                }
                for call in message.tool_calls
            ]
        made.append(entry)
    return made


def _text(message: ChatMessage, where: str) -> str:
    if message.content is None:
        if message.tool_calls or message.role == "assistant":
            return ""
        raise UserError(f"{where} is missing", where)
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal") or text is None:
            raise UserError(
                f"{where} has a part of type {part.type!r}: must be text; this engine reads nothing else", where
            )
        texts.append(text)
    return "".join(texts)


def _arguments(text: str | None, where: str) -> Any:
    """Templates write the arguments out as an object."""
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):
        raise UserError(f"{where}: the arguments must be JSON", where) from None
