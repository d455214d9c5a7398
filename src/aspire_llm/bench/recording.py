"""What a run is made of, step by step: cycles, rows, step times. In columns, as reports and plots take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aspire_llm.cache.pages import PageAllocator
from aspire_llm.engine.engine import Step
from aspire_llm.policy.cost import CostModel
from aspire_llm.request import Request, RowKind
from aspire_llm.scheduler.plan import StepPlan, StepResult

LANE_STEPS = 200  # of the swim lane


@dataclass(slots=True)
class Cycles:
    """One entry a verification."""

    step: list[int] = field(default_factory=list)
    request: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def accepted_length_histogram(self) -> list[int]:
        """[a]: cycles with drafts whose accepted length, 1 + accepted drafts, is a."""
        return _histogram([1 + a for d, a in zip(self.drafted, self.accepted, strict=True) if d])

    def draft_length_histogram(self) -> list[int]:
        """[g]: cycles of g drafts."""
        return _histogram(self.drafted)


@dataclass(slots=True)
class SwimLane:
    """One entry a row, of successive steps from the first that decodes."""

    step: list[int] = field(default_factory=list)
    request: list[int] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepTimes:
    """One entry a step; seconds. predicted: None where the policy has no cost model."""

    step: list[int] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    predicted: list[float | None] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    kv_tokens: list[float] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    prefill: list[bool] = field(default_factory=list)


class Recording:
    """Records the steps of one run of `requests`; they are numbered from 0, in the order given."""

    def __init__(self, requests: Sequence[Request], pages: PageAllocator, cost: CostModel | None) -> None:
        self.cycles = Cycles()
        self.lane = SwimLane()
        self.times = StepTimes()
        self.kv_cache_peak_usage = 0.0
        self._requests = requests
        self._index = {request.key: i for i, request in enumerate(requests)}
        self._tenants: dict[tuple[int, int], int] = {}  # (slot, epoch) -> request
        self._pages = pages
        self._cost = cost
        self._num_steps = 0
        self._lane_ends: int | None = None

    def add(self, step: Step, wall: float) -> None:
        """A step that was just done, and the seconds it took."""
        self.kv_cache_peak_usage = max(self.kv_cache_peak_usage, self._pages.usage)
        for request in self._requests:
            if request.slot is not None:
                self._tenants[request.slot, request.epoch] = self._index[request.key]
        if step.plan is None or step.result is None:
            return
        for progress in step.progress:
            if progress.seconds_since_last is not None:  # of a verification
                self.cycles.step.append(self._num_steps)
                self.cycles.request.append(self._index[progress.request.key])
                self.cycles.drafted.append(progress.num_drafted)
                self.cycles.accepted.append(progress.num_accepted)
        self._add_rows(step.plan, step.result)
        times = self.times
        times.step.append(self._num_steps)
        times.measured.append(step.result.seconds)
        times.predicted.append(self._cost.last_prediction if self._cost is not None else None)
        times.wall.append(wall)
        times.tokens.append(step.plan.num_tokens)
        times.kv_tokens.append(step.result.mean_kv_tokens)
        times.new_tokens.append(sum(progress.num_new_tokens for progress in step.progress))
        times.prefill.append(any(row.kind is RowKind.PREFILL for row in step.plan.rows))
        self._num_steps += 1

    def _add_rows(self, plan: StepPlan, result: StepResult) -> None:
        if self._lane_ends is None and any(row.kind is not RowKind.PREFILL for row in plan.rows):
            self._lane_ends = self._num_steps + LANE_STEPS
        if self._lane_ends is None or self._num_steps >= self._lane_ends:
            return
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            request = self._tenants.get((row.slot, row.epoch))
            if request is None:  # admitted and done within one step
                continue
            self.lane.step.append(self._num_steps)
            self.lane.request.append(request)
            self.lane.kind.append(row.kind.name.lower())
            self.lane.tokens.append(row.num_tokens)
            self.lane.accepted.append(row_result.num_accepted if row.kind is RowKind.VERIFY else 0)


def columns(record: Cycles | SwimLane | StepTimes) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def summed(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Entry by entry."""
    total = [0] * max(map(len, histograms), default=0)
    for histogram in histograms:
        for i, n in enumerate(histogram):
            total[i] += n
    return total


def _histogram(values: Sequence[int]) -> list[int]:
    counts = [0] * (max(values, default=-1) + 1)
    for value in values:
        counts[value] += 1
    return counts
