"""From a draft's confidence (its top-1 probability) to the chance that it is right, learned online.

Everything is counted by confidence bin. What the batch has shown is the prior of a request; a request's own counts take
over as they grow (beta-binomial shrinkage). The batch itself starts from what was measured
on real models: of confidences under 0.3, 70-80 % are accepted; over 0.9, 99.8 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Upper edges of the bins: even in the middle, finer near 1, where most drafts lie and the rejection rate still falls.
BIN_EDGES = np.array([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.999])
NUM_BINS = len(BIN_EDGES) + 1
START = NUM_BINS  # stands for "no draft yet" where a bin tells what came before
PRIOR_REJECTION = (
    0.35,
    0.3,
    0.25,
    0.2,
    0.12,
    0.08,
    0.05,
    0.02,
    0.01,
    0.004,
    0.002,
    0.001,
)  # by bin of the draft itself
PRIOR_NEXT_REJECTION = 0.1  # of a draft about which nothing is known

BATCH_WEIGHT = 10.0  # drafts a bin that the prior of the batch is worth
REQUEST_WEIGHT = 10.0  # drafts a bin that the batch is worth to a request
REQUEST_KEEP = 0.99  # of a request's counts in a bin, each draft in that bin: it remembers about 100
TREND_WEIGHT = 2.0  # expected rejections that a request's trend starts from
TREND_KEEP = 0.95  # of the trend, each draft: it remembers about 20
TREND_CAP = 0.95  # no draft is held for surely wrong
LIKELIHOOD_WEIGHT = 20.0  # drafts that the batch's distribution of bins is worth to a request
TEMPER = (
    0.5  # power of a likelihood ratio: neighbouring confidences go together, so each is worth less than one witness
)


def bins_of(confidences: Sequence[float]) -> Ints:
    """The bin of each top-1 probability in [0, 1]."""
    return BIN_EDGES.searchsorted(np.array(confidences), side="right")


@dataclass(frozen=True, slots=True)
class Tried:
    """The drafts of C verified cycles that were tried, N in all: those accepted, and the one that was not."""

    places: Ints  # [C]: of their requests, different ones
    rejected: Bools  # [C]: whether the last one was
    cycle: Ints  # [N]: of each draft, from 0
    decay: Floats  # [C]: of a trend, by all drafts of the cycle
    since: Floats  # [N]: of a trend, by the cycle's drafts after this one
    last: Ints  # [number rejected]: these drafts

    @staticmethod
    def of(places: Ints, lengths: Ints, rejected: Bools, cycle: Ints, nth: Ints) -> Tried:
        """lengths [C]: drafts of each cycle; nth [N]: of its cycle, from 0."""
        since = powers(TREND_KEEP, lengths[cycle] - 1 - nth)
        return Tried(places, rejected, cycle, powers(TREND_KEEP, lengths), since, lengths.cumsum()[rejected] - 1)

    def counts(self, bins: Ints, num_bins: int) -> Ints:
        """[C, num_bins] of bins [N]"""
        return counted(self.cycle, bins, len(self.places), num_bins)


def powers(base: float, exponents: Ints) -> Floats:
    """(Much quicker than numpy's own power.)"""
    result: Floats = np.exp(math.log(base) * exponents)
    return result


def counted(rows: Ints, bins: Ints, num_rows: int, num_bins: int) -> Ints:
    """How often each pair of a row and a bin [N] comes, [num_rows, num_bins]."""
    counts: Ints = np.bincount(rows * num_bins + bins, minlength=num_rows * num_bins).reshape(num_rows, num_bins)
    return counts


class RejectionRates:
    """P(a draft is rejected | its bin, all before it accepted), of each request.

    batch rate h_b = rejected / tried; trend θ = rejections that happened / that the batch's rates expected, over the
    request's last 20 or so drafts; the request's rate is (rejected_rb + w · θ h_b) / (tried_rb + w). Requests are named by
    their places, as in `Calibration`.
    """

    def __init__(self, prior: Sequence[float], num_places: int) -> None:
        self._batch_rejected = np.array(prior) * BATCH_WEIGHT
        self._batch_tried = np.full(len(prior), BATCH_WEIGHT)
        self._rejected, self._tried = np.zeros((num_places, len(prior))), np.zeros((num_places, len(prior)))
        self._happened, self._expected = np.full(num_places, TREND_WEIGHT), np.full(num_places, TREND_WEIGHT)

    def observe(self, tried: Tried, bins: Ints) -> Ints:
        """bins [N]: of the tried drafts. Returns how many of each bin a cycle had, [C, bins]. (n drafts decay what was before
        them by keep^n; the batch's rates are those before all of them.)"""
        rates = self._batch_rejected / self._batch_tried
        places, counts = tried.places, tried.counts(bins, len(rates))
        kept = powers(REQUEST_KEEP, counts)
        self._tried[places] = kept * self._tried[places] + (1.0 - kept) / (1.0 - REQUEST_KEEP)
        self._rejected[places] *= kept
        start = (1.0 - tried.decay) * TREND_WEIGHT
        expected = np.bincount(tried.cycle, tried.since * rates[bins], len(places))
        self._expected[places] = tried.decay * self._expected[places] + start + expected
        self._happened[places] = tried.decay * self._happened[places] + start + tried.rejected
        last = bins[tried.last]
        self._rejected[places[tried.rejected], last] += 1.0
        self._batch_tried += counts.sum(0)
        self._batch_rejected += np.bincount(last, minlength=len(rates))
        return counts

    def rates(self, places: Ints) -> Floats:
        """[R, bins]"""
        trend = (self._happened[places] / self._expected[places])[:, None]
        prior = REQUEST_WEIGHT * np.minimum(trend * (self._batch_rejected / self._batch_tried), TREND_CAP)
        rates: Floats = (self._rejected[places] + prior) / (self._tried[places] + REQUEST_WEIGHT)
        return rates

    def begin(self, place: int) -> None:
        self._rejected[place] = self._tried[place] = 0.0
        self._happened[place] = self._expected[place] = TREND_WEIGHT

    def grow(self) -> None:
        self._rejected, self._tried = doubled(self._rejected), doubled(self._tried)
        self._happened, self._expected = doubled(self._happened), doubled(self._expected)


def doubled(column: Floats) -> Floats:
    """With as many places more, of any values."""
    return np.concatenate([column, column])


def distributions(counts: Floats, prior: Floats | float = 0.0, weight: float = 0.0) -> Floats:
    """counts [R, bins] as distributions, where the distribution `prior` is worth `weight` drafts."""
    shares: Floats = (counts + weight * prior) / (counts.sum(-1, keepdims=True) + weight)
    return shares


class WrongTurnEvidence:
    """P(bin | an earlier draft was wrong) / P(bin | all right so far): drafts after a wrong one stay in the batch's
    verification, and their confidences tell how unsure a model is that has left the true path."""

    def __init__(self, num_places: int) -> None:
        self._batch_right, self._batch_wrong = np.ones(NUM_BINS), np.ones(NUM_BINS)
        self._right, self._wrong = np.zeros((num_places, NUM_BINS)), np.zeros((num_places, NUM_BINS))

    def observe(self, places: Ints, right: Ints, wrong: Ints) -> None:
        """Bins of C cycles' drafts before the first wrong one of each, and of those after it: counts [C, NUM_BINS]. places [C]:
        different ones."""
        self._right[places] += right
        self._batch_right += right.sum(0)
        self._wrong[places] += wrong
        self._batch_wrong += wrong.sum(0)

    def ratios(self, places: Ints) -> Floats:
        """[R, NUM_BINS], tempered"""
        right = distributions(self._right[places], distributions(self._batch_right), LIKELIHOOD_WEIGHT)
        wrong = distributions(self._wrong[places], distributions(self._batch_wrong), LIKELIHOOD_WEIGHT)
        ratios: Floats = (wrong / right) ** TEMPER
        return ratios

    def begin(self, place: int) -> None:
        self._right[place] = self._wrong[place] = 0.0

    def grow(self) -> None:
        self._right, self._wrong = doubled(self._right), doubled(self._wrong)


@dataclass(frozen=True, slots=True)
class DraftOdds:
    """What is believed of the drafts of R requests in a cycle, by bin."""

    reject: Floats  # [R, NUM_BINS]: this draft is the first that is wrong
    evidence: Floats  # [R, NUM_BINS]: P(bin | an earlier draft was wrong) / P(bin | all right so far)
    accept_next: Floats  # [R, NUM_BINS + 1]: the next draft is right if all before it are; START is the last


class Calibration:
    """The three maps of a batch and its requests, and what follows what. Requests are named by places, from 0 on: whoever gives
    a place to a request says so by `begin`. A request's odds hold for a cycle: until its next one is observed."""

    def __init__(self, num_places: int) -> None:
        self._rejection = RejectionRates(PRIOR_REJECTION, num_places)
        self._next = RejectionRates([PRIOR_NEXT_REJECTION] * (NUM_BINS + 1), num_places)
        self._evidence = WrongTurnEvidence(num_places)
        self._follows = np.full((NUM_BINS + 1, NUM_BINS), 0.5)
        self._next_bins: Floats | None = None

    def odds(self, places: Ints) -> DraftOdds:
        return DraftOdds(self._rejection.rates(places), self._evidence.ratios(places), 1.0 - self._next.rates(places))

    @property
    def next_bins(self) -> Floats:
        """[NUM_BINS + 1, NUM_BINS]: distribution of the next draft's bin, by the bin before it; START is the last."""
        if self._next_bins is None:
            self._next_bins = distributions(self._follows)
        return self._next_bins

    def observe(self, places: Ints, confidences: Sequence[Sequence[float]], accepted: Ints) -> None:
        """C verified cycles: confidences of the drafts of each, of which accepted [C] were right. places [C]: different ones."""
        drafted = np.array([len(of_cycle) for of_cycle in confidences])
        bins = bins_of(list(chain.from_iterable(confidences)))
        cycle = np.arange(len(places)).repeat(drafted)
        nth = np.arange(len(bins)) - (drafted.cumsum() - drafted)[cycle]  # of its cycle
        was_tried = nth <= accepted[cycle]
        wrong = counted(cycle[~was_tried], bins[~was_tried], len(places), NUM_BINS)
        cycle, nth, bins = cycle[was_tried], nth[was_tried], bins[was_tried]
        before = np.full_like(bins, START)
        before[1:] = bins[:-1]
        before[nth == 0] = START
        tried = Tried.of(places, np.minimum(drafted, accepted + 1), accepted < drafted, cycle, nth)
        right = self._rejection.observe(tried, bins)
        right[tried.rejected, bins[tried.last]] -= 1
        self._next.observe(tried, before)
        self._evidence.observe(places, right, wrong)
        self._follows += counted(before, bins, NUM_BINS + 1, NUM_BINS)
        self._next_bins = None

    def begin(self, place: int) -> None:
        """The place is another request's from now on."""
        for part in (self._rejection, self._next, self._evidence):
            part.begin(place)

    def grow(self) -> None:
        """There are twice as many places."""
        for part in (self._rejection, self._next, self._evidence):
            part.grow()
