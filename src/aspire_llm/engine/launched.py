"""A step that is on its way: its results are fetched when somebody asks, and only then does the host wait."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aspire_llm.request import RowKind, TokenLogprobs
from aspire_llm.sampling.batch import SampleOutput
from aspire_llm.scheduler.plan import RowResult, StepPlan, StepResult


class StepClock:
    """Seconds that a step takes: on the device's own clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._start = time.perf_counter()
        self._seconds = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._events = (begin, end)
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
    """Results lie in buffers of this step alone (pinned, on a GPU), so that no later step can overwrite them."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: SampleOutput | None,
        row_reads: Tensor,  # int64 [≥ R]
        prompts: Mapping[int, Sequence[TokenLogprobs]],
        num_layers: int,
        clock: StepClock,
    ) -> None:
        self._plan = plan
        self._sampled = sampled
        self._prompts = prompts
        self._num_layers = num_layers
        self._clock = clock
        wanted = (
            [row_reads] if sampled is None else [row_reads, sampled.tokens, sampled.num_emitted, sampled.confidence]
        )
        self._fetched = [fetch(tensor) for tensor in wanted]
        clock.stop()

    def result(self) -> StepResult:
        """Waits for the step; call it once."""
        seconds = self._clock.wait()
        reads, *sampled = (tensor.tolist() for tensor in self._fetched)
        by_kind: dict[RowKind, int] = defaultdict(int)
        checked = 0
        for row, read in zip(self._plan.rows, reads, strict=False):
            by_kind[row.kind] += read
            checked += read if row.kind is RowKind.VERIFY and row.num_tokens > 1 else 0
        rows = self._rows(*sampled) if sampled else self._rows([], [], [])
        return StepResult(rows, seconds, dict(by_kind), self._num_layers, checked)

    def _rows(self, tokens: list[list[int]], emitted: list[int], confidence: list[float]) -> tuple[RowResult, ...]:
        results = []
        j = 0
        for i, row in enumerate(self._plan.rows):
            result = RowResult(row.slot, row.epoch)
            if self._prompts:
                result.prompt_logprobs = tuple(self._prompts.get(i, ()))
            if row.samples and self._sampled is not None:
                result.token_ids = tuple(tokens[j][: emitted[j]])
                result.confidence = confidence[j]
                if row.kind is RowKind.VERIFY:
                    result.num_accepted = emitted[j] - 1
                if self._sampled.logprobs:
                    result.logprobs = tuple(self._sampled.logprobs.get(j, ()))
                if self._sampled.errors:
                    result.error = self._sampled.errors.get(j)
                j += 1
            results.append(result)
        return tuple(results)


def fetch(tensor: Tensor) -> Tensor:
    """The tensor on the host; on a GPU its copy is only queued."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
