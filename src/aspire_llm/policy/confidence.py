"""Ours: stop drafting when the next draft is no longer worth its cost, judged by the confidences of those pending.

Optimal stopping at a price. A request's cycles cost seconds C (its rows, the fixed part shared) and bring tokens N; the most
tokens a second come from maximising E[N] - p·C at the price p that makes the maximum zero (Dinkelbach 1967). With S the
probability that all pending drafts are right, a the acceptance of the next draft and d its cost, one more draft gains
    S·a - p·d + E_b[max(0, S·(1 - h_b)·a_b - p·d)]
tokens: its own, and the best of stopping or going on once its confidence bin b is seen (two-step look-ahead; h_b: rejection
of a draft of that bin). Draft while that is positive. S, h, a and the distribution of b come from `Calibration`. A draft
whose confidence has not come back yet (results one step late) enters S by its expectation over b.

The price is the request's own tokens a second, smoothed, with the batch's as prior and plain decoding's as floor. Its own,
because each request has its tokens to make whatever the others do: the batch's total time is the sum of the requests'.
Both are kept in units of a plain token's cost, so that they hold on when contexts grow or a batch of other lengths comes.
"""

from __future__ import annotations

from aspire_llm.policy.base import CycleOutcome, RequestView
from aspire_llm.policy.calibration import START, Calibration, DraftOdds, bin_of
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.per_request import PerRequestPolicy
from aspire_llm.policy.rows import RowCosts

PRICE_KEEP = 0.95  # of a request's past, each cycle: it remembers about 20; the batch's, 50 times more
PRIOR_CYCLES = 5.0  # plain tokens' worth of time that the batch's price counts for a request
BATCH_KEEP = 0.999
PRIOR_DRAFTS = 4.0


class _Rate:
    """Tokens in the time of one plain token, smoothed over cycles."""

    __slots__ = ("times", "tokens")

    def __init__(self) -> None:
        self.tokens = self.times = 0.0

    def add(self, tokens: float, times: float, keep: float) -> None:
        self.tokens = keep * self.tokens + tokens
        self.times = keep * self.times + times


class _Cycle:
    """The pending drafts of a request, as far as their confidences are known."""

    __slots__ = ("last", "odds", "seen", "survival")

    def __init__(self, odds: DraftOdds) -> None:
        self.odds = odds
        self.seen = 0
        self.survival = 1.0
        self.last = START


class Confidence(PerRequestPolicy):
    """See the module."""

    def __init__(self, cost: CostModel, reads: ReadModel, max_verify_tokens: int | None = None) -> None:
        super().__init__(cost, reads, max_verify_tokens)
        self._calibration = Calibration()
        self._cycles: dict[int, _Cycle] = {}
        self._batch_rate = _Rate()
        self._rates: dict[int, _Rate] = {}
        # in the last step: of a draft, of a plain verification and of one of drafts
        self._last_costs: dict[int, tuple[float, float, float]] = {}
        self._mean_drafts = PRIOR_DRAFTS  # of the batch's cycles
        self._last_prices: dict[int, float] = {}

    def _wants_draft(self, view: RequestView, costs: RowCosts) -> bool:
        key = view.key
        draft, verify, check = self._last_costs[key] = costs.of_row(view.length, view.pending)
        price = self._last_prices[key] = self._price(key, verify)
        cycle = self._cycles.get(key)
        known = view.confidences
        if cycle is None:
            cycle = self._cycles[key] = _Cycle(self._calibration.odds(key))
        elif len(known) < cycle.seen:  # verified, its outcome still to come; or preempted
            cycle = self._cycles[key] = _Cycle(cycle.odds)
        odds = cycle.odds
        for i in range(cycle.seen, len(known)):
            cycle.last = bin_of(known[i])
            cycle.survival = odds.survival(cycle.survival, cycle.last)
        cycle.seen = len(known)
        hurdle = price * draft
        if not view.pending:  # it makes a check of a plain verification: a share of what that costs more
            hurdle += price * (check - verify) / max(1.0, self._mean_drafts)
        gain = self._gain(odds, cycle.survival, cycle.last, view.pending - cycle.seen, hurdle)
        return gain > 0.0 or (not view.pending and self._may_probe(view, costs))

    def _gain(self, odds: DraftOdds, survival: float, last: int, unseen: int, hurdle: float) -> float:
        """Tokens that one more draft gains, less `hurdle`; `unseen` of the pending drafts are not in `survival` yet."""
        if not unseen:
            gain = survival * odds.accept_next[last] - hurdle
            if gain > 0.0 or survival <= hurdle:
                return gain
        if unseen:
            one, two = odds.ahead(last)
            survival *= (two / one) ** (unseen - 1)
            gain = survival * two - hurdle
            if gain > 0.0 or survival <= hurdle:
                return gain
            survival *= two / one
        return gain + sum(
            chance * (survival * both - hurdle)
            for chance, both in zip(odds.next_bins[last], odds.both_right, strict=True)
            if survival * both > hurdle
        )

    @property
    def price(self) -> float:
        """See `policy.base.Priced`."""
        prices = self._last_prices.values()
        return sum(prices) / len(prices) if prices else 0.0

    def _price(self, key: int, plain: float) -> float:
        batch, own = self._batch_rate, self._rates.get(key)
        rate = batch.tokens / batch.times if batch.times else 0.0
        if own is not None:
            rate = (own.tokens + PRIOR_CYCLES * rate) / (own.times + PRIOR_CYCLES)
        return max(rate, 1.0) / plain

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        if outcome.key not in self._last_costs:
            return  # it has left, or was never asked about
        super().observe_cycle(outcome)
        self._calibration.observe(outcome.key, outcome.confidences, outcome.accepted)
        if outcome.drafted:
            self._cycles.pop(outcome.key, None)  # what was believed is out of date
        draft, verify, check = self._last_costs[outcome.key]
        times = (outcome.drafted * draft + check) / verify if outcome.drafted else 1.0
        self._mean_drafts += (1.0 - PRICE_KEEP) * (outcome.drafted - self._mean_drafts)
        self._batch_rate.add(outcome.accepted + 1.0, times, BATCH_KEEP)
        self._rates.setdefault(outcome.key, _Rate()).add(outcome.accepted + 1.0, times, PRICE_KEEP)

    def forget(self, key: int) -> None:
        super().forget(key)
        self._calibration.forget(key)
        for state in (self._cycles, self._rates, self._last_costs, self._last_prices):
            state.pop(key, None)
