"""A request, what it asks for (`SamplingParams`) and what it gets (`RequestOutput`). Names as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from aspire_llm.errors import UserError, explain

FinishReason = Literal["stop", "length", "abort", "error"]
LogitsProcessor = Callable[..., Any]  # see SamplingParams.logits_processors


class RowKind(IntEnum):
    """What a request does in a step. Kinds differ only in which keys and values the row may see."""

    PREFILL = 0  # a chunk of known tokens, full attention
    DRAFT = 1  # one token, sparse attention
    VERIFY = 2  # the newest committed token and every pending draft, full attention


class StructuredOutputsParams(BaseModel):
    """What the output must look like; exactly one of the kinds. Names as in vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    json_schema: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None  # passed as `json`
    regex: str | None = None
    choice: Annotated[tuple[str, ...] | None, Field(min_length=1)] = None
    grammar: str | None = None  # Lark or GBNF (EBNF)
    json_object: bool | None = None  # any JSON object
    disable_any_whitespace: bool = False  # JSON kinds: no optional blanks

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, type(self)) from None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = {
            "json": self.json_schema is not None,
            "regex": self.regex is not None,
            "choice": self.choice is not None,
            "grammar": self.grammar is not None,
            "json_object": bool(self.json_object),
        }
        given = [kind for kind, is_given in kinds.items() if is_given]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise UserError(
                f"structured_outputs has {found}: must have exactly one of {', '.join(kinds)}", "structured_outputs"
            )
        return self


def _as_tuple(value: object) -> object:
    """One string or number where several are allowed."""
    return (value,) if isinstance(value, str | int) else value


def _max_tokens(value: object) -> object:
    return NO_TOKEN_LIMIT if value is None else value


NO_TOKEN_LIMIT = 2**31 - 1  # max_tokens=None: as many as the context holds
GREEDY_TEMPERATURE = 1e-5  # below this a temperature means greedy (as in vLLM)

TokenId = Annotated[int, Field(ge=0)]
NonEmpty = Annotated[str, Field(min_length=1)]


class SamplingParams(BaseModel):
    """How tokens are chosen and when to stop. Every field is honoured by every method and at every accepted token.

    Names, ranges and defaults as in vLLM; None means the default (for max_tokens: no limit but the context).
    Raises UserError naming the parameter, the value and the range.

    `logits_processors`: callables `f(output_token_ids, logits)` or `f(prompt_token_ids, output_token_ids, logits)`, the
    token ids as lists, the logits as a float32 tensor [vocabulary] that may be changed in place; they return the logits.
    Called for every drafted and every verified position, with the tokens (drafts included) before it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0.0)] = 1.0  # 0: greedy
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 or -1: off
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    max_tokens: Annotated[int, Field(ge=1), BeforeValidator(_max_tokens)] = 16
    min_tokens: Annotated[int, Field(ge=0)] = 0  # before these, neither end of text nor a stop token
    stop: Annotated[tuple[NonEmpty, ...], BeforeValidator(_as_tuple)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], BeforeValidator(_as_tuple)] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: Annotated[int | None, Field(ge=-1)] = None  # how many of the likeliest, besides the chosen one; -1: all
    prompt_logprobs: Annotated[int | None, Field(ge=-1)] = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0
    logit_bias: dict[TokenId, float] = Field(default_factory=dict)  # each in [-100, 100]
    bad_words: Annotated[tuple[NonEmpty, ...], BeforeValidator(_as_tuple)] = ()
    bad_words_token_ids: tuple[
        Annotated[tuple[TokenId, ...], Field(min_length=1)], ...
    ] = ()  # the engine's, of bad_words
    allowed_token_ids: Annotated[tuple[TokenId, ...] | None, Field(min_length=1)] = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    draft: bool = True  # False: this request is decoded without speculation

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, type(self)) from None

    @model_validator(mode="before")
    @classmethod
    def _none_is_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None or name == "max_tokens"}

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise UserError(f"logit_bias[{token}] = {bias:g}: must be in [-100, 100]", "logit_bias")
        if self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens = {self.min_tokens}: must be at most max_tokens ({self.max_tokens})", "min_tokens"
            )
        if self.n > 1 and self.greedy:
            raise UserError(f"n = {self.n}: must be 1 with temperature 0, where all outputs are the same", "n")
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the target distribution before temperature and masks (as vLLM reports them).

    token_id: the token that stands there; logprob: its log-probability; rank: 1 for the most likely;
    top: the most likely tokens, best first, as (token id, logprob).
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Detokenizer(Protocol):
    """Incremental text of one request: the concatenation of all deltas is the final text."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream(Protocol):
    """Text of one request as its tokens come, cut at the first stop string."""

    @property
    def text(self) -> str:
        """What is certain so far: text that may still become part of a stop string or character is held back."""
        ...

    def new_text(self) -> str:
        """What has been added to `text` since this was last asked for."""
        ...

    @property
    def seeks_stops(self) -> bool:
        """Whether there are stop strings, so that every token must be pushed."""
        ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens of which none is the last by what it is; only where no stop strings are sought."""
        ...

    def push(self, token_id: int, *, ends: bool, may_stop: bool) -> str | None:
        """Add one token; returns the stop string it completed, if any.

        ends: it is the last token (EOS or a stop token), and has no text of its own unless the request includes stops;
        may_stop: stop strings count from here on (min_tokens is reached).
        """
        ...

    def finish(self) -> None:
        """No more tokens: release what was held back."""
        ...


@dataclass(slots=True)
class SpeculationStats:
    """Counts of one request. A cycle is one verification; the accepted length counts the bonus token (vLLM's convention)."""

    num_cycles: int = 0  # verifications, those with no drafts included
    num_drafts: int = 0  # verifications that had drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # [i]: times draft i was accepted
    drafted_per_position: list[int] = field(default_factory=list)  # [i]: times draft i was verified
    steps: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "draft": 0, "verify": 0})
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache

    def record_cycle(self, drafted: int, accepted: int) -> None:
        self.num_cycles += 1
        if not drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        for counts, n in ((self.drafted_per_position, drafted), (self.accepted_per_position, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for i in range(n):
                counts[i] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts a cycle, over cycles that drafted; 1.0 where none did."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(slots=True, eq=False)  # a request is equal to itself alone, and found in a list without a look at its fields
class Request:
    """A request on its way through the engine. Only the scheduler writes it.

    Counters, not phases: `num_computed` positions hold exact K/V; `num_pending` drafts follow the newest token.
    Fields marked (late) count rows whose results have not come back; all are 0 when results are applied at once.
    """

    request_id: str
    key: int  # small integer, unique for the life of the engine
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int = 0
    arrival: float = 0.0
    eos_token_ids: frozenset[int] = frozenset()
    stream: TextStream | None = None  # None: no text is wanted

    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of every prompt token but the first

    slot: int | None = None  # device row while running
    epoch: int = 0  # grows with every admission, so that a late result can be told from a fresh one
    num_computed: int = 0
    num_pending: int = 0
    num_lookahead: int = 0  # (late) most tokens that verifications in flight may still commit
    num_in_flight: int = 0  # (late) steps that name this request
    num_prefilled: int = 0  # known tokens planned as prefill (or found in the cache) since admission
    prefill_end: int = 0  # tokens known at admission: prefill ends there
    num_reserved: int = 0  # positions that are known to have pages
    output_limit: int = 0  # most tokens of output, by its parameters and the engine's longest; set when it is queued
    draft_limit: int = 0  # most drafts it may have pending, while its output has room for them; set with it
    confidences: list[float] = field(default_factory=list)  # of the pending drafts whose results are known

    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def in_prefill(self) -> bool:
        return self.num_prefilled < self.prefill_end

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Known tokens at positions [start, end), without a look at the others."""
        n = len(self.prompt_token_ids)
        if start >= n:
            return self.output_token_ids[start - n : end - n]
        return self.prompt_token_ids[start:end] + self.output_token_ids[: max(0, end - n)]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds; speculation counts of this request."""

    arrival_time: float
    time_in_queue: float
    time_to_first_token: float
    time_per_output_token: float  # after the first; 0.0 for one token
    num_cached_tokens: int
    num_preemptions: int
    steps: dict[str, int]  # rows by kind: prefill, draft, verify
    speculative_decoding: dict[str, Any]  # the shape AIPerf reads: see `speculative_decoding_metrics`


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt. finish_reason: None while it runs."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None  # the stop token or stop string that ended it


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its n continuations, as far as they have come."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None for the first token
    metrics: RequestMetrics | None = None
    error: str | None = None
