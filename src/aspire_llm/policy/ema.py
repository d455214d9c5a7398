"""ASPIRE's policy: the best draft length for an exponentially smoothed acceptance rate."""

from __future__ import annotations

from aspire_llm.policy.acceptance import SmoothedRate, expected_tokens
from aspire_llm.policy.base import CycleOutcome, RequestView
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.per_request import PerRequestPolicy
from aspire_llm.policy.rows import RowCosts

PRIOR = 0.9  # acceptance rate before anything is known; about the middle of the recorded workloads
PRIOR_DRAFTS = 20.0  # how many drafts that is worth
KEEP = 0.85  # of a request's past, each cycle; of the batch's, ten times slower


def best_length(rate: float, draft: float, verify: float, longest: int, plain: float) -> int:
    """argmax over g of (1 + a + … + a^g) / (g · draft + verify); 0 where `plain`, a token without drafts, is cheaper. The
    quotient rises to its maximum and then only falls."""
    best, most = 0, 1.0 / verify
    for drafts in range(1, longest + 1):
        value = expected_tokens(rate, drafts) / (drafts * draft + verify)
        if value <= most:
            break
        best, most = drafts, value
    return best if most > 1.0 / plain else 0


class Ema(PerRequestPolicy):
    """g* = argmax_g E[tokens of g drafts at rate a] / (g · cost of a draft + cost of a verification), chosen once a cycle.

    a is the request's smoothed acceptance rate (`SmoothedRate`), seeded by the batch's; the costs are the cost
    model's, the fixed part shared by the rows of the step (ASPIRE, the paper's estimator and cost model).
    """

    def __init__(self, cost: CostModel, reads: ReadModel, max_verify_tokens: int | None = None) -> None:
        super().__init__(cost, reads, max_verify_tokens)
        self._batch = SmoothedRate(PRIOR, PRIOR_DRAFTS, 1.0 - (1.0 - KEEP) / 10.0)
        self._rates: dict[int, SmoothedRate] = {}
        self._targets: dict[int, int] = {}

    def _rate(self, key: int) -> SmoothedRate:
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = SmoothedRate(self._batch.value, PRIOR_DRAFTS, KEEP)
        return rate

    def _wants_draft(self, view: RequestView, costs: RowCosts) -> bool:
        if not view.pending or view.key not in self._targets:
            draft, plain = costs.draft(view.length, view.pending), costs.verify(view.length)
            target = best_length(
                self._rate(view.key).value, draft, costs.check(view.length), view.max_draft, plain=plain
            )
            if not target and self._may_probe(view, costs):
                target = 1
            self._targets[view.key] = target
        return view.pending < self._targets[view.key]

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        if outcome.key not in self._targets:
            return  # it has left, or was never asked about
        super().observe_cycle(outcome)
        self._rate(outcome.key).observe(outcome.drafted, outcome.accepted)
        self._batch.observe(outcome.drafted, outcome.accepted)

    def forget(self, key: int) -> None:
        super().forget(key)
        self._rates.pop(key, None)
        self._targets.pop(key, None)
