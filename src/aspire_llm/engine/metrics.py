"""What an engine has done and is doing, as numbers: `EngineMetrics`, fed after every step. Names as in vLLM where they mean
the same, and under `aspire:` where they are ours. Nothing here knows Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from aspire_llm.engine.engine import Step
from aspire_llm.policy.base import Priced
from aspire_llm.policy.cost import CostModel
from aspire_llm.request import Request, RowKind
from aspire_llm.scheduler.plan import StepPlan
from aspire_llm.scheduler.scheduler import Progress, Scheduler

Labels = dict[str, str]

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
PER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LENGTH_BUCKETS = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)
PRICE = "Tokens that a second of a request's time must bring for one more draft; mean over the requests."
RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
DRAFT_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """name: as Prometheus has it, counters without their `_total`."""

    name: str
    help: str
    labels: Labels


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Never falls."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters by position, from 0."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """buckets: observations up to each bound, the last one "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass(slots=True)
class _Counts:
    """A histogram being filled."""

    name: str
    help: str
    bounds: Sequence[float]
    sum: float = 0.0
    counts: list[int] = field(default_factory=list)  # of each bucket alone, the last one open

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def read(self) -> Histogram:
        buckets, total = {}, 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets[bound] = total
        return Histogram(self.name, self.help, {}, total, self.sum, buckets)


class EngineMetrics:
    """Counts one engine's work. `on_step` is for the engine's thread, `snapshot` for any; times are in seconds."""

    def __init__(
        self, scheduler: Scheduler, cost: CostModel | None, *, prefix_caching: bool, num_refresh_layers: int = 0
    ) -> None:
        """num_refresh_layers: layers that read everything in DRAFT rows too."""
        self._scheduler = scheduler
        self._num_refresh_layers = num_refresh_layers
        self._cost = cost  # None: the policy predicts no step times
        self._prefix_caching = prefix_caching
        self._lock = threading.Lock()
        self._prompt_tokens = self._generation_tokens = 0
        self._prefix_queries = self._prefix_hits = 0
        self._drafts = self._draft_tokens = self._accepted_tokens = 0
        self._accepted_per_position: list[int] = []
        self._steps = 0
        self._measured = self._predicted = 0.0
        self._refresh_tokens = self._refresh_predicted = 0.0
        self._price: float | None = None  # None: the policy has none
        self._priced = scheduler.policy if isinstance(scheduler.policy, Priced) else None
        self._rows = dict.fromkeys(RowKind, 0)
        self._row_tokens = dict.fromkeys(RowKind, 0)
        self._kv_tokens = dict.fromkeys(RowKind, 0.0)
        self._first_token = _Counts(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS
        )
        self._per_token = _Counts(
            "vllm:time_per_output_token_seconds",
            "Time of each token after the first; tokens that came together share theirs evenly.",
            PER_TOKEN_BUCKETS,
        )
        self._per_chunk = _Counts(
            "vllm:inter_token_latency_seconds",
            "Time between chunks of tokens: one observation a chunk, however many tokens it has.",
            PER_TOKEN_BUCKETS,
        )
        self._latency = _Counts("vllm:e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_BUCKETS)
        self._queue = _Counts("vllm:request_queue_time_seconds", "From arrival to the first step.", REQUEST_BUCKETS)
        self._prefill = _Counts(
            "vllm:request_prefill_time_seconds", "From the first step to the first token.", REQUEST_BUCKETS
        )
        self._decode = _Counts("vllm:request_decode_time_seconds", "From the first token to the last.", REQUEST_BUCKETS)
        self._prompt_length = _Counts("vllm:request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS)
        self._output_length = _Counts(
            "vllm:request_generation_tokens", "Generated tokens of a request.", LENGTH_BUCKETS
        )
        self._draft_length = _Counts("aspire:draft_length", "Drafts of a verification, none included.", DRAFT_BUCKETS)
        self._step_time = _Counts("aspire:step_seconds", "Time of a step, as measured.", STEP_BUCKETS)
        self._residual = _Counts(
            "aspire:step_predicted_ratio",
            "What the cost model said of a step over what it took: 1 is right.",
            RATIO_BUCKETS,
        )

    def on_step(self, step: Step) -> None:
        """Count a step that was applied."""
        if step.plan is None:
            return
        with self._lock:
            self._steps += 1
            self._count_rows(step.plan)
            if step.result is not None:
                for kind, tokens in step.result.kv_tokens_read.items():
                    self._kv_tokens[kind] += tokens / step.result.num_layers
                self._count_refresh(step.plan, step.result.num_layers)
                if step.result.seconds > 0.0:
                    self._step_time.add(step.result.seconds)
                    if self._cost is not None:
                        self._measured += step.result.seconds
                        self._predicted += self._cost.last_prediction
                        self._residual.add(self._cost.last_prediction / step.result.seconds)
            for progress in step.progress:
                self._count(progress)
            if self._priced is not None:
                self._price = self._priced.price

    def _count_rows(self, plan: StepPlan) -> None:
        for kind in RowKind:
            tokens = [row.num_tokens for row in plan.rows if row.kind is kind]
            self._rows[kind] += len(tokens)
            self._row_tokens[kind] += sum(tokens)

    def _count_refresh(self, plan: StepPlan, num_layers: int) -> None:
        """KV tokens that refresh layers read in DRAFT rows (all before the row's reach), mean over all layers, and their time
        by the cost model."""
        if not self._num_refresh_layers:
            return
        share, draft = self._num_refresh_layers / num_layers, RowKind.DRAFT
        tokens = share * sum([row.reach for row in plan.rows if row.kind is draft])
        self._refresh_tokens += tokens
        if self._cost is not None:
            self._refresh_predicted += self._cost.per_kv * tokens

    def _count(self, progress: Progress) -> None:
        request, tokens = progress.request, progress.num_new_tokens
        self._generation_tokens += tokens
        if tokens and progress.seconds_since_last is None:
            self._count_first(request)
        elif tokens and progress.seconds_since_last is not None:
            self._per_chunk.add(progress.seconds_since_last)
            self._per_token.add(progress.seconds_since_last / tokens, tokens)
            self._draft_length.add(progress.num_drafted)
        if progress.num_drafted:
            self._drafts += 1
            self._draft_tokens += progress.num_drafted
            self._accepted_tokens += progress.num_accepted
            counts = self._accepted_per_position
            counts.extend([0] * (progress.num_drafted - len(counts)))
            for position in range(progress.num_accepted):
                counts[position] += 1
        if progress.finished and request.last_token is not None and request.first_token is not None:
            self._latency.add(request.last_token - request.arrival)
            self._decode.add(request.last_token - request.first_token)
            self._prompt_length.add(len(request.prompt_token_ids))
            self._output_length.add(len(request.output_token_ids))

    def _count_first(self, request: Request) -> None:
        """A request's first token: its prompt is done."""
        assert request.first_token is not None
        assert request.first_scheduled is not None
        self._prompt_tokens += len(request.prompt_token_ids)
        if self._prefix_caching:
            self._prefix_queries += len(request.prompt_token_ids)
            self._prefix_hits += request.stats.num_cached_tokens
        self._first_token.add(request.first_token - request.arrival)
        self._queue.add(request.first_scheduled - request.arrival)
        self._prefill.add(request.first_token - request.first_scheduled)

    def snapshot(self) -> list[Metric]:
        """Every metric as it is now; those of one name stand together."""
        with self._lock:
            return [*self._gauges(), *self._counters(), *(histogram.read() for histogram in self._histograms())]

    def _gauges(self) -> list[Metric]:
        price = [] if self._price is None else [Gauge("aspire:price_tokens_per_second", PRICE, {}, self._price)]
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        return [
            Gauge("vllm:num_requests_running", "Requests that have a place in the batch.", {}, running),
            Gauge("vllm:num_requests_waiting", "Requests that wait for one.", {}, waiting),
            Gauge(
                "vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is full.", {}, self._scheduler.pages.usage
            ),
            *price,
        ]

    def _counters(self) -> list[Metric]:
        counted: list[Metric] = [
            Counter(name, text, {}, value)
            for name, text, value in (
                ("vllm:prompt_tokens", "Prompt tokens of requests that got their first token.", self._prompt_tokens),
                ("vllm:generation_tokens", "Tokens generated.", self._generation_tokens),
                ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self._prefix_queries),
                ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", self._prefix_hits),
                ("vllm:num_preemptions", "Requests sent back to the queue.", self._scheduler.num_preemptions),
                ("vllm:spec_decode_num_drafts", "Verifications that had drafts.", self._drafts),
                ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", self._draft_tokens),
                ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", self._accepted_tokens),
                ("aspire:steps", "Forward passes.", self._steps),
                (
                    "aspire:refresh_kv_tokens_read",
                    "KV tokens that refresh layers read in draft rows, mean over all layers.",
                    self._refresh_tokens,
                ),
            )
        ]
        counted.append(
            Vector(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Draft tokens accepted, by their position in the draft.",
                {},
                list(self._accepted_per_position),
            )
        )
        counted += [
            Counter("vllm:request_success", "Requests ended.", {"finished_reason": reason}, n)
            for reason, n in self._scheduler.num_finished.items()
        ]
        for name, text, by_kind in (
            ("aspire:rows", "Rows of steps, by what the request did.", self._rows),
            ("aspire:row_tokens", "Tokens of these rows.", self._row_tokens),
            ("aspire:kv_tokens_read", "KV tokens that attention read, mean over the layers.", self._kv_tokens),
        ):
            counted += [Counter(name, text, {"kind": kind.name.lower()}, n) for kind, n in by_kind.items()]
        if self._cost is not None:
            counted += [
                Counter("aspire:step_predicted_seconds", "What the cost model said of steps.", {}, self._predicted),
                Counter("aspire:step_measured_seconds", "What these steps took.", {}, self._measured),
                Counter(
                    "aspire:refresh_predicted_seconds",
                    "What the cost model says of the reads of refresh layers in draft rows.",
                    {},
                    self._refresh_predicted,
                ),
            ]
        return counted

    def _histograms(self) -> tuple[_Counts, ...]:
        return (
            self._first_token,
            self._per_token,
            self._per_chunk,
            self._latency,
            self._queue,
            self._prefill,
            self._decode,
            self._prompt_length,
            self._output_length,
            self._draft_length,
            self._step_time,
            *((self._residual,) if self._cost is not None else ()),
        )
