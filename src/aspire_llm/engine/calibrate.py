"""The cost model's first coefficients: from the model's shape before anything ran, then from a short calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from aspire_llm.cache.pages import PageAllocator
from aspire_llm.cache.pool import KVPool
from aspire_llm.engine.runner import Runner
from aspire_llm.models.config import DecoderConfig
from aspire_llm.policy.base import StepLoad
from aspire_llm.policy.cost import CostModel
from aspire_llm.request import RowKind, SamplingParams
from aspire_llm.scheduler.plan import Admission, PageWrite, Row, StepPlan
from aspire_llm.scheduler.scheduler import Limits

# bytes/s and operations/s of an ordinary machine of the kind; only ratios matter, and only until steps were measured
NOMINAL = {"cpu": (2e10, 1e11), "cuda": (2e12, 4e14)}

BATCHES = {"cpu": (1, 4), "cuda": (1, 8, 16)}  # requests in a calibration step
MOST_TOKENS = 512  # of a calibration step: wider ones are rare, and run in another way
LENGTHS = {"cpu": (256, 4096), "cuda": (1024, 16384)}  # KV tokens of each
DRAFTS = (1, 3, 7)  # drafts before each verification
LAST_CHUNK = 64  # prompt tokens that are computed, and scored as the context asks
PLAIN_STEPS = 3  # verifications of no drafts, which tell reading KV apart from checking drafts; after one to warm up
KEY = -1  # of the pages that calibration borrows


def prior_cost(
    shape: DecoderConfig, num_parameters: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> CostModel:
    """Weights are read once a step; a token costs two operations a parameter; a KV token its bytes over all layers."""
    bandwidth, rate = NOMINAL[device.type]
    return CostModel(
        fixed=num_parameters * dtype.itemsize / bandwidth,
        per_token=2 * num_parameters / rate,
        per_kv=shape.kv_bytes_per_token(kv_dtype) / bandwidth,
        per_check=0.25 * shape.kv_bytes_per_token(kv_dtype) / bandwidth,
    )


def calibrate(
    runner: Runner, pool: KVPool, pages: PageAllocator, limits: Limits, free_tokens: Sequence[float] = (0.0,)
) -> CostModel | None:
    """Run a few dozen steps of draft and verify rows, of several batch sizes and lengths, and fit the terms of a step's time.

    Borrows free pages and slots of an idle engine and gives them back. None where the pool or the limits leave no room
    for two lengths: the prior must do then.
    """
    samples: list[StepLoad] = []
    longest = min(limits.max_model_len, pages.num_free * pages.page_size // 2)
    lengths = [min(length, longest) for length in LENGTHS[runner.device.type]]
    drafts = [n for n in DRAFTS if n <= limits.max_draft_tokens]
    room = 2 + PLAIN_STEPS + sum(n + 1 for n in drafts)  # tokens that the verifications commit, plus one
    if not drafts or lengths[0] == lengths[1] or lengths[0] <= room:
        return None
    batches = {min(b, limits.max_num_seqs) for b in BATCHES[runner.device.type]}
    steps = [(batch, length) for batch in sorted(batches) for length in lengths]
    if runner.device.type == "cuda":
        # What a token costs in a small step says little about large ones; and the kernels of the longest requests are compiled
        # before one comes.
        large = min(limits.max_num_seqs, MOST_TOKENS // 2)
        steps += [(large, length) for length in lengths if large not in batches]
        steps += [(1, longest)] * (longest > lengths[1])
    for batch, length in steps:
        pages_of_slot = -(-length // pages.page_size)
        if batch * pages_of_slot > pages.num_free:
            continue
        pages.open(KEY, (), 0)
        reserved = pages.reserve(KEY, batch * pages_of_slot * pages.page_size)
        assert reserved is not None
        try:
            fitting = [n for n in drafts if batch * (n + 1) <= MOST_TOKENS]
            at_once = max(1, limits.max_num_batched_tokens // LAST_CHUNK)
            measured = list(_cycle(runner, pool, reserved[1], batch, length, room, fitting, at_once))
        finally:
            pages.release(KEY)
            for slot in range(batch):
                runner.sampler.release(slot)
        samples.extend(measured[1:])  # the first one warms up
    if len(samples) < 3:
        return None
    return CostModel.fit(samples, free_tokens, verify_step=runner.device.type == "cuda")


def _cycle(
    runner: Runner,
    pool: KVPool,
    borrowed: Sequence[int],
    batch: int,
    length: int,
    room: int,
    drafts: Sequence[int],
    prompts_at_once: int,
) -> Iterator[StepLoad]:
    """Steps of one batch size and length: plain ones, then each number of drafts and their verification."""
    places = torch.tensor(borrowed, device=runner.device)[:, None] * pool.page_size + torch.arange(
        pool.page_size, device=runner.device
    )
    pool.clear(places.flatten())  # what lies there may be infinite or slow to compute with
    prompt = (0,) * (length - room)
    chunk = min(LAST_CHUNK, len(prompt))
    params = SamplingParams(temperature=0.0, max_tokens=length)
    each = len(borrowed) // batch
    admissions = tuple(Admission(s, 0, 0, prompt, (), len(prompt) - chunk, params, frozenset()) for s in range(batch))
    writes = tuple(PageWrite(s, 0, tuple(borrowed[s * each : (s + 1) * each])) for s in range(batch))

    def step(kind: RowKind, num_tokens: int) -> StepLoad:
        plan = StepPlan(0, tuple(Row(s, 0, kind, num_tokens, reach=length) for s in range(batch)))
        result = runner.run(plan)
        return StepLoad(plan.num_tokens, result.mean_kv_tokens, result.seconds, result.mean_checked_kv)

    # The end of a prompt gives the requests their context; its own time says nothing about decoding.
    ends = tuple(Row(s, 0, RowKind.PREFILL, chunk, len(prompt) - chunk, len(prompt)) for s in range(batch))
    for first in range(0, batch, prompts_at_once):
        some = slice(first, first + prompts_at_once)
        runner.run(StepPlan(0, ends[some], admissions[some], writes[some]))
    for _ in range(1 + PLAIN_STEPS):
        yield step(RowKind.VERIFY, 1)
    for n in drafts:
        for _ in range(n):
            yield step(RowKind.DRAFT, 1)
        yield step(RowKind.VERIFY, n + 1)
