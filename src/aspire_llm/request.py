"""A request, what it asks for (`SamplingParams`) and what it gets (`RequestOutput`). Names as in vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort", "error"]
LogitsProcessor = Callable[[list[int], Any], Any]  # (token ids so far, logits [vocab]) -> logits [vocab]


class RowKind(IntEnum):
    """What a request does in a step. Kinds differ only in which keys and values the row may see."""

    PREFILL = 0  # a chunk of known tokens, full attention
    DRAFT = 1  # one token, sparse attention
    VERIFY = 2  # the newest committed token and every pending draft, full attention


class SamplingParams(BaseModel):
    """How tokens are chosen and when to stop. Every field is honoured by every method and at every accepted token."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    draft: bool = True


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


@dataclass(slots=True)
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
    detokenizer: Detokenizer | None = None

    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""

    slot: int | None = None  # device row while running
    epoch: int = 0  # grows with every admission, so that a late result can be told from a fresh one
    num_computed: int = 0
    num_pending: int = 0
    num_lookahead: int = 0  # (late) most tokens that verifications in flight may still commit
    num_in_flight: int = 0  # (late) steps that name this request
    prefilled: bool = False  # all known tokens have been planned as prefill (or found in the cache)
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
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None  # the stop token or stop string that ended it


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs] | None = None
    metrics: RequestMetrics | None = None
    error: str | None = None
