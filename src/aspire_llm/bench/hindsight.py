"""The truth that policy `hindsight` is told on the real engine: what plain decoding of the same prompts gave, or, where
acceptance is replayed, what the trace says."""

from __future__ import annotations

from collections.abc import Sequence

from aspire_llm.bench.replay import place_in_trace
from aspire_llm.engine.engine import Step
from aspire_llm.policy.trace import Trace
from aspire_llm.request import Request, RowKind


class PlainContinuations:
    """A `policy.hindsight.Truth`: compares each request's pending drafts with plain decoding's tokens.

    `begin` before a run; then it must see every step, before the next one is planned.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # by key
        self._tokens: dict[int, Sequence[int]] = {}  # plain decoding's, by key
        self._drafts: dict[int, list[int]] = {}  # of the present cycle, by key
        self._epochs: dict[int, int] = {}  # in which they were made; a preempted request has lost them

    def begin(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> None:
        """`tokens[i]`: what plain decoding gives for `requests[i]`."""
        self._requests = {request.key: request for request in requests}
        self._tokens = {request.key: known for request, known in zip(requests, tokens, strict=True)}
        self._drafts = {request.key: [] for request in requests}
        self._epochs = dict.fromkeys(self._requests, 0)

    def __call__(self, step: Step) -> None:
        if step.plan is None or step.result is None:
            return
        tenants = {request.slot: request for request in self._requests.values() if request.slot is not None}
        for row, result in zip(step.plan.rows, step.result.rows, strict=True):
            request = tenants.get(row.slot)
            if request is None or request.epoch != row.epoch:  # it has finished, or was preempted
                continue
            if row.kind is not RowKind.DRAFT or self._epochs[request.key] != row.epoch:
                self._drafts[request.key].clear()
            self._epochs[request.key] = row.epoch
            if row.kind is RowKind.DRAFT:
                self._drafts[request.key].extend(result.token_ids)

    def all_right(self, key: int, pending: int) -> bool:
        start = len(self._requests[key].output_token_ids)
        return self._drafts[key][:pending] == list(self._tokens[key][start : start + pending])


class TraceContinuations:
    """A `policy.hindsight.Truth`: which drafts the `ReplaySampler` of the same trace will accept. `begin` before a run."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # by key
        self._trace: Trace | None = None

    def begin(self, requests: Sequence[Request], trace: Trace) -> None:
        self._requests = {request.key: request for request in requests}
        self._trace = trace

    def all_right(self, key: int, pending: int) -> bool:
        assert self._trace is not None
        request = self._requests[key]
        source, first = place_in_trace(request.seed, self._trace.num_requests, len(self._trace.drafts[0]))
        drafts = self._trace.drafts[source]
        start = first + (len(request.output_token_ids) - 1) // self._trace.stride
        return drafts[start % len(drafts)].accepted >= pending
