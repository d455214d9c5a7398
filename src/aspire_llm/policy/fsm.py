"""ASPIRE-FSM: a finite-state machine of draft lengths for each request."""

from __future__ import annotations

from aspire_llm.policy.base import CycleOutcome, RequestView
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.per_request import PerRequestPolicy
from aspire_llm.policy.rows import RowCosts

FIRST = 4
STEP = 2


class Fsm(PerRequestPolicy):
    """g ← g + 2 after a cycle whose drafts were all accepted, g ← max(1, g - 2) after one with a rejection (the ASPIRE
    paper's variant without estimates: "on full acceptance lengthen, on rejection shorten"; the steps are ours).

    No plain decoding by acceptance, but where a draft costs as much as a plain token there is none.
    """

    def __init__(self, cost: CostModel, reads: ReadModel, max_verify_tokens: int | None = None) -> None:
        super().__init__(cost, reads, max_verify_tokens)
        self._lengths: dict[int, int] = {}

    def _wants_draft(self, view: RequestView, costs: RowCosts) -> bool:
        if costs.draft(view.length, view.pending) >= costs.verify(view.length):
            return False
        return view.pending < self._lengths.setdefault(view.key, FIRST)

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        if not outcome.drafted or outcome.key not in self._lengths:
            return
        length = self._lengths[outcome.key]
        if outcome.accepted < outcome.drafted:
            self._lengths[outcome.key] = max(1, length - STEP)
        elif outcome.drafted >= length:  # a cycle cut short by its limits says nothing about longer ones
            self._lengths[outcome.key] = outcome.drafted + STEP

    def forget(self, key: int) -> None:
        super().forget(key)
        self._lengths.pop(key, None)
