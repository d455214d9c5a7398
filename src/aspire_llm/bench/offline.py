"""Throughput of a batch under several methods: same model, same prompts, same KV cache, same step limits.

For every seed (other prompts, other replayed fates) prompts are prefilled once, by plain decoding, and every method starts
from these cached prefixes (the last, partial page of each prompt is computed again by all of them). What is measured is
decoding: tokens and wall time of the steps that have no prompt rows. Each method first decodes one prompt unmeasured; with
repeats the methods take turns: A B C A B C. Besides the presets there is `hindsight`, the upper bound: it is told what plain
decoding says. With replayed acceptance the engine does all of its work, and a trace makes the accept decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from aspire_llm.bench.datasets import Dataset, Selection
from aspire_llm.bench.hindsight import PlainContinuations, TraceContinuations
from aspire_llm.bench.measure import Run, Tell, free_all_but, measure, prefill
from aspire_llm.bench.memory import PeakMemory
from aspire_llm.bench.methods import HINDSIGHT
from aspire_llm.bench.replay import ReplaySampler
from aspire_llm.bench.replay_source import ReplaySource
from aspire_llm.config import EngineConfig
from aspire_llm.engine.llm import LLM, OnStep
from aspire_llm.errors import UserError
from aspire_llm.policy.cost import CostModel
from aspire_llm.policy.trace import Trace
from aspire_llm.request import Request, SamplingParams

REFERENCE = "plain"
WARM_UP_TOKENS = 24


class OnProgress(Protocol):
    def __call__(self, stage: str, done: int, most: int) -> None:
        """`stage` has done `done` of at most `most` tokens (0: not counted)."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, apart from methods and prompts."""

    params: SamplingParams  # greedy
    requests: int | None = None  # of a batch; None: as many as the dataset is made for
    seeds: tuple[int, ...] = (0,)
    repeats: int = 1  # for each seed
    replay: ReplaySource | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The prompts of one seed, and what plain decoding says about them."""

    seed: int
    selection: Selection
    trace: Trace | None  # that decides what is accepted

    @property
    def prompts(self) -> list[list[int]]:
        return self.selection.prompts


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement in the order they were made; `repeat` counts within the seed."""

    method: str
    seed: int
    repeat: int
    run: Run


@dataclass(frozen=True, slots=True)
class Setting:
    """What a method's engine came down to."""

    context: str | None
    policy: str
    budget: int | None
    max_draft_tokens: int
    refresh_layers: tuple[int, ...]
    cost: CostModel | None  # as it is now


@dataclass(frozen=True, slots=True)
class Offline:
    """What `run_offline` measured."""

    model: str
    dtype: str
    device: str
    plan: Plan
    dataset: Dataset
    batches: list[Batch]
    turns: list[Turn]
    settings: dict[str, Setting]
    prompt_tokens: int
    prefill_seconds: float
    shared_prefill: bool  # False: prefix caching is off or the cache is too small, and every method prefilled by itself
    weights_bytes: int
    kv_cache_bytes: int
    memory_means: str

    @property
    def replayed(self) -> bool:
        return self.plan.replay is not None

    def of(self, method: str) -> list[Turn]:
        return [turn for turn in self.turns if turn.method == method]


def run_offline(
    configs: Mapping[str, EngineConfig], dataset: Dataset, plan: Plan, *, on_progress: OnProgress | None = None
) -> Offline:
    """Decode the dataset's prompts under every method; `plain`, the reference, must come first. Raises UserError before it
    measures anything if the dataset does not fit the model."""
    report = on_progress or _ignore
    report("loading", 0, 0)
    (_, reference), *others = configs.items()
    base = LLM(**reference.model_dump(exclude_unset=True))
    batches = choose_batches(base, dataset, plan)
    bench = _Bench({REFERENCE: base}, plan)
    cost: CostModel | None = None
    for method, config in others:
        told_by = bench.truth if method == HINDSIGHT else None
        options = config.model_dump(exclude_unset=True)
        llm = LLM(loaded=base.model, cache=base.cache, cost=cost, truth=told_by, **options)
        cost = cost or llm.engine.cost  # one calibration serves all
        bench.llms[method] = llm

    shared = caching = base.config.enable_prefix_caching
    prompt_tokens, prefill_seconds = sum(len(prompt) for batch in batches for prompt in batch.prompts), 0.0
    turns: list[Turn] = []
    for batch in batches:
        name = f" (seed {batch.seed})" if len(batches) > 1 else ""
        if caching:
            most = sum(map(len, batch.prompts))
            show = partial(report, f"prefill{name}", most=most)
            prefill_seconds += prefill(base, batch.prompts, plan.params, show)
        bench.begin(batch)
        if batch is batches[0]:
            bench.warm_up(report)
        for turn in bench.turns(report, caching, name):
            turns.append(turn)
            # what every method computes itself: the last page, and the tokens whose queries it scores
            own = base.config.block_size + bench.llms[turn.method].engine.scheduler.limits.min_last_chunk
            shared &= all(r.stats.num_cached_tokens >= r.prompt_tokens - own for r in turn.run.requests)
    decoder = base.model.decoder
    return Offline(
        model=base.config.model,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=str(decoder.device),
        plan=plan,
        dataset=dataset,
        batches=batches,
        turns=turns,
        settings={method: setting(llm) for method, llm in bench.llms.items()},
        prompt_tokens=prompt_tokens,
        prefill_seconds=prefill_seconds,
        shared_prefill=shared,
        weights_bytes=sum(p.numel() * p.element_size() for p in decoder.parameters()),
        kv_cache_bytes=base.cache.pool.num_bytes,
        memory_means=bench.memory.what,
    )


def choose_batches(llm: LLM, dataset: Dataset, plan: Plan) -> list[Batch]:
    """The prompts of every seed, and the trace that decides about them. Raises UserError."""
    context = llm.engine.scheduler.limits.max_model_len
    most = plan.params.max_tokens
    if most >= context:
        raise UserError(f"max_tokens = {most}: the context of {context} leaves no room for a prompt")
    batches = []
    for seed in plan.seeds:
        selection = dataset.select(llm.inputs, plan.requests, context - most, seed)
        # drafts look past the end of an output; with positions for them the trace need not begin again
        count, positions = len(selection.samples), most + llm.config.max_draft_tokens
        trace = plan.replay.trace(seed, count, positions) if plan.replay is not None else None
        if trace is not None and trace.max_draft < llm.config.max_draft_tokens:
            raise UserError(
                f"max_draft_tokens = {llm.config.max_draft_tokens}: trace {trace.name} has drafts of {trace.max_draft}; "
                "take at most these",
                "max_draft_tokens",
            )
        batches.append(Batch(seed, selection, trace))
    return batches


class _Bench:
    """The engines of all methods on one model and cache, and the batch they decode in turn."""

    def __init__(self, llms: dict[str, LLM], plan: Plan) -> None:
        self.llms = llms
        self.truth = PlainContinuations() if plan.replay is None else TraceContinuations()
        self.memory = PeakMemory(llms[REFERENCE].engine.runner.device)
        self._plan = plan
        self._batch: Batch | None = None

    def begin(self, batch: Batch) -> None:
        """From now on this batch is decoded, and its trace decides."""
        self._batch = batch
        if batch.trace is None:
            return
        for llm in self.llms.values():
            sampler = ReplaySampler(batch.trace, llm.config.max_num_seqs, llm.engine.runner.device)
            llm.engine.runner.sampler = sampler  # type: ignore[assignment]

    def warm_up(self, report: OnProgress) -> None:
        assert self._batch is not None
        most = min(WARM_UP_TOKENS, self._plan.params.max_tokens)
        params = self._plan.params.model_copy(update={"max_tokens": most})
        plain: Run | None = None
        for method, llm in self.llms.items():
            report(f"{method}: warming up", 0, 0)
            run = measure(llm, self._batch.prompts[:1], params, self.memory, tell=self._tell(method, plain))
            plain = plain or run

    def turns(self, report: OnProgress, caching: bool, name: str) -> Iterator[Turn]:
        """Every method once a repeat, in turn."""
        assert self._batch is not None
        batch, repeats = self._batch, self._plan.repeats
        most = len(batch.prompts) * self._plan.params.max_tokens
        plain: Run | None = None
        for repeat in range(repeats):
            for method, llm in self.llms.items():
                stage = method + name if repeats == 1 else f"{method}{name} ({repeat + 1}/{repeats})"
                if caching:
                    free_all_but(llm.cache.pages, batch.prompts)
                show = partial(report, stage, most=most)
                tell = self._tell(method, plain)
                run = measure(llm, batch.prompts, self._plan.params, self.memory, show, tell=tell)
                plain = plain or run
                yield Turn(method, batch.seed, repeat, run)

    def _tell(self, method: str, plain: Run | None) -> Tell | None:
        """plain: plain decoding's run of the same prompts."""
        if method != HINDSIGHT:
            return None
        batch, truth = self._batch, self.truth
        assert batch is not None

        def tell(requests: Sequence[Request]) -> OnStep | None:
            if isinstance(truth, PlainContinuations):
                assert plain is not None
                truth.begin(requests, [request.token_ids for request in plain.requests])
                return truth
            assert batch.trace is not None
            truth.begin(requests, batch.trace)
            return None

        return tell


def setting(llm: LLM) -> Setting:
    runner, config = llm.engine.runner, llm.config
    drafts = runner.selector is not None
    return Setting(
        context=(config.context or config.preset.context) if drafts else None,
        policy=config.policy or config.preset.policy,
        budget=runner.contexts.budget if drafts else None,
        max_draft_tokens=llm.engine.scheduler.limits.max_draft_tokens,
        refresh_layers=tuple(runner.selector.refresh_layers) if runner.selector is not None else (),
        cost=llm.engine.cost,
    )


def _ignore(stage: str, done: int, most: int) -> None:
    pass
