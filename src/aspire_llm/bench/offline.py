"""Throughput of a batch under several methods: same model, same prompts, same KV cache, same step limits.

Prompts are prefilled once, by plain decoding, and every method starts from these cached prefixes (the last, partial page of
each prompt is computed again by all of them). What is measured is decoding: tokens and wall time of the steps that have no
prompt rows. Each method first decodes one prompt unmeasured; with repeats the methods take turns: A B C A B C.
Besides the presets there is `hindsight`, the upper bound: it is told what plain decoding says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from aspire_llm.bench.datasets import Dataset
from aspire_llm.bench.hindsight import PlainContinuations
from aspire_llm.bench.memory import PeakMemory
from aspire_llm.cache.pages import PageAllocator
from aspire_llm.config import METHODS, EngineConfig, make_config
from aspire_llm.engine.engine import Step
from aspire_llm.engine.llm import LLM, OnStep
from aspire_llm.errors import UserError
from aspire_llm.policy.cost import CostModel
from aspire_llm.policy.factory import POLICY_SETTINGS
from aspire_llm.request import Request, RowKind, SamplingParams, SpeculationStats

REFERENCE = "plain"
HINDSIGHT = "hindsight"  # the bound: drafts as `aspire`, told what plain decoding says
HINDSIGHT_DRAFTS_AS = "aspire"
WARM_UP_TOKENS = 24
DRAFTING_OPTIONS = ("budget", "draft_tokens", "refresh_layers", "profile")


class OnProgress(Protocol):
    def __call__(self, stage: str, done: int, most: int) -> None:
        """`stage` has done `done` of at most `most` tokens (0: not counted)."""
        ...


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

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Told:
    """What `hindsight` is told for a run: plain decoding of the same prompts."""

    truth: PlainContinuations
    plain: Run


@dataclass(frozen=True, slots=True)
class Offline:
    """What `run_offline` measured. runs: a list for each method, one entry a repeat."""

    model: str
    runs: dict[str, list[Run]]
    prompt_tokens: int
    prefill_seconds: float
    shared_prefill: bool  # False: prefix caching is off or the cache is too small, and every method prefilled by itself
    memory_means: str


def method_configs(methods: Sequence[str], options: Mapping[str, Any]) -> dict[str, EngineConfig]:
    """A config for each method, `plain` first: options that only some methods have go to those. Raises UserError, also for
    an option that none of them has."""
    chosen: dict[str, dict[str, Any]] = {}
    for method in dict.fromkeys((REFERENCE, *methods)):
        if method not in (*METHODS, HINDSIGHT):
            raise UserError(f"method {method!r} is unknown; known: {', '.join((*METHODS, HINDSIGHT))}", "method")
        common = {name: value for name, value in options.items() if name not in DRAFTING_OPTIONS}
        if method == HINDSIGHT:
            chosen[method] = {**common, "method": HINDSIGHT_DRAFTS_AS, "policy": HINDSIGHT}
        else:
            chosen[method] = {**common, "method": method}
    for name in DRAFTING_OPTIONS:
        if name not in options:
            continue
        refused: UserError | None = None
        taken = False
        for settings in chosen.values():
            try:
                check_option(make_config(**settings, **{name: options[name]}), name)
            except UserError as error:
                refused = error
            else:
                settings[name] = options[name]
                taken = True
        if not taken and refused is not None:
            raise refused
    return {method: make_config(**settings) for method, settings in chosen.items()}


def check_option(config: EngineConfig, name: str) -> None:
    """Raises UserError if the policy has no use for the option `name`."""
    policy = config.policy or config.preset.policy
    takes, _ = POLICY_SETTINGS[policy]
    if name == "draft_tokens" and "draft_length" not in takes:
        raise UserError(f"draft_tokens={config.draft_tokens} does nothing with policy {policy!r}", name)


def run_offline(
    configs: Mapping[str, EngineConfig],
    dataset: Dataset,
    params: SamplingParams,
    *,
    requests: int | None = None,
    repeats: int = 1,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Offline:
    """Decode the dataset's prompts under every method (the first is the reference). Raises UserError before it measures
    anything if the dataset does not fit the model."""
    report = on_progress or _ignore
    report("loading", 0, 0)
    first, *others = configs.items()
    llms = {first[0]: LLM(**first[1].model_dump(exclude_unset=True))}
    base = llms[first[0]]
    context = base.engine.scheduler.limits.max_model_len
    room = context - params.max_tokens
    if room < 1:
        raise UserError(f"max_tokens = {params.max_tokens}: the context of {context} leaves no room for a prompt")
    prompts = dataset.prompts(base.inputs, requests, room, seed)
    truth = PlainContinuations()
    cost: CostModel | None = None
    for method, config in others:
        told_by = truth if method == HINDSIGHT else None
        options = config.model_dump(exclude_unset=True)
        llms[method] = LLM(loaded=base.model, cache=base.cache, cost=cost, truth=told_by, **options)
        cost = cost or llms[method].engine.cost  # one calibration serves all

    prompt_tokens = sum(map(len, prompts))
    prefill_seconds = 0.0
    if base.config.enable_prefix_caching:
        prefill_seconds = prefill(base, prompts, params, lambda done: report("prefill", done, prompt_tokens))
    warm_up = params.model_copy(update={"max_tokens": min(WARM_UP_TOKENS, params.max_tokens)})
    warm_ups: list[Run] = []
    shared = base.config.enable_prefix_caching
    memory = PeakMemory(base.engine.runner.device)
    for method, llm in llms.items():
        report(f"{method}: warming up", 0, 0)
        told = Told(truth, warm_ups[0]) if method == HINDSIGHT else None
        warm_ups.append(measure(llm, prompts[:1], warm_up, memory, told=told))
    runs: dict[str, list[Run]] = {method: [] for method in llms}
    most = len(prompts) * params.max_tokens
    for repeat in range(repeats):
        for method, llm in llms.items():
            name = method if repeats == 1 else f"{method} ({repeat + 1}/{repeats})"
            if base.config.enable_prefix_caching:
                free_all_but(base.cache.pages, prompts)
            told = Told(truth, runs[REFERENCE][0]) if method == HINDSIGHT else None
            show = partial(report, name, most=most)
            run = measure(llm, prompts, params, memory, show, told=told)
            runs[method].append(run)
            # what every method computes itself: the last page, and the tokens whose queries it scores
            own = base.config.block_size + llm.engine.scheduler.limits.min_last_chunk
            shared &= all(request.stats.num_cached_tokens >= request.prompt_tokens - own for request in run.requests)
    return Offline(base.config.model, runs, prompt_tokens, prefill_seconds, shared, memory.what)


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
    told: Told | None = None,
) -> Run:
    """Decode `prompts` to the end. told: for policy `hindsight`."""
    groups = [llm.inputs.requests(prompt, params) for prompt in prompts]
    observers: list[OnStep] = []
    if told is not None:
        told.truth.begin([group[0] for group in groups], [request.token_ids for request in told.plain.requests])
        observers.append(told.truth)
    clock = DecodeClock(memory, on_tokens, observers)
    memory.reset()
    clock.start()
    llm.run(groups, [None] * len(groups), clock)
    requests = [group[0] for group in groups]
    failed = next((request.error for request in requests if request.error), None)
    if failed is not None:
        raise UserError(f"method {llm.config.method}: a request failed: {failed}")
    return Run([request_run(request) for request in requests], clock.tokens, clock.seconds, memory.peak_bytes())


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
    """Sums tokens and wall time (planning and bookkeeping included) of the steps that have no prompt rows."""

    def __init__(
        self, memory: PeakMemory, on_tokens: Callable[[int], None] | None = None, observers: Sequence[OnStep] = ()
    ) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._all_tokens = 0
        self._memory = memory
        self._on_tokens = on_tokens
        self._observers = observers
        self._last = 0.0

    def start(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, step: Step) -> None:
        elapsed = time.perf_counter() - self._last
        new = sum(progress.num_new_tokens for progress in step.progress)
        self._all_tokens += new
        if step.plan is not None and all(row.kind is not RowKind.PREFILL for row in step.plan.rows):
            self.tokens += new
            self.seconds += elapsed
        self._memory.sample()
        for observer in self._observers:
            observer(step)
        if self._on_tokens is not None:
            self._on_tokens(self._all_tokens)
        self._last = time.perf_counter()  # what this callback took is nobody's


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


def _ignore(stage: str, done: int, most: int) -> None:
    pass
