"""What the benchmarks share: a time limit, a report that survives the failure of one part, and steady decoding."""

from __future__ import annotations

import copy
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from aspire_llm import LLM, SamplingParams
from aspire_llm.bench import environment
from aspire_llm.bench.statistics import bootstrap_interval
from aspire_llm.config import make_config
from aspire_llm.context.profile import find_profile
from aspire_llm.engine.build import read_model, resolve
from aspire_llm.engine.engine import Engine
from aspire_llm.engine.outputs import merged_stats
from aspire_llm.policy.factory import POLICY_SETTINGS, PRICED, make_policy
from aspire_llm.policy.trace import Trace
from aspire_llm.request import RowKind
from aspire_llm.scheduler.scheduler import Scheduler

GPU = torch.cuda.is_available()


class Deadline:
    """Seconds that a script may take, from now on."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()

    def share(self, parts: int) -> Deadline:
        """An equal part of what is left."""
        return Deadline(self.left / max(1, parts))


class Report:
    """JSON that is written whenever a part ends, whether it ended well or not."""

    def __init__(self, name: str) -> None:
        folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results" / "h200")
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.json"
        self.data: dict[str, Any] = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": environment.machine(),
            "versions": environment.versions(),
            "commit": os.environ.get("COMMIT") or environment.commit(),
        }

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except Exception as error:  # the other parts may still run: device time is dear
            traceback.print_exc()
            self.data.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"
            torch.cuda.empty_cache()
        self.data.setdefault("seconds", {})[name] = round(time.perf_counter() - began, 1)
        self.write()

    def write(self) -> None:
        self._path.write_text(json.dumps(self.data, indent=1) + "\n")


def say(text: str) -> None:
    print(text, flush=True)


def kv_memory(model_bytes_per_token: int, cells: Sequence[tuple[int, int]], output: int, page: int = 64) -> int:
    """Bytes of KV cache for the largest cell (batch, prompt tokens): its prompts, `output` tokens more each, and the last
    prompt pages twice, since every method computes those itself."""
    pages = max(batch * (-(-length // page) + -(-output // page) + 2) for batch, length in cells)
    return int(pages * page * model_bytes_per_token * 1.02) + page * model_bytes_per_token


def fill(llm: LLM) -> None:
    for tensor in (*llm.cache.pool.k, *llm.cache.pool.v):
        tensor.normal_(0.0, 1.0)


def cached_prompts(llm: LLM, batch: int, length: int, seed: int) -> list[list[int]]:
    """Prompts whose K/V are in the prefix cache as if they had been computed: their values do not change the work."""
    generator = torch.Generator().manual_seed(seed)
    pages = llm.cache.pages
    prompts = []
    for i in range(batch):
        prompt = torch.randint(2, llm.model.config.vocab_size, (length,), generator=generator).tolist()
        pages.open(-2 - i, prompt, 0)
        if pages.reserve(-2 - i, length) is None:
            raise RuntimeError(f"no room for {batch} x {length}")
        pages.commit(-2 - i, prompt, length)
        prompts.append(prompt)
    for i in range(batch):
        pages.release(-2 - i)
    return prompts


def other_policy(llm: LLM, policy: str, draft_tokens: int | None = None, cost: Any = None) -> LLM:
    """`llm` under another policy: the same selector, runner, graphs and buffers, so nothing is built or captured again.

    draft_tokens: of policies of a fixed length. cost: the calibrated cost model to start from; `llm`'s if not given. Only
    one of the two may be busy.
    """
    config = llm.config
    runner = llm.engine.runner
    shape = llm.model.config
    takes, _ = POLICY_SETTINGS[policy]
    changed = {**config.model_dump(exclude_unset=True), "policy": policy, "draft_tokens": None}
    if "draft_length" in takes:
        changed["draft_tokens"] = draft_tokens
    if "max_verify_tokens" not in takes:
        changed["max_verify_tokens"] = None
    profile = find_profile(config.profile, llm.model.fingerprint)
    resolved = resolve(make_config(**changed), shape, runner.device, llm.model.decoder.dtype, llm.cache, profile)
    cost = copy.deepcopy(cost if cost is not None else llm.engine.cost)
    reads = read_model(config, resolved, shape, runner.selector)
    made = make_policy(
        policy,
        cost,
        reads,
        draft_length=resolved.draft_tokens if "draft_length" in takes else None,
        max_verify_tokens=resolved.max_verify_tokens if "max_verify_tokens" in takes else None,
    )
    other = copy.copy(llm)
    other.config = make_config(**changed)
    other.engine = Engine(
        Scheduler(resolved.limits, llm.cache.pages, made),
        runner,
        late=runner.device.type == "cuda",
        cost=cost if policy in PRICED else None,
    )
    return other


def requests_of(traces: Mapping[str, Trace], batch: int, seed: int) -> Trace:
    """A trace of `batch` requests, taken in turn from each of `traces` (so that a small batch has all workloads too), each
    beginning anywhere. The same seed takes the same requests and beginnings of traces of another context method."""
    by_name = [traces[name] for name in sorted(traces)]
    starts = min(len(trace.drafts[0]) for trace in by_name)
    longest = min(trace.max_draft for trace in by_name)
    stride = by_name[0].stride
    if any(trace.stride != stride or trace.max_draft != longest for trace in by_name):
        raise ValueError("traces of different strides or draft lengths do not mix")
    chosen = []
    for i in range(batch):
        trace = by_name[i % len(by_name)]
        turn = i // len(by_name) + seed * -(-batch // len(by_name))
        drafts = trace.drafts[turn % trace.num_requests][:starts]
        shift = (7 * i + 11 * seed) % starts
        chosen.append(drafts[shift:] + drafts[:shift])
    return Trace(f"{len(by_name)} traces", by_name[0].method, by_name[0].first_start, stride, tuple(chosen))


@dataclass(frozen=True, slots=True)
class Steady:
    """Decoding while every request of the batch runs, between two steps that brought tokens."""

    tokens: int
    seconds: float
    device_seconds: float
    steps: int
    step_tokens: int  # in the forwards of these steps
    mean_accepted_length: float  # of all cycles that drafted, those before the stretch included
    mean_draft_length: float
    distinct_ratio: float  # distinct tokens of an output over its length, mean of the requests
    acceptance: list[float]  # by position: accepted of those drafted

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def row(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "tokens_per_s": self.tokens_per_s,
            "step_ms": 1e3 * self.seconds / self.steps,
            "tokens_a_step": self.step_tokens / self.steps,
            "idle_share": 1 - self.device_seconds / self.seconds,
        }


def decode_steadily(
    llm: LLM, prompts: Sequence[list[int]], tokens: int, *, skip: int = 24, longest: int = 512
) -> Steady:
    """Decode until the batch has `tokens` new tokens a request (mean), not counting the first `skip` steps after the
    prompts; then end all requests, none of which may have come to its end.

    The stretch begins and ends with a step that brought tokens, so that it holds whole cycles of a batch in phase.
    """
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=longest, ignore_eos=True)
    # the seed is a request's place in a replayed trace
    each = [params.model_copy(update={"seed": i}) for i in range(len(prompts))]
    requests = [llm.inputs.requests(prompt, own)[0] for prompt, own in zip(prompts, each, strict=True)]
    engine.validate(requests)
    passed, began, ended = 0, 0.0, 0.0
    counted: list[tuple[int, float, int]] = []  # of each step of the stretch: new tokens, device seconds, tokens run
    pending: list[tuple[int, float, int]] = []  # the same, since the last step that brought tokens
    try:
        for request in requests:
            engine.add(request)
        while engine.has_work:
            step = engine.step()
            now = time.perf_counter()
            if step.plan is None or step.result is None:
                continue
            if any(progress.finished for progress in step.progress):
                raise RuntimeError(
                    "a request ended: " + "; ".join(r.error or "at its limit" for r in requests if r.finished)
                )
            if any(row.kind is RowKind.PREFILL for row in step.plan.rows) or len(engine.scheduler.running) < len(
                prompts
            ):
                continue
            passed += 1
            brought = sum(progress.num_new_tokens for progress in step.progress)
            if not began:
                if passed > skip and brought:
                    began = now
                continue
            pending.append((brought, step.result.seconds, step.plan.num_tokens))
            if not brought:
                continue
            counted += pending
            pending.clear()
            ended = now
            if sum(n for n, _, _ in counted) >= tokens * len(prompts):
                break
    finally:
        for request in requests:
            engine.abort(request)
        while engine.has_work:
            engine.step()
    engine.check()
    if not counted:
        raise RuntimeError("no steady stretch: too few tokens")
    stats = merged_stats([request.stats for request in requests])
    outputs = [request.output_token_ids for request in requests]
    return Steady(
        tokens=sum(n for n, _, _ in counted),
        seconds=ended - began,
        device_seconds=sum(seconds for _, seconds, _ in counted),
        steps=len(counted),
        step_tokens=sum(width for _, _, width in counted),
        mean_accepted_length=stats.mean_acceptance_length,
        mean_draft_length=stats.num_draft_tokens / stats.num_drafts if stats.num_drafts else 0.0,
        distinct_ratio=sum(len(set(o)) / max(1, len(o)) for o in outputs) / len(outputs),
        acceptance=[
            round(a / d, 4) for a, d in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True) if d
        ],
    )


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median and its 95 % bootstrap interval; the values too."""
    return {"median": median(values), "interval": bootstrap_interval(values), "values": list(values)}


def shown(numbers: Mapping[str, Any], digits: int = 2) -> str:
    interval = numbers["interval"]
    text = f"{numbers['median']:.{digits}f}"
    return text if interval is None else f"{text} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"
