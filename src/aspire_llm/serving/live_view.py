"""What the live page shows: the last steps of every running request and the rates of the engine. Bounded, and no text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aspire_llm.engine.engine import Engine, Step
from aspire_llm.policy.base import StepLoad
from aspire_llm.request import Request, RowKind
from aspire_llm.scheduler.plan import Row, RowResult, StepPlan, StepResult

HISTORY = 400  # steps kept of a request
ENDED = 64  # requests that may end between two frames and still be shown
WINDOW = 3.0  # seconds that rates are taken over
PACES = 4096  # most steps of that window
CYCLES = 512  # verifications in the distributions

Cell = tuple[int, int, int, float]
"""step, RowKind, tokens in the forward, and: PREFILL its first position, DRAFT its confidence, VERIFY drafts accepted."""


@dataclass(slots=True)
class Lane:
    """A request and what it did in the last steps."""

    request: Request
    cells: deque[Cell] = field(default_factory=lambda: deque(maxlen=HISTORY))
    num_fresh: int = 0  # of these, not yet in a frame
    decoding: bool = False  # its newest row was a DRAFT or VERIFY

    def add(self, cell: Cell) -> None:
        self.cells.append(cell)
        self.num_fresh = min(self.num_fresh + 1, HISTORY)

    def as_json(self, *, whole: bool) -> dict[str, Any]:
        request = self.request
        first = 0 if whole else len(self.cells) - self.num_fresh
        return {
            "key": request.key,
            "id": request.request_id,
            "prompt": len(request.prompt_token_ids),
            "output": len(request.output_token_ids),
            "max": request.params.max_tokens,
            "waiting": request.slot is None and not request.finished,  # preempted
            "ended": request.finish_reason,
            "cells": list(self.cells)[first:],
        }


@dataclass(frozen=True, slots=True)
class Pace:
    """One step's part in the rates; predictions in seconds, None without a cost model."""

    time: float
    tokens: int  # given to requests
    prompt_tokens: int
    seconds: float
    predicted: float | None
    decode_predicted: float | None  # the step without its prefill rows
    plain_predicted: float | None  # plain decoding to the same tokens

    @staticmethod
    def total(values: Iterator[float | None]) -> float | None:
        """Sum, or None if one is."""
        total = 0.0
        for value in values:
            if value is None:
                return None
            total += value
        return total


class RecentCycles:
    """Draft lengths and acceptance by position of the last verifications."""

    def __init__(self) -> None:
        self._cycles: deque[tuple[int, int]] = deque()

    def add(self, drafted: int, accepted: int) -> None:
        self._cycles.append((drafted, accepted))
        if len(self._cycles) > CYCLES:
            self._cycles.popleft()

    def as_json(self) -> dict[str, Any]:
        """lengths[g]: verifications of g drafts. drafted_at[i], accepted_at[i]: times draft i was verified, accepted."""
        longest = max((drafted for drafted, _ in self._cycles), default=0)
        lengths, ends = [0] * (longest + 1), [0] * (longest + 1)
        for drafted, accepted in self._cycles:
            lengths[drafted] += 1
            ends[accepted] += 1
        return {
            "lengths": lengths,
            "drafted_at": [sum(lengths[i + 1 :]) for i in range(longest)],
            "accepted_at": [sum(ends[i + 1 :]) for i in range(longest)],
            # as everywhere: over verifications that had drafts
            "mean_accepted": 1.0 + sum(a for _, a in self._cycles) / n if (n := sum(lengths[1:])) else None,
        }


class LiveView:
    """Follows an engine from its steps. Not thread-safe: its owner holds a lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lanes: dict[int, Lane] = {}  # by request key
        self._in_slot: dict[int, tuple[int, Lane]] = {}  # slot -> (epoch, tenant)
        self._ended: deque[Lane] = deque(maxlen=ENDED)  # since the last frame
        self._paces: deque[Pace] = deque(maxlen=PACES)
        self._cycles = RecentCycles()
        self._num_steps = 0

    # ---- from the engine

    def add(self, step: Step, now: float) -> None:
        """A finished step. Call before the engine's next one: requests are read as the step left them."""
        if step.plan is None or step.result is None:
            return
        self._num_steps = step.plan.step + 1
        tenants = [self._tenant(row) for row in step.plan.rows]
        for row, lane in zip(step.plan.rows, tenants, strict=True):
            if lane is not None:
                lane.decoding = row.kind is not RowKind.PREFILL
        new_tokens = {p.request.key: p.num_new_tokens for p in step.progress}
        self._paces.append(self._pace(step.plan, step.result, tenants, new_tokens, now))
        for row, result, lane in zip(step.plan.rows, step.result.rows, tenants, strict=True):
            if lane is not None and result.error is None:
                lane.add(_cell(step.plan.step, row, result))
                if row.kind is RowKind.VERIFY:
                    self._cycles.add(row.num_tokens - 1, result.num_accepted)
        self._sweep()

    def _tenant(self, row: Row) -> Lane | None:
        """The lane of a row's request; None for one that has left, or that came and went within one step."""
        epoch, lane = self._in_slot.get(row.slot, (-1, None))
        if lane is not None and epoch == row.epoch:
            # a late result of a request that was preempted meanwhile was dropped
            return lane if lane.request.slot == row.slot or lane.request.finished else None
        for request in self._engine.scheduler.running:
            if request.slot == row.slot and request.epoch == row.epoch:
                lane = self._lanes.setdefault(request.key, Lane(request))
                self._in_slot[row.slot] = (row.epoch, lane)
                return lane
        return None

    def _pace(
        self,
        plan: StepPlan,
        result: StepResult,
        tenants: list[Lane | None],
        new_tokens: dict[int, int],
        now: float,
    ) -> Pace:
        rows = list(zip(plan.rows, tenants, strict=True))
        prompt_tokens = sum(row.num_tokens for row in plan.rows if row.kind is RowKind.PREFILL)
        predicted = decode = plain = None
        cost = self._engine.cost
        if cost is not None:
            load = StepLoad(plan.num_tokens, result.mean_kv_tokens, checked_kv=result.mean_checked_kv)
            predicted = cost.predict(load)
            batch = [lane.request for lane in self._lanes.values() if lane.decoding]
            decode = plain = 0.0
            if batch and len(plan.rows) > sum(row.kind is RowKind.PREFILL for row in plan.rows):
                read = sum(n for kind, n in result.kv_tokens_read.items() if kind is not RowKind.PREFILL)
                tokens, checked = plan.num_tokens - prompt_tokens, result.mean_checked_kv
                decode = cost.predict(StepLoad(tokens, read / result.num_layers, checked_kv=checked))
                # plain decoding would give every request of the batch one token a step, reading all of it
                plain_step = cost.predict(StepLoad(len(batch), sum(r.num_tokens for r in batch)))
                emitted = sum(
                    new_tokens.get(lane.request.key, 0)
                    for row, lane in rows
                    if lane is not None and row.kind is RowKind.VERIFY
                )
                plain = plain_step * emitted / len(batch)
        return Pace(now, sum(new_tokens.values()), prompt_tokens, result.seconds, predicted, decode, plain)

    def _sweep(self) -> None:
        """Requests that have ended leave their lanes; preempted ones keep them."""
        for key in [key for key, lane in self._lanes.items() if lane.request.finished]:
            self._ended.append(self._lanes.pop(key))
        for slot in [slot for slot, (_, lane) in self._in_slot.items() if lane.request.finished]:
            del self._in_slot[slot]
        for lane in self._lanes.values():
            if lane.request.slot is None:
                lane.decoding = False

    # ---- to the page

    def frame(self, now: float, *, whole: bool) -> dict[str, Any]:
        """The state now: with every kept cell (whole), or with what came since the last frame that was not whole."""
        self._sweep()  # requests aborted while the engine slept
        while self._paces and self._paces[0].time < now - WINDOW:
            self._paces.popleft()
        scheduler = self._engine.scheduler
        pages = scheduler.pages
        lanes = list(self._lanes.values())
        if not whole:
            lanes += self._ended
        body = {
            "steps": self._num_steps,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "preemptions": scheduler.num_preemptions,
            "max_running": scheduler.limits.max_num_seqs,
            "kv": {
                "tokens": (pages.num_pages - pages.num_free) * pages.page_size,
                "room": pages.num_pages * pages.page_size,
            },
            **self._rates(),
            **self._cycles.as_json(),
            "lanes": [lane.as_json(whole=whole) for lane in lanes],
        }
        if not whole:
            self._ended.clear()
            for lane in self._lanes.values():
                lane.num_fresh = 0
        return body

    def _rates(self) -> dict[str, float | bool | None]:
        """Over the steps of the window; None where there were none, or no cost model."""
        paces = self._paces
        span = WINDOW
        if paces:  # a window that is not full yet counts from the start of its first step
            span = min(WINDOW, max(paces[-1].time - paces[0].time + paces[0].seconds, 0.2))
        decode = Pace.total(pace.decode_predicted for pace in paces)
        plain = Pace.total(pace.plain_predicted for pace in paces)
        predicted = Pace.total(pace.predicted for pace in paces)
        seconds = sum(pace.seconds for pace in paces)
        return {
            "tokens_per_s": round(sum(pace.tokens for pace in paces) / span, 1),
            "prompt_tokens_per_s": round(sum(pace.prompt_tokens for pace in paces) / span, 1),
            "has_cost_model": self._engine.cost is not None,
            "speed_up": round(plain / decode, 3) if plain is not None and decode else None,
            "step_seconds": seconds / len(paces) if paces else None,
            "step_seconds_predicted": predicted / len(paces) if paces and predicted is not None else None,
        }


def _cell(step: int, row: Row, result: RowResult) -> Cell:
    if row.kind is RowKind.PREFILL:
        return step, int(row.kind), row.num_tokens, row.start
    if row.kind is RowKind.DRAFT:
        return step, int(row.kind), 1, round(result.confidence, 3)
    return step, int(row.kind), row.num_tokens, result.num_accepted
