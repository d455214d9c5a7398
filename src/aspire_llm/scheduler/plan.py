"""What one step does: plain data that the scheduler writes and the runner reads. Nothing here changes after it is made.

(Rows and their results are not frozen all the same: there is one a request and step, and making a frozen one takes Python
five times as long.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aspire_llm.request import RowKind, SamplingParams, TokenLogprobs

NO_POSITION = 2**31 - 1  # past every position


@dataclass(slots=True)
class Row:
    """One request's part of a step.

    Positions of DRAFT and VERIFY rows are not given: they follow from the slot's counters on the device, which the host
    may learn one step late. Token counts are always known to the host.
    """

    slot: int  # the device row that holds the request's state
    epoch: int  # which tenant of the slot is meant; a result with another epoch is stale
    kind: RowKind
    num_tokens: int  # tokens in the forward: PREFILL its chunk, DRAFT 1, VERIFY 1 + pending drafts
    start: int = 0  # PREFILL only: position of the chunk's first token
    reach: int = NO_POSITION  # no token of the row stands at or past this position
    samples: bool = True  # False for every prefill chunk but the last: no logits, no token


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a slot (first admission, or return after preemption)."""

    slot: int
    epoch: int
    seed: int  # of this request's random numbers
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]  # tokens generated before a preemption, else empty
    num_computed: int  # prefix found in the cache, already exact
    params: SamplingParams
    eos_token_ids: frozenset[int]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.output_token_ids


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Entries of a slot's page table, written before the forward."""

    slot: int
    first: int  # index in the slot's page table of pages[0]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    page_writes: tuple[PageWrite, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([row.num_tokens for row in self.rows])

    @property
    def takes_prompts(self) -> bool:
        """Whether anything of a prompt is in the step; PREFILL rows stand last."""
        return bool(self.admissions) or (bool(self.rows) and self.rows[-1].kind is RowKind.PREFILL)


@dataclass(slots=True)
class RowResult:
    """What a row produced. `token_ids`: VERIFY the accepted drafts and one more; PREFILL the first token (if it samples);
    DRAFT the drafted token."""

    slot: int
    epoch: int
    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0  # VERIFY: drafts accepted; always len(token_ids) - 1
    confidence: float = 0.0  # DRAFT: top-1 probability of the distribution the draft was taken from
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, where asked for
    prompt_logprobs: tuple[
        TokenLogprobs, ...
    ] = ()  # PREFILL, where asked for: of the chunk's tokens given those before
    error: str | None = None  # this request failed (say, its logits processor raised); the others did not


@dataclass(frozen=True, slots=True)
class StepResult:
    rows: tuple[RowResult, ...]
    seconds: float = 0.0  # the forward and everything after it on the device
    kv_tokens_read: dict[RowKind, int] = field(default_factory=dict)  # sum over rows and layers, as the backend counted
    num_layers: int = 1
    checked_kv_tokens: int = 0  # of them, by verifications of drafts
    host_seconds: float = 0.0  # as `StepLoad.host_seconds`

    @property
    def mean_checked_kv(self) -> float:
        """As `StepLoad.checked_kv`."""
        return self.checked_kv_tokens / self.num_layers

    @property
    def mean_kv_tokens(self) -> float:
        """KV tokens read, summed over rows, mean over layers: what a cost model counts."""
        return sum(self.kv_tokens_read.values()) / self.num_layers
