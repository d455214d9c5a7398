"""The scheduler: which requests run, what each does in the coming step, and what a step's results mean for them.

`plan()` makes a StepPlan, `apply()` takes its StepResult; nothing else writes requests. Plans may run ahead of results:
`plan()` can be called again before the previous `apply()`, as on a GPU, where a step is planned while the last one runs.
Counters then are bounds: a request may have `num_lookahead` more tokens than the host knows of.

Who owns which positions of a running request (computed ≤ known ≤ reserved):

    0 ........ num_computed ........ num_tokens .................... reserved pages
    | exact K/V            | newest   | lookahead + pending drafts   |
    |                      | token    | (provisional K/V)            |
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aspire_llm.cache.pages import PageAllocator
from aspire_llm.errors import UserError
from aspire_llm.policy.base import Action, CycleOutcome, Policy, RequestView, StepLoad
from aspire_llm.request import FinishReason, Request, RowKind
from aspire_llm.scheduler.plan import Admission, PageWrite, Row, RowResult, StepPlan, StepResult
from aspire_llm.scheduler.stopping import extend_output

NONE_KNOWN: tuple[float, ...] = ()  # confidences
# looked up once: members of an Enum are slow to get at, and these are asked for at every row of a step
PREFILL_ROW, DRAFT_ROW, VERIFY_ROW = RowKind
DRAFT, WAIT = Action.DRAFT, Action.WAIT


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_draft_tokens: int  # 0: nothing is drafted
    min_last_chunk: int  # tokens that the last prefill chunk must hold, so that its queries can be scored

    @property
    def widest_step(self) -> int:
        """Most tokens a step can have."""
        return self.max_num_seqs * (self.max_draft_tokens + 1) + self.max_num_batched_tokens + self.min_last_chunk


@dataclass(slots=True)
class Progress:
    """New tokens of one request from one step."""

    request: Request
    num_new_tokens: int
    finished: bool
    num_drafted: int = 0  # of the verification that brought them
    num_accepted: int = 0  # of these; drafts after a stop are not counted
    seconds_since_last: float | None = None  # since the request's tokens before; None for its first


class Scheduler:
    def __init__(
        self, limits: Limits, pages: PageAllocator, policy: Policy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self.pages = pages
        self.policy = policy
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest admission first
        self.num_preemptions = 0
        self.num_finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._clock = clock
        self._tenants: list[Request | None] = [None] * limits.max_num_seqs
        self._epochs = [0] * limits.max_num_seqs
        self._in_flight: deque[tuple[StepPlan, tuple[Request, ...]]] = deque()
        self._leaving: list[Request] = []  # ended or preempted, but a step in flight still names their pages
        self._num_steps = 0

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if it can never run."""
        self.validate(request)
        room = self.limits.max_model_len - len(request.prompt_token_ids)
        request.output_limit = min(request.params.max_tokens, room)
        request.draft_limit = self.limits.max_draft_tokens if request.params.draft else 0
        self.waiting.append(request)

    def validate(self, request: Request) -> None:
        """Raise UserError if the request can never run."""
        n = len(request.prompt_token_ids)
        if n == 0:
            raise UserError("prompt is empty; at least 1 token is needed", "prompt")
        if n >= self.limits.max_model_len:
            raise UserError(
                f"prompt has {n} tokens; max_model_len={self.limits.max_model_len} allows "
                f"{self.limits.max_model_len - 1} and one of output",
                "prompt",
            )

    def abort(self, request: Request) -> None:
        """End a request at any phase. Results still in flight for it are dropped."""
        if not request.finished:
            self._finish(request, "abort")

    def fail(self, plan: StepPlan, error: str) -> list[Progress]:
        """The step broke on the device: its requests end with an error, the engine goes on."""
        _, named = self._retire(plan)
        ended = [r for r in named if not r.finished]
        for request in ended:
            request.error = error
            self._finish(request, "error")
        self._release_left()
        return [Progress(r, 0, True) for r in ended]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._in_flight)

    # ---- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do until a result comes back."""
        writes: list[PageWrite] = []
        prefilling = [r for r in self.running if r.num_prefilled < r.prefill_end]
        decoding, views = self._decoding()
        actions = self.policy.decide(views, self._prompt_load(prefilling, len(decoding))) if decoding else []
        rows, named = self._decode_rows(decoding, views, actions, writes)
        budget = max(
            self.limits.max_num_batched_tokens - sum([row.num_tokens for row in rows]),
            self.limits.max_num_batched_tokens // 4,  # decoding always rides, but does not starve prompts either
        )
        prefilling = [r for r in prefilling if r.slot is not None]
        admissions = self._admit(writes, budget - sum([r.prefill_end - r.num_prefilled for r in prefilling]))
        if admissions:
            prefilling += self.running[-len(admissions) :]
        for request in prefilling:
            if budget > 0:
                row = self._prefill_row(request, budget)
                budget -= row.num_tokens
                rows.append(row)
                named.append(request)
        if not rows:
            return None
        plan = StepPlan(self._num_steps, tuple(rows), tuple(admissions), self._live_writes(writes))
        self._num_steps += 1
        for request in named:
            request.num_in_flight += 1
        self._in_flight.append((plan, tuple(named)))
        return plan

    def _decoding(self) -> tuple[list[Request], list[RequestView]]:
        """Every request that can decode now, and what the policy may know of it."""
        decoding, views = [], []
        for request in self.running:
            if request.num_prefilled < request.prefill_end:
                continue
            # every token that may be committed already, those in flight included
            lookahead = request.num_lookahead
            output = len(request.output_token_ids) + lookahead
            left = request.output_limit - output
            if left <= 0:  # its end may be in flight
                continue
            most = request.draft_limit
            known = NONE_KNOWN if lookahead else request.confidences
            views.append(
                RequestView(
                    request.key,
                    len(request.prompt_token_ids) + output,
                    request.num_pending,
                    known,
                    most if most < left else left - 1,
                )
            )
            decoding.append(request)
        return decoding, views

    def _prompt_load(self, prefilling: list[Request], num_decoding: int) -> StepLoad:
        """Of the prefill rows that will share the step, at most."""
        if not prefilling:
            return StepLoad(0, 0)
        tokens = sum(r.prefill_end - r.num_prefilled for r in prefilling)
        tokens = min(tokens, max(0, self.limits.max_num_batched_tokens - num_decoding))
        return StepLoad(tokens, max(r.num_prefilled for r in prefilling) + tokens)

    def _decode_rows(
        self, decoding: list[Request], views: list[RequestView], actions: list[Action], writes: list[PageWrite]
    ) -> tuple[list[Row], list[Request]]:
        """Rows, and their requests, of those that have one: what each does, as far as there are pages."""
        rows, named = [], []
        for request, view, action in zip(decoding, views, actions, strict=True):
            slot, pending = request.slot, view.pending
            if action is WAIT or slot is None:  # the latter: preempted by an older one, just now
                continue
            reach = view.length + pending
            if reach > request.num_reserved and not self._reserve(request, reach, writes):
                continue
            if action is DRAFT:
                if pending >= view.max_draft:
                    raise RuntimeError(f"policy drafts past max_draft={view.max_draft}")
                request.num_pending = pending + 1
                request.stats.steps["draft"] += 1
                rows.append(Row(slot, request.epoch, DRAFT_ROW, 1, 0, reach))
            else:
                request.num_lookahead += 1 + pending
                request.num_pending = 0
                request.stats.steps["verify"] += 1
                rows.append(Row(slot, request.epoch, VERIFY_ROW, 1 + pending, 0, reach))
            named.append(request)
        return rows, named

    def _prefill_row(self, request: Request, budget: int) -> Row:
        assert request.slot is not None
        left = request.prefill_end - request.num_prefilled
        n = min(left, budget)
        if 0 < left - n < self.limits.min_last_chunk:
            n = left - self.limits.min_last_chunk  # leave enough for the last chunk to be scored
            if n <= 0:
                n = left
        start = request.num_prefilled
        request.num_prefilled += n
        request.stats.steps["prefill"] += 1
        last = not request.in_prefill
        if last:
            request.num_lookahead += 1
        return Row(request.slot, request.epoch, PREFILL_ROW, n, start, reach=start + n, samples=last)

    def _admit(self, writes: list[PageWrite], budget: int) -> list[Admission]:
        """Move waiting requests into free slots, first come first served, while their known tokens fit."""
        admissions: list[Admission] = []
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            if request.num_in_flight:  # preempted a moment ago; its old pages are still named by a step
                break
            tokens = request.token_ids
            # the last tokens are computed in any case: they are scored and sampled
            reusable = (
                0 if request.params.prompt_logprobs is not None else len(tokens) - max(1, self.limits.min_last_chunk)
            )
            cached = self.pages.match_prefix(tokens, max_tokens=max(0, reusable))
            self.pages.open(
                request.key, tokens, cached, expected_tokens=len(tokens) + min(request.params.max_tokens, 512)
            )
            # a page to grow for each running request, or the newcomer would be preempted at once
            fits = self.pages.reserve(request.key, len(tokens)) is not None
            if not fits or (self.running and self.pages.num_free < len(self.running)):
                self.pages.release(request.key)
                break
            self.waiting.popleft()
            slot = self._tenants.index(None)
            self._tenants[slot] = request
            self._epochs[slot] += 1
            request.slot, request.epoch = slot, self._epochs[slot]
            request.num_computed = request.num_prefilled = cached
            request.prefill_end = len(tokens)
            if request.first_scheduled is None:
                request.first_scheduled = self._clock()
                request.stats.num_cached_tokens = cached
            self.running.append(request)
            budget -= len(tokens) - cached
            writes.append(PageWrite(slot, 0, self.pages.pages(request.key)))
            admissions.append(
                Admission(
                    slot=slot,
                    epoch=request.epoch,
                    seed=request.seed,
                    prompt_token_ids=tuple(request.prompt_token_ids),
                    output_token_ids=tuple(request.output_token_ids),
                    num_computed=cached,
                    params=request.params,
                    eos_token_ids=request.eos_token_ids,
                )
            )
        return admissions

    def _reserve(self, request: Request, end: int, writes: list[PageWrite]) -> bool:
        """Pages for positions below `end`, preempting younger requests if there are none. False: it cannot run now."""
        while (grown := self.pages.reserve(request.key, end)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        first, pages = grown
        request.num_reserved = (first + len(pages)) * self.pages.page_size
        if pages:
            assert request.slot is not None
            writes.append(PageWrite(request.slot, first, pages))
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue: its known tokens are kept, its drafts and K/V are not."""
        self._vacate(request)
        request.num_computed = request.num_prefilled = request.prefill_end = 0
        request.num_pending = request.num_lookahead = request.num_reserved = 0
        request.confidences.clear()
        request.prompt_logprobs.clear()  # they come again with the prefill
        request.stats.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _live_writes(self, writes: list[PageWrite]) -> tuple[PageWrite, ...]:
        """Without those of requests preempted later in the same plan."""
        return tuple(write for write in writes if self._tenants[write.slot] is not None)

    # ---- apply

    def apply(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Write a step's results into its requests. Results of an earlier tenant of a slot are dropped."""
        self._retire(plan)
        self.policy.observe_step(
            StepLoad(
                plan.num_tokens, result.mean_kv_tokens, result.seconds, result.mean_checked_kv, result.host_seconds
            )
        )
        progress = []
        tenants, now = self._tenants, self._clock()
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            request = tenants[row.slot]
            if request is None or request.epoch != row.epoch:
                continue
            if row_result.error is not None:
                request.error = row_result.error
                self._finish(request, "error")
                progress.append(Progress(request, 0, True))
                continue
            kind = row.kind
            if kind is DRAFT_ROW:
                request.confidences.append(row_result.confidence)
                continue
            if kind is PREFILL_ROW:
                request.num_computed += row.num_tokens
                request.prompt_logprobs.extend(row_result.prompt_logprobs)
            if row.samples:
                progress.append(self._commit(request, row, row_result, now))
            if not request.finished:
                self._cache_prefix(request, request.num_computed)
        self._release_left()
        return progress

    def _commit(self, request: Request, row: Row, result: RowResult, now: float) -> Progress:
        """Append the tokens that a row emitted, up to the first stop."""
        gap = now - request.last_token if request.last_token is not None else None
        if request.first_token is None:
            request.first_token = now
        request.last_token = now
        kept, stop = extend_output(request, result.token_ids)
        if result.logprobs:
            request.logprobs.extend(result.logprobs[:kept])
        drafted = accepted = 0
        if row.kind is VERIFY_ROW:
            request.num_lookahead -= row.num_tokens
            request.num_computed += len(result.token_ids)
            drafted = row.num_tokens - 1
            accepted = min(result.num_accepted, kept)
            request.stats.record_cycle(drafted, accepted)
            if drafted:
                confidences = tuple(request.confidences[:drafted])
                self.policy.observe_cycle(CycleOutcome(request.key, drafted, result.num_accepted, confidences))
            request.confidences.clear()
        else:
            request.num_lookahead -= 1
        if stop is not None:
            self._finish(request, stop.reason, stop.detail)
        return Progress(request, kept, stop is not None, drafted, accepted, gap)

    def _cache_prefix(self, request: Request, num_computed: int) -> None:
        """Only the tokens that are not cached yet are looked at."""
        first = self.pages.first_uncommitted(request.key, num_computed)
        if first is not None:
            self.pages.commit(request.key, request.tokens_between(first, num_computed), num_computed, first)

    # ---- leaving

    def _finish(self, request: Request, reason: FinishReason, detail: int | str | None = None) -> None:
        request.finish_reason = reason
        request.stop_reason = detail
        self.num_finished[reason] += 1
        if request.stream is not None:
            request.stream.finish()
        if request.slot is None:
            if request in self.waiting:
                self.waiting.remove(request)
        else:
            self._cache_prefix(request, min(request.num_computed, request.num_tokens))
            self._vacate(request)
        self.policy.forget(request.key)

    def _vacate(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        self._tenants[request.slot] = None
        request.slot = None
        if request.num_in_flight:
            self._leaving.append(request)
        else:
            self.pages.release(request.key)

    def _retire(self, plan: StepPlan) -> tuple[StepPlan, tuple[Request, ...]]:
        oldest, named = self._in_flight.popleft()
        if oldest is not plan:
            raise RuntimeError(f"results of step {plan.step} came before those of step {oldest.step}")
        for request in named:
            request.num_in_flight -= 1
        return oldest, named

    def _release_left(self) -> None:
        for request in [r for r in self._leaving if not r.num_in_flight]:
            self._leaving.remove(request)
            self.pages.release(request.key)

    # ---- integrity

    def check(self) -> None:
        """Raise AssertionError if counters, slots and pages contradict each other. Cheap enough to run when idle."""
        self.pages.check()
        for slot, tenant in enumerate(self._tenants):
            assert tenant is None or (tenant.slot == slot and tenant in self.running), (
                f"slot {slot} and its tenant disagree"
            )
        for request in self.running:
            where = f"request {request.request_id}"
            assert request.slot is not None, f"{where} runs without a slot"
            assert self._tenants[request.slot] is request, f"{where} runs in another's slot"
            assert not request.finished, f"{where} runs although finished"
            assert 0 <= request.num_computed <= request.num_tokens, f"{where} computed more than it knows"
            assert min(request.num_pending, request.num_lookahead) >= 0, f"{where} has a negative counter"
        if not self.has_work:
            assert not self._leaving, "pages held by requests that left"
            assert self.pages.num_free == self.pages.num_pages, (
                f"{self.pages.num_pages - self.pages.num_free} pages leaked"
            )
