"""What every policy that decides for each request by itself shares: the cost of its rows, and the bound on verifications."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from aspire_llm.policy.base import Action, CycleOutcome, RequestView, StepLoad
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.rows import DRAFT, VERIFY, HostPace, RowCosts, VerifyBound, VerifyTogether

TOGETHER_KEEP = 0.95  # of the past, each step with a verification of drafts
PROBE_SHARE = 0.01  # of plain decoding's time may go into finding out whether drafts would pay again


class PerRequestPolicy(ABC):
    """Asks whether each request wants a draft; keeps the cost model right; spreads verifications."""

    def __init__(self, cost: CostModel, reads: ReadModel, max_verify_tokens: int | None = None) -> None:
        self._cost = cost
        self._reads = reads
        self._bound = VerifyBound(max_verify_tokens)
        self._pace = HostPace()
        self._waiting = VerifyTogether()
        self._together = 1.0  # verifications of drafts in a step that has any, smoothed
        self._credit: dict[int, float] = {}  # seconds saved up for the next probe
        self._probes: dict[int, float] = {}  # seconds spent on the probe under way

    def decide(self, requests: Sequence[RequestView], prefill: StepLoad) -> list[Action]:
        costs = RowCosts.of_step(
            self._cost,
            self._reads,
            len(requests),
            prefill,
            self._pace.seconds,
            sum([view.length for view in requests]) / max(1, len(requests)),
            self._together,
        )
        may = [view.pending < view.max_draft for view in requests]
        asked = requests if all(may) else [view for view, draft in zip(requests, may, strict=True) if draft]
        wanted = iter(self._want_drafts(asked, costs) if asked else ())
        actions = [DRAFT if draft and next(wanted) else VERIFY for draft in may]
        actions = self._bound.apply(requests, self._wait(requests, actions, costs.idle))
        asking = self._asking(requests, actions)
        if asking:
            self._together += (1.0 - TOGETHER_KEEP) * (len(asking) - self._together)
        return actions

    def _asking(self, requests: Sequence[RequestView], actions: Sequence[Action]) -> list[int]:
        """The requests whose drafts are to be verified, by place."""
        return [i for i, action in enumerate(actions) if action is VERIFY and requests[i].pending]

    def _wait(self, requests: Sequence[RequestView], actions: list[Action], idle: float) -> list[Action]:
        """Let requests that want a verification draft on, where the step is better off without any. idle: see `RowCosts`:
        where the device would wait for its host, verifications fill that time, and are best spread over all steps."""
        verify_step = self._cost.verify_step - idle
        if verify_step <= 0.0:
            return actions
        asking = self._asking(requests, actions)
        if not self._waiting.waits(verify_step, sum([self._loss(requests[i]) for i in asking])):
            return actions
        for i in asking:
            actions[i] = DRAFT
        return actions

    def _loss(self, view: RequestView) -> float:
        """Seconds lost if a request that wants its drafts verified drafts on instead; infinite where it cannot, or where the
        policy does not know."""
        return math.inf

    def _want_drafts(self, views: Sequence[RequestView], costs: RowCosts) -> Sequence[bool]:
        """`_wants_draft` of one request at least: for a policy that can answer for all at once."""
        return [self._wants_draft(view, costs) for view in views]

    @abstractmethod
    def _wants_draft(self, view: RequestView, costs: RowCosts) -> bool:
        """Whether one more draft is worth more than verifying now; asked only where one is allowed."""

    def _may_probe(self, view: RequestView, costs: RowCosts) -> bool:
        """Where plain decoding is best by what is known of a request, a draft now and then tells whether it still is.

        Each plain step saves up PROBE_SHARE of its time; a draft is made when that pays for it. One that was right has
        paid for itself and the next follows at once. Never where even an accepted draft costs more than a plain token.
        """
        draft, plain = costs.draft(view.length, 0), costs.verify(view.length)
        if draft >= plain:
            return False
        credit = self._credit.get(view.key, 0.0) + PROBE_SHARE * plain
        if credit < draft:
            self._credit[view.key] = credit
            return False
        self._credit[view.key], self._probes[view.key] = 0.0, draft
        return True

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        if outcome.drafted:
            spent = self._probes.pop(outcome.key, 0.0)
            if spent and outcome.accepted == outcome.drafted:
                self._credit[outcome.key] = self._credit.get(outcome.key, 0.0) + spent

    def observe_step(self, load: StepLoad) -> None:
        self._cost.observe(load)
        self._pace.observe(load)

    def forget(self, key: int) -> None:
        self._credit.pop(key, None)
        self._probes.pop(key, None)
        self._bound.forget(key)
