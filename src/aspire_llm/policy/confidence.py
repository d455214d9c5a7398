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

import math

from aspire_llm.policy.base import CycleOutcome, RequestView
from aspire_llm.policy.calibration import START, Calibration, DraftOdds, bin_of
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.per_request import PerRequestPolicy
from aspire_llm.policy.rows import RowCosts

PRICE_KEEP = 0.95  # of a request's past, each cycle: it remembers about 20; the batch's, 50 times more
PRIOR_CYCLES = 5.0  # plain tokens' worth of time that the batch's price counts for a request
BATCH_KEEP = 0.999
PRIOR_DRAFTS = 4.0


class _Request:
    """What is known of a request: its cycle under way, its tokens a second, and at what it was last asked."""

    __slots__ = ("costs", "last", "loss", "odds", "price", "seen", "survival", "times", "tokens")

    def __init__(self) -> None:
        self.odds: DraftOdds | None = None  # None: a verification's outcome has made them out of date
        self.tokens = self.times = 0.0  # tokens in the time of so many plain tokens, smoothed over cycles
        self.costs = (0.0, 0.0, 0.0)  # of a draft, of a plain verification and of one of drafts
        self.price = 0.0
        self.loss = 0.0  # seconds that one more draft would lose
        self.begin_cycle()

    def begin_cycle(self) -> None:
        self.seen = 0  # pending drafts whose confidences are in `survival`
        self.survival = 1.0  # P(these are all right)
        self.last = START  # bin of the last of them


class Confidence(PerRequestPolicy):
    """See the module."""

    def __init__(self, cost: CostModel, reads: ReadModel, max_verify_tokens: int | None = None) -> None:
        super().__init__(cost, reads, max_verify_tokens)
        self._calibration = Calibration()
        self._requests: dict[int, _Request] = {}
        self._tokens = self._times = self._batch_rate = 0.0  # of the batch, as of a request
        self._mean_drafts = PRIOR_DRAFTS  # of the batch's cycles

    def _wants_draft(self, view: RequestView, costs: RowCosts) -> bool:
        request = self._requests.get(view.key)
        if request is None:
            request = self._requests[view.key] = _Request()
        pending, known = view.pending, view.confidences
        draft, verify, check = request.costs = costs.of_row(view.length, pending)
        rate = self._batch_rate
        if request.times:
            rate = (request.tokens + PRIOR_CYCLES * rate) / (request.times + PRIOR_CYCLES)
        price = request.price = (rate if rate > 1.0 else 1.0) / verify
        odds, num_known = request.odds, len(known)
        if odds is None:
            odds = request.odds = self._calibration.odds(view.key)
            request.begin_cycle()
        elif num_known < request.seen:  # verified, its outcome still to come; or preempted
            request.begin_cycle()
        for i in range(request.seen, num_known):
            request.last = bin_of(known[i])
            request.survival = odds.survival(request.survival, request.last)
        request.seen = num_known
        hurdle = price * draft
        if not pending:  # it makes a check of a plain verification: a share of what that costs more
            hurdle += price * (check - verify) / max(1.0, self._mean_drafts)
        gain = self._gain(odds, request.survival, request.last, pending - num_known, hurdle)
        request.loss = -gain / price
        return gain > 0.0 or (not pending and self._may_probe(view, costs))

    def _loss(self, view: RequestView) -> float:
        return self._requests[view.key].loss if view.pending < view.max_draft else math.inf

    def _gain(self, odds: DraftOdds, survival: float, last: int, unseen: int, hurdle: float) -> float:
        """Tokens that one more draft brings beyond `hurdle`; `unseen` of the pending drafts are not in `survival` yet."""
        if unseen:
            two = odds.two_right(last)
            if unseen > 1:
                survival *= (two / odds.one_right(last)) ** (unseen - 1)
            gain = survival * two - hurdle
        else:
            gain = survival * odds.accept_next[last] - hurdle
        if gain > 0.0 or survival <= hurdle:
            return gain
        if unseen:
            survival *= two / odds.one_right(last)
        ahead = [
            chance * (survival * both - hurdle)
            for chance, both in zip(odds.next_bins[last], odds.both_right, strict=True)
            if survival * both > hurdle
        ]
        return gain + sum(ahead)

    @property
    def price(self) -> float:
        """See `policy.base.Priced`."""
        prices = [request.price for request in self._requests.values()]
        return sum(prices) / len(prices) if prices else 0.0

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        request = self._requests.get(outcome.key)
        if request is None:
            return  # it has left, or was never asked about
        super().observe_cycle(outcome)
        self._calibration.observe(outcome.key, outcome.confidences, outcome.accepted)
        drafted, tokens, times = outcome.drafted, outcome.accepted + 1.0, 1.0
        if drafted:
            request.odds = None
            draft, verify, check = request.costs
            times = (drafted * draft + check) / verify
        self._mean_drafts += (1.0 - PRICE_KEEP) * (drafted - self._mean_drafts)
        self._tokens = BATCH_KEEP * self._tokens + tokens
        self._times = BATCH_KEEP * self._times + times
        self._batch_rate = self._tokens / self._times
        request.tokens = PRICE_KEEP * request.tokens + tokens
        request.times = PRICE_KEEP * request.times + times

    def forget(self, key: int) -> None:
        super().forget(key)
        self._calibration.forget(key)
        self._requests.pop(key, None)
