"""Bodies of requests: OpenAI's fields and vLLM's further ones. Every field has its effect; others are refused by name.

Ranges of sampling parameters are checked by `SamplingParams`, their one definition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from aspire_llm.errors import UserError, explain
from aspire_llm.request import SamplingParams, StructuredOutputsParams

MAX_DEPTH = 64  # of schemas and the like
MAX_TOP_LOGPROBS = 20


def _sound(value: Any) -> Any:
    """JSON of bounded depth, finite numbers and valid text."""
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper += item.keys()
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
            elif isinstance(item, str):
                _check_text(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise ValueError("JSON with finite numbers")
        if not deeper:
            return value
        level = deeper
    raise ValueError(f"nested at most {MAX_DEPTH} deep")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("valid Unicode text") from None


Json = Annotated[Any, AfterValidator(_sound)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_sound)]
TokenIds = list[int]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise UserError("response_format.json_schema must be given with type 'json_schema' only", "response_format")
        if self.json_schema is not None and self.json_schema.json_schema is None:
            raise UserError("response_format.json_schema.schema is missing", "response_format")
        return self

    def structured_outputs(self) -> StructuredOutputsParams | None:
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.json_schema is not None:
            return StructuredOutputsParams(json=self.json_schema.json_schema)
        return None


class Generate(Body):
    """What completions and chats have in common. None: the default of `SamplingParams`."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None  # a label of the caller's, with no effect on the output
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: int | None = None
    structured_outputs: JsonObject | None = None
    draft: bool | None = None  # ours; false: without speculation

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options does nothing without stream = true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_every_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """Raises UserError naming the parameter, its value and its range."""
        names = Generate.model_fields.keys() & SamplingParams.model_fields.keys()
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        given["structured_outputs"] = self._structured_outputs()
        return SamplingParams(**{**given, **changes})

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        from_format = self.response_format.structured_outputs() if self.response_format is not None else None
        if self.structured_outputs is None:
            return from_format
        if from_format is not None:
            raise UserError("structured_outputs and response_format exclude each other", "structured_outputs")
        known = {field.alias or name for name, field in StructuredOutputsParams.model_fields.items()}
        for name in self.structured_outputs:
            if name not in known:
                raise UserError(f"structured_outputs.{name} is unknown; known: {', '.join(sorted(known))}", name)
        try:
            return StructuredOutputsParams(**self.structured_outputs)
        except ValidationError as error:
            raise explain(error, StructuredOutputsParams) from None


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise UserError(f"logit_bias has key {key!r}: must be a token id", "logit_bias")
    return int(key)


class CompletionRequest(Generate):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UserError(
                f"best_of = {self.best_of}: must be n ({self.n or 1}); nothing ranks outputs here", "best_of"
            )
        return self

    def prompts(self) -> Sequence[str | list[int]]:
        """One or more; never none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise UserError("prompt is empty; at least 1 token is needed", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class FunctionCall(Body):
    name: str
    arguments: str | None = None  # JSON


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Part(Body):
    """A piece of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None

    model_config = ConfigDict(
        extra="allow", protected_namespaces=()
    )  # what other types carry, for the error to name them


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # what clients send back of an answer
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Generate):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool = True
    # accepted with the one value that holds here
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    # labels of the caller's
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise UserError(
                f"max_tokens = {self.max_tokens}: max_completion_tokens says {self.max_completion_tokens}", "max_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("top_logprobs does nothing without logprobs = true", "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise UserError("tool_choice needs tools", "tool_choice")
        if self.continue_final_message and self.add_generation_prompt:
            raise UserError("continue_final_message needs add_generation_prompt = false", "continue_final_message")
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            if name not in [tool.function.name for tool in self.tools or ()]:
                raise UserError(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    tools: list[Tool] | None = None
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise UserError("exactly one of prompt and messages must be given", "prompt")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class AbortRequest(Body):
    request_id: Annotated[str, Field(min_length=1)]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """What every answer with a status of 400 and above looks like."""

    error: ErrorDetail
