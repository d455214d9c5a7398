"""The engine loop: plan, run, apply."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aspire_llm.engine.launched import Launched
from aspire_llm.engine.runner import Runner
from aspire_llm.policy.cost import CostModel
from aspire_llm.request import Request
from aspire_llm.scheduler.plan import StepPlan, StepResult
from aspire_llm.scheduler.scheduler import Progress, Scheduler


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of `Engine.step` did. Before the first result of a late engine there is none."""

    progress: list[Progress]
    plan: StepPlan | None = None
    result: StepResult | None = None


class Engine:
    """Owns a scheduler and a runner, and no state of its own but the steps in flight.

    `late` results are applied one step after they were made, as on a device that runs a step while the next one is
    planned; tokens are the same.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, late: bool = False, cost: CostModel | None = None
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.cost = cost  # the policy's cost model, to be read; None where it has none
        self._late = late
        self._in_flight: list[tuple[StepPlan, Launched | Exception]] = []
        self._last_result: float | None = None  # when it came; None: the engine has been idle since

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if it can never run; nothing is queued then."""
        self.validate([request])
        self.scheduler.add(request)

    def validate(self, requests: Sequence[Request]) -> None:
        """Raise UserError if any of the requests can never run. Changes nothing."""
        for request in requests:
            self.scheduler.validate(request)
            self.runner.sampler.validate(request.params)

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> Step:
        """Launch one forward pass over every request that has something to do, and apply the oldest results that are due."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append((plan, self._launch(plan)))
        if not self._in_flight or (self._late and plan is not None and len(self._in_flight) < 2):
            return Step([])
        done, launched = self._in_flight.pop(0)
        began = time.perf_counter()
        result = launched if isinstance(launched, Exception) else self._fetch(launched)
        if isinstance(result, Exception):
            return Step(self.scheduler.fail(done, f"{type(result).__name__}: {result}"), done)
        takes_prompts = done.takes_prompts or (plan is not None and plan.takes_prompts)
        result = self._timed(result, began, decodes=not takes_prompts)
        progress = self.scheduler.apply(done, result)
        if not self.scheduler.has_work:
            self._last_result = None
        return Step(progress, done, result)

    def _timed(self, result: StepResult, asked: float, *, decodes: bool) -> StepResult:
        """With the host's time in it: what passed since the last result, until this one was asked for. A late engine's device
        was busy meanwhile; another's was not, so there it is part of the step. decodes: the host had no prompts to take in,
        which says nothing about its pace without any."""
        now, last = time.perf_counter(), self._last_result
        self._last_result = now
        if last is None or result.seconds <= 0.0:
            return result
        if self._late:
            return replace(result, host_seconds=asked - last if decodes else 0.0)
        return replace(result, seconds=max(result.seconds, now - last))

    # out of memory, say: the step's requests end, the engine goes on

    def _launch(self, plan: StepPlan) -> Launched | Exception:
        try:
            return self.runner.launch(plan)
        except (RuntimeError, MemoryError) as error:
            return error

    def _fetch(self, launched: Launched) -> StepResult | Exception:
        try:
            return launched.result()
        except (RuntimeError, MemoryError) as error:
            return error

    def check(self) -> None:
        """Integrity of pages, slots and counters; AssertionError names what is wrong."""
        self.scheduler.check()
