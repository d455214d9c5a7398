"""What a row costs at the margin, and the bound on verify tokens: all that policies share about a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aspire_llm.errors import UserError
from aspire_llm.policy.base import Action, RequestView, StepLoad
from aspire_llm.policy.cost import CostModel, ReadModel


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Seconds that a request's row adds to a step: its tokens, its KV reads, and its share of the fixed part.

    The fixed part is shared by the decoding requests and, if any prefill rides along, by that as one more. Where the cost
    model has a hinge, a token costs what the average token of a step does; a batch that drafts has about two tokens a
    request and step (g drafts and g + 1 verified in g + 1 steps).
    """

    share: float
    per_token: float
    per_kv: float
    reads: ReadModel
    per_check: float = 0.0

    @classmethod
    def of_step(cls, cost: CostModel, reads: ReadModel, num_requests: int, prefill: StepLoad) -> RowCosts:
        tokens = prefill.tokens + 2.0 * num_requests
        charged = max(0.0, 1.0 - cost.free_tokens / tokens) if tokens else 1.0
        share = cost.fixed / max(1, num_requests + (prefill.tokens > 0))
        return cls(share, cost.per_token * charged, cost.per_kv, reads, cost.per_check)

    def draft(self, length: int, pending: int) -> float:
        """One more draft: its DRAFT row now and its token in the verification to come."""
        return self.share + 2.0 * self.per_token + self.per_kv * self.reads.draft(length, pending + 1)

    def verify(self, length: int) -> float:
        """A verification of no drafts: a plain token."""
        return self.share + self.per_token + self.per_kv * self.reads.verify(length)

    def check(self, length: int) -> float:
        """A verification of drafts; its tokens beyond the first are counted with the drafts they check."""
        return self.verify(length) + self.per_check * self.reads.verify(length)


class VerifyBound:
    """At most `limit` tokens a step in verifications with drafts, so that they do not bunch; the longest deferred go first.

    A deferred request drafts on if it may, else it waits. Plain decoding (nothing pending) is never deferred, and one
    verification always goes, so nothing starves.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise UserError(f"max_verify_tokens {limit}: allowed are 1 and more, or none", "max_verify_tokens")
        self._limit = limit
        self._deferred: dict[int, int] = {}

    def apply(self, requests: Sequence[RequestView], actions: list[Action]) -> list[Action]:
        if self._limit is None:
            return actions
        asking = [i for i, a in enumerate(actions) if a is Action.VERIFY and requests[i].pending]
        asking.sort(key=lambda i: (-self._deferred.get(requests[i].key, 0), -requests[i].pending))
        room, first = self._limit, True
        for i in asking:
            view = requests[i]
            if first or view.pending + 1 <= room:
                room -= view.pending + 1
                self._deferred.pop(view.key, None)
                first = False
            else:
                self._deferred[view.key] = self._deferred.get(view.key, 0) + 1
                actions[i] = Action.DRAFT if view.pending < view.max_draft else Action.WAIT
        return actions

    def forget(self, key: int) -> None:
        self._deferred.pop(key, None)
