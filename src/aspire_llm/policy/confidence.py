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
from collections.abc import Sequence

import numpy as np

from aspire_llm.policy.base import Action, CycleOutcome, RequestView, StepLoad
from aspire_llm.policy.calibration import bins_of
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.cycles import Cycles
from aspire_llm.policy.per_request import PerRequestPolicy
from aspire_llm.policy.rows import Floats, Ints, RowCosts

PRICE_KEEP = 0.95  # of a request's past, each cycle: it remembers about 20; the batch's, 50 times more
PRIOR_CYCLES = 5.0  # plain tokens' worth of time that the batch's price counts for a request
BATCH_KEEP = 0.999
PRIOR_DRAFTS = 4.0
# Learning takes the host as long for many outcomes as for few, so it waits until a quarter of the requests has one, but no longer
# than so many steps.
LEARN_SHARE, LEARN_STEPS = 0.25, 4


class Confidence(PerRequestPolicy):
    """See the module."""

    def __init__(self, cost: CostModel, reads: ReadModel, max_verify_tokens: int | None = None) -> None:
        super().__init__(cost, reads, max_verify_tokens)
        self._cycles = Cycles()
        self._outcomes: dict[int, CycleOutcome] = {}  # by place: verified, and not learned from yet
        self._waited = 0  # steps, for outcomes to be learned from
        self._vacant: list[int] = []  # places of requests that have left, once their outcomes are learned from
        self._tokens = self._times = self._batch_rate = 0.0  # of the batch, as of a request
        self._mean_drafts = PRIOR_DRAFTS  # of the batch's cycles

    def decide(self, requests: Sequence[RequestView], prefill: StepLoad) -> list[Action]:
        self._waited += 1
        if len(self._outcomes) >= LEARN_SHARE * len(requests) or self._waited >= LEARN_STEPS:
            self._learn()
        return super().decide(requests, prefill)

    def _wants_draft(self, view: RequestView, costs: RowCosts) -> bool:
        return self._want_drafts([view], costs)[0]

    def _want_drafts(self, views: Sequence[RequestView], costs: RowCosts) -> list[bool]:
        cycles = self._cycles
        at = cycles.places([view.key for view in views])
        pending = np.array([view.pending for view in views])
        known = np.array([len(view.confidences) for view in views])
        self._take_in(at, views, known)
        draft, verify, check = costs.of_rows(np.array([view.length for view in views], dtype=np.float64), pending)
        rate = (cycles.tokens[at] + PRIOR_CYCLES * self._batch_rate) / (cycles.times[at] + PRIOR_CYCLES)
        price = np.maximum(rate, 1.0) / verify
        # the first draft makes a check of a plain verification: a share of what that costs more
        share = (pending == 0) / max(1.0, self._mean_drafts)
        gain = self._gains(at, pending - known, price * (draft + share * (check - verify)))
        cycles.draft[at], cycles.verify[at], cycles.check[at] = draft, verify, check
        cycles.price[at], cycles.loss[at] = price, -gain / price
        wants: list[bool] = (gain > 0.0).tolist()
        for i in np.flatnonzero((gain <= 0.0) & (pending == 0)).tolist():
            wants[i] = self._may_probe(views[i], costs)
        return wants

    def _take_in(self, at: Ints, views: Sequence[RequestView], known: Ints) -> None:
        """New confidences into the survival of each request's drafts. known [R]: how many there are."""
        cycles = self._cycles
        outdated = at[~cycles.has_odds[at]]
        if len(outdated):
            cycles.set_odds(outdated)
            cycles.begin(outdated)
        cycles.begin(at[known < cycles.seen[at]])  # verified, the outcome still to come; or preempted
        rows = np.flatnonzero(known > cycles.seen[at])
        while len(rows):
            places = at[rows]
            nth = cycles.seen[places].tolist()
            new = [views[i].confidences[n] for i, n in zip(rows.tolist(), nth, strict=True)]
            bins = bins_of(new)
            before = cycles.survival[places]
            right = before * cycles.right[places, bins]  # Bayes
            wrong = before * cycles.reject[places, bins] + (1.0 - before) * cycles.evidence[places, bins]
            cycles.survival[places] = right / (right + wrong)
            cycles.last[places] = bins
            cycles.seen[places] += 1
            rows = rows[known[rows] > cycles.seen[places]]

    def _gains(self, at: Ints, unseen: Ints, hurdle: Floats) -> Floats:
        """[R]: tokens that one more draft brings beyond `hurdle`; `unseen` of the pending drafts are not in `survival` yet."""
        cycles = self._cycles
        last, survival = cycles.last[at], cycles.survival[at]
        # rows by `take`, which numpy is quicker at
        bins = cycles.calibration.next_bins.take(last, 0)  # [R, NUM_BINS]: of the draft to come after the last seen one
        both = cycles.both_right.take(at, 0)
        two_right = np.vecdot(bins, both)
        turn = two_right / np.vecdot(bins, cycles.right.take(at, 0))  # the next is right, if one not seen yet is
        survival = survival * turn ** np.maximum(unseen - 1, 0)
        gain: Floats = survival * np.where(unseen > 0, two_right, cycles.accept_next[at, last]) - hurdle
        stop = np.flatnonzero(gain <= 0.0)  # unless what comes next may be worth going on for
        ahead = np.where(unseen > 0, survival * turn, survival)[stop]
        worth = np.maximum(ahead[:, None] * both.take(stop, 0) - hurdle[stop, None], 0.0)
        gain[stop] += np.vecdot(bins.take(stop, 0), worth)
        return gain

    def _loss(self, view: RequestView) -> float:
        place = self._cycles.place(view.key)
        return math.inf if place is None or view.pending >= view.max_draft else float(self._cycles.loss[place])

    @property
    def price(self) -> float:
        """See `policy.base.Priced`."""
        taken = self._cycles.taken
        return float(self._cycles.price[taken].mean()) if taken else 0.0

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        place = self._cycles.place(outcome.key)
        if place is None:
            return  # it has left, or was never asked about
        super().observe_cycle(outcome)
        if place in self._outcomes:
            self._learn()
        self._outcomes[place] = outcome

    def _learn(self) -> None:
        """From the outcomes since the last time, at most one of each request."""
        self._waited = 0
        if self._outcomes:
            cycles, outcomes = self._cycles, list(self._outcomes.values())
            at = np.fromiter(self._outcomes, np.int64, len(outcomes))
            drafted = np.array([outcome.drafted for outcome in outcomes])
            accepted = np.array([outcome.accepted for outcome in outcomes])
            cycles.calibration.observe(at, [outcome.confidences for outcome in outcomes], accepted)
            cycles.has_odds[at[drafted > 0]] = False
            taken = (drafted * cycles.draft[at] + cycles.check[at]) / cycles.verify[at]
            tokens, times = accepted + 1.0, np.where(drafted > 0, taken, 1.0)
            cycles.tokens[at] = PRICE_KEEP * cycles.tokens[at] + tokens
            cycles.times[at] = PRICE_KEEP * cycles.times[at] + times
            self._tokens = decayed(self._tokens, tokens, BATCH_KEEP)
            self._times = decayed(self._times, times, BATCH_KEEP)
            self._batch_rate = self._tokens / self._times
            self._mean_drafts = decayed(self._mean_drafts, (1.0 - PRICE_KEEP) * drafted, PRICE_KEEP)
            self._outcomes.clear()
        self._cycles.free(self._vacant)
        self._vacant.clear()

    def forget(self, key: int) -> None:
        super().forget(key)
        place = self._cycles.forget(key)
        if place in self._outcomes:
            self._vacant.append(place)
        elif place is not None:
            self._cycles.free([place])


def decayed(total: float, values: Floats, keep: float) -> float:
    """`total` after each of `values` [N] was added to `keep` of it, in turn."""
    n = len(values)
    return float(keep**n * total + values @ keep ** np.arange(n - 1, -1, -1))
