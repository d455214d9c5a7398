"""One run of a batch: what is prefilled before it, what is timed, and what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aspire_llm.bench.memory import PeakMemory
from aspire_llm.bench.recording import Recording
from aspire_llm.cache.pages import PageAllocator
from aspire_llm.engine.engine import Step
from aspire_llm.engine.llm import LLM, OnStep
from aspire_llm.errors import UserError
from aspire_llm.request import Request, RowKind, SamplingParams, SpeculationStats

Tell = Callable[[Sequence[Request]], OnStep | None]
"""Given a run's requests before it starts; returns what must see every step, if anything."""


@dataclass(frozen=True, slots=True)
class RequestRun:
    """One request under one method. seconds: from its first token to its last."""

    prompt_tokens: int
    token_ids: list[int]
    finish_reason: str | None
    stats: SpeculationStats
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One method, once. tokens and seconds: of the steps without prompt rows."""

    requests: list[RequestRun]
    tokens: int
    seconds: float
    peak_memory_bytes: int
    recording: Recording

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def prefill(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, on_tokens: Callable[[int], None]) -> float:
    """Compute every prompt, so that its pages are in the prefix cache, and nothing else. Returns the seconds."""
    started = time.perf_counter()
    done = 0
    engine = llm.engine
    # with the real limits on output, so that room to grow is left behind each prompt
    requests = [request for prompt in prompts for request in llm.inputs.requests(prompt, params)]
    try:
        for request in requests:
            engine.add(request)
        while engine.has_work:
            step = engine.step()
            for request in requests:
                if request.output_token_ids or request.finished:
                    engine.abort(request)
            if step.plan is not None:
                done += sum(row.num_tokens for row in step.plan.rows if row.kind is RowKind.PREFILL)
                on_tokens(done)
    finally:
        for request in requests:
            engine.abort(request)
    failed = next((request.error for request in requests if request.error), None)
    if failed is not None:
        raise UserError(f"prefill failed: {failed}")
    return time.perf_counter() - started


def measure(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    memory: PeakMemory,
    on_tokens: Callable[[int], None] | None = None,
    *,
    tell: Tell | None = None,
) -> Run:
    """Decode `prompts` to the end. Request i has seed i. tell: tells policy `hindsight` what will come."""
    groups = [llm.inputs.requests(prompt, params.model_copy(update={"seed": i})) for i, prompt in enumerate(prompts)]
    requests = [group[0] for group in groups]
    observer = tell(requests) if tell is not None else None
    recording = Recording(requests, llm.cache.pages, llm.engine.cost)
    on_gpu = llm.engine.runner.device.type == "cuda"
    clock = DecodeClock(memory, recording, on_tokens, [observer] if observer else [], counts_callbacks=on_gpu)
    memory.reset()
    clock.start()
    llm.run(groups, [None] * len(groups), clock)
    failed = next((request.error for request in requests if request.error), None)
    if failed is not None:
        raise UserError(f"method {llm.config.method}: a request failed: {failed}")
    runs = [request_run(request) for request in requests]
    return Run(runs, clock.tokens, clock.seconds, memory.peak_bytes(), recording)


def request_run(request: Request) -> RequestRun:
    assert request.first_token is not None
    assert request.last_token is not None
    return RequestRun(
        prompt_tokens=len(request.prompt_token_ids),
        token_ids=list(request.output_token_ids),
        finish_reason=request.finish_reason,
        stats=request.stats,
        seconds=request.last_token - request.first_token,
    )


class DecodeClock:
    """Sums tokens and wall time (planning and bookkeeping included) of the steps that have no prompt rows.

    counts_callbacks: the time of recording counts too, as on a GPU, which goes on working meanwhile; else it is nobody's.
    """

    def __init__(
        self,
        memory: PeakMemory,
        recording: Recording,
        on_tokens: Callable[[int], None] | None = None,
        observers: Sequence[OnStep] = (),
        *,
        counts_callbacks: bool = False,
    ) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._all_tokens = 0
        self._memory = memory
        self._recording = recording
        self._on_tokens = on_tokens
        self._observers = observers
        self._counts_callbacks = counts_callbacks
        self._last = 0.0

    def start(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, step: Step) -> None:
        now = time.perf_counter()
        elapsed = now - self._last
        new = sum(progress.num_new_tokens for progress in step.progress)
        self._all_tokens += new
        if step.plan is not None and all(row.kind is not RowKind.PREFILL for row in step.plan.rows):
            self.tokens += new
            self.seconds += elapsed
        self._memory.sample()
        self._recording.add(step, elapsed)
        for observer in self._observers:
            observer(step)
        if self._on_tokens is not None:
            self._on_tokens(self._all_tokens)
        self._last = now if self._counts_callbacks else time.perf_counter()


def free_all_but(pages: PageAllocator, prompts: Sequence[list[int]]) -> None:
    """Forget every cached page but those of the prompts, so that each method finds the cache as the first one did.

    Without this the pages behind a prompt would hold an earlier method's output, and the next method's would lie elsewhere.
    The cache must be idle.
    """
    keys = range(-len(prompts) - 1, 0)  # no engine uses negative ones
    filler, *holders = keys
    for key, prompt in zip(holders, prompts, strict=True):
        pages.open(key, prompt, pages.match_prefix(prompt, max_tokens=len(prompt)))
    pages.open(filler, [], 0)
    pages.reserve(filler, pages.num_free * pages.page_size)
    for key in keys:
        pages.release(key)
