"""A step that is on its way: its results are fetched when somebody asks, and only then does the host wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from aspire_llm.engine.columns import Columns, Ints
from aspire_llm.engine.finish import Finished
from aspire_llm.request import RowKind, TokenLogprobs
from aspire_llm.scheduler.plan import RowResult, StepPlan, StepResult


class StepClock:
    """Seconds that a step takes: on the device's own clock where it has one, and then without the host's preparations, which
    a device that is waiting for them would count as its own."""

    def __init__(self, device: torch.device) -> None:
        self._start = time.perf_counter()
        self._seconds = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._events = (begin, end)

    def begin(self) -> None:
        """The forward is about to be queued."""
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> None:
        """The step's last work is queued (on the CPU: done)."""
        if self._events is not None:
            self._events[1].record()
        else:
            self._seconds = time.perf_counter() - self._start

    def wait(self) -> float:
        if self._events is None:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


class Launched:
    """Results go to a buffer of this step alone (pinned, on a GPU), so that no later step can overwrite them."""

    def __init__(
        self,
        plan: StepPlan,
        columns: Columns,
        finished: Finished,
        prompts: Mapping[int, Sequence[TokenLogprobs]],
        num_layers: int,
        clock: StepClock,
    ) -> None:
        self._plan = plan
        self._columns = columns
        self._sampled = finished.sampled
        self._prompts = prompts
        self._num_layers = num_layers
        self._clock = clock
        self._fetched = finished.for_host.fetch()
        clock.stop()

    def result(self) -> StepResult:
        """Waits for the step; call it once."""
        seconds = self._clock.wait()
        reads, *sampled = (tensor.numpy() for tensor in self._fetched)
        by_kind, checked = self._reads(reads)
        results = self._results(*sampled) if sampled else [RowResult(row.slot, row.epoch) for row in self._plan.rows]
        for i, logprobs in self._prompts.items():
            results[i].prompt_logprobs = tuple(logprobs)
        return StepResult(tuple(results), seconds, by_kind, self._num_layers, checked)

    def _reads(self, reads: Ints) -> tuple[dict[RowKind, int], int]:
        """KV tokens read, by kind of row; and those of verifications of drafts."""
        rows = self._columns
        reads = reads[: len(rows.kinds)]
        sums = np.bincount(rows.kinds, reads, len(RowKind)).tolist()  # as floats, which hold such counts exactly
        by_kind = {kind: int(total) for kind, total in zip(RowKind, sums, strict=True) if total}
        return by_kind, int(reads[rows.verifies & (rows.counts > 1)].sum())

    def _results(self, tokens: Ints, num_emitted: Ints, confidence: NDArray[np.float32]) -> list[RowResult]:
        """Of all rows, from what those that sample gave, in their order."""
        assert self._sampled is not None
        samples, rows = self._columns.samples, self._plan.rows
        count = int(samples.sum())
        tokens, num_emitted, confidence = tokens[:count], num_emitted[:count], confidence[:count]
        accepted = (num_emitted - 1).tolist()  # of a draft and of a prompt's token: none
        given = emitted_tokens(tokens, num_emitted), accepted, confidence.tolist()
        if samples.all():
            sampling = results = [
                RowResult(row.slot, row.epoch, ids, held, sure)
                for row, ids, held, sure in zip(rows, *given, strict=True)
            ]
        else:
            results = [RowResult(row.slot, row.epoch) for row in rows]
            sampling = [results[i] for i in np.flatnonzero(samples).tolist()]
            for result, ids, held, sure in zip(sampling, *given, strict=True):
                result.token_ids, result.num_accepted, result.confidence = ids, held, sure
        for i, logprobs in self._sampled.logprobs.items():
            sampling[i].logprobs = tuple(logprobs)
        for i, error in self._sampled.errors.items():
            sampling[i].error = error
        return results


def emitted_tokens(tokens: Ints, num_emitted: Ints) -> list[tuple[int, ...]]:
    """The first num_emitted [R] of each row of tokens [R, widest]."""
    emitted: list[tuple[int, ...]] = list(zip(tokens[:, 0].tolist()))  # most rows have one
    others = np.flatnonzero(num_emitted != 1)
    for i, ids, n in zip(others.tolist(), tokens[others].tolist(), num_emitted[others].tolist(), strict=True):
        emitted[i] = tuple(ids[:n])
    return emitted
