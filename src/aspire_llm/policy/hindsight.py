"""The upper bound: told the true continuation."""

from __future__ import annotations

from typing import Protocol

from aspire_llm.policy.base import RequestView
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.per_request import PerRequestPolicy
from aspire_llm.policy.rows import RowCosts


class Truth(Protocol):
    """Knows what plain decoding says. The simulator is one; the engine builds one from a plain run."""

    def all_right(self, key: int, pending: int) -> bool:
        """Whether the first `pending` drafts of the request's present cycle are what plain decoding says."""
        ...


class Hindsight(PerRequestPolicy):
    """Verifies exactly when a draft has gone wrong or the most drafts are pending: each cycle drafts accepted + 1 tokens,
    which is all that a policy told nothing in advance could hope for. None where a draft costs as much as a plain token.
    """

    def __init__(self, cost: CostModel, reads: ReadModel, truth: Truth) -> None:
        super().__init__(cost, reads)
        self._truth = truth

    def _wants_draft(self, view: RequestView, costs: RowCosts) -> bool:
        if costs.draft(view.length, view.pending) >= costs.verify(view.length):
            return False
        return self._truth.all_right(view.key, view.pending)
