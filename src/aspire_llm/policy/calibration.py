"""From a draft's confidence (its top-1 probability) to the chance that it is right, learned online.

Everything is counted by confidence bin. What the batch has shown is the prior of a request; a request's own counts take
over as they grow (beta-binomial shrinkage). The batch itself starts from what was measured
on real models: of confidences under 0.3, 70-80 % are accepted; over 0.9, 99.8 %.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Upper edges of the bins: even in the middle, finer near 1, where most drafts lie and the rejection rate still falls.
BIN_EDGES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.999)
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
TREND_PULL = (1.0 - TREND_KEEP) * TREND_WEIGHT  # what each draft puts back of the start
TREND_CAP = 0.95  # no draft is held for surely wrong
LIKELIHOOD_WEIGHT = 20.0  # drafts that the batch's distribution of bins is worth to a request
TEMPER = (
    0.5  # power of a likelihood ratio: neighbouring confidences go together, so each is worth less than one witness
)


def bins_of(confidences: Sequence[float]) -> list[int]:
    """The bin of each top-1 probability in [0, 1]."""
    return [bisect_right(BIN_EDGES, confidence) for confidence in confidences]


def stacked(rows: Sequence[array[float]]) -> Floats:
    """[len(rows), length of each]"""
    return np.frombuffer(b"".join(rows)).reshape(len(rows), -1)


class _RequestRates:
    __slots__ = ("expected", "happened", "rejected", "tried")

    def __init__(self, num_bins: int) -> None:
        self.rejected = array("d", [0.0]) * num_bins
        self.tried = array("d", [0.0]) * num_bins
        self.happened = self.expected = TREND_WEIGHT


class RejectionRates:
    """P(a draft is rejected | its bin, all before it accepted), of each request.

    batch rate h_b = rejected / tried; trend θ = rejections that happened / that the batch's rates expected, over the
    request's last 20 or so drafts; the request's rate is (rejected_rb + w · θ h_b) / (tried_rb + w).
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self._rejected = [rate * BATCH_WEIGHT for rate in prior]
        self._tried = [BATCH_WEIGHT] * len(prior)
        self._requests: dict[int, _RequestRates] = {}
        self._nothing = _RequestRates(len(prior))  # of a request without drafts

    def observe(self, key: int, bins: Sequence[int], last_rejected: bool) -> None:
        """The drafts of a cycle that were tried, by bin: all accepted, but for the last one where it was rejected."""
        if not bins:
            return
        own = self._requests.get(key)
        if own is None:
            own = self._requests[key] = _RequestRates(len(self._tried))
        batch_rejected, batch_tried, rejected, tried = self._rejected, self._tried, own.rejected, own.tried
        happened, expected = own.happened, own.expected
        for bin in bins:
            rejected[bin] *= REQUEST_KEEP
            tried[bin] = REQUEST_KEEP * tried[bin] + 1.0
            happened = TREND_KEEP * happened + TREND_PULL
            expected = TREND_KEEP * expected + TREND_PULL + batch_rejected[bin] / batch_tried[bin]
            batch_tried[bin] += 1.0
        if last_rejected:
            rejected[bins[-1]] += 1.0
            batch_rejected[bins[-1]] += 1.0
            happened += 1.0
        own.happened, own.expected = happened, expected

    def rates(self, keys: Sequence[int]) -> Floats:
        """[R, bins]"""
        own = [self._requests.get(key, self._nothing) for key in keys]
        trend = np.array([[request.happened / request.expected] for request in own])
        batch = np.array(self._rejected) / np.array(self._tried)
        expected = REQUEST_WEIGHT * np.minimum(trend * batch, TREND_CAP)
        rejected = stacked([request.rejected for request in own]) + expected
        rates: Floats = rejected / (stacked([request.tried for request in own]) + REQUEST_WEIGHT)
        return rates

    def forget(self, key: int) -> None:
        self._requests.pop(key, None)


class _Histogram:
    __slots__ = ("counts", "total")

    def __init__(self, each: float) -> None:
        self.counts = array("d", [each]) * NUM_BINS
        self.total = each * NUM_BINS

    def add(self, bins: Sequence[int]) -> None:
        counts = self.counts
        for bin in bins:
            counts[bin] += 1.0
        self.total += len(bins)


def distributions(histograms: Sequence[_Histogram], prior: Floats | float = 0.0, weight: float = 0.0) -> Floats:
    """[len(histograms), NUM_BINS], where the distribution `prior` is worth `weight` drafts."""
    counts: Floats = stacked([histogram.counts for histogram in histograms]) + weight * prior
    return counts / (np.array([[histogram.total] for histogram in histograms]) + weight)


class WrongTurnEvidence:
    """P(bin | an earlier draft was wrong) / P(bin | all right so far): drafts after a wrong one stay in the batch's
    verification, and their confidences tell how unsure a model is that has left the true path."""

    def __init__(self) -> None:
        self._right, self._wrong = _Histogram(1.0), _Histogram(1.0)
        self._requests: dict[int, tuple[_Histogram, _Histogram]] = {}
        self._nothing = _Histogram(0.0), _Histogram(0.0)  # of a request without drafts

    def observe(self, key: int, right: Sequence[int], wrong: Sequence[int]) -> None:
        """Bins of a cycle's drafts before the first wrong one, and of those after it."""
        if not right and not wrong:
            return
        own = self._requests.get(key)
        if own is None:
            own = self._requests[key] = _Histogram(0.0), _Histogram(0.0)
        if right:
            self._right.add(right)
            own[0].add(right)
        if wrong:
            self._wrong.add(wrong)
            own[1].add(wrong)

    def ratios(self, keys: Sequence[int]) -> Floats:
        """[R, NUM_BINS], tempered"""
        own = [self._requests.get(key, self._nothing) for key in keys]
        batch = distributions((self._right, self._wrong))
        right = distributions([request[0] for request in own], batch[0], LIKELIHOOD_WEIGHT)
        wrong = distributions([request[1] for request in own], batch[1], LIKELIHOOD_WEIGHT)
        ratios: Floats = (wrong / right) ** TEMPER
        return ratios

    def forget(self, key: int) -> None:
        self._requests.pop(key, None)


@dataclass(frozen=True, slots=True)
class DraftOdds:
    """What is believed of the drafts of R requests in a cycle, by bin."""

    reject: Floats  # [R, NUM_BINS]: this draft is the first that is wrong
    evidence: Floats  # [R, NUM_BINS]: P(bin | an earlier draft was wrong) / P(bin | all right so far)
    accept_next: Floats  # [R, NUM_BINS + 1]: the next draft is right if all before it are; START is the last


class Calibration:
    """The three maps of a batch and its requests, and what follows what. A request's odds hold for a cycle: until its next
    one is observed."""

    def __init__(self) -> None:
        self._rejection = RejectionRates(PRIOR_REJECTION)
        self._next = RejectionRates([PRIOR_NEXT_REJECTION] * (NUM_BINS + 1))
        self._evidence = WrongTurnEvidence()
        self._follows = [_Histogram(0.5) for _ in range(NUM_BINS + 1)]
        self._next_bins: Floats | None = None

    def odds(self, keys: Sequence[int]) -> DraftOdds:
        return DraftOdds(self._rejection.rates(keys), self._evidence.ratios(keys), 1.0 - self._next.rates(keys))

    @property
    def next_bins(self) -> Floats:
        """[NUM_BINS + 1, NUM_BINS]: distribution of the next draft's bin, by the bin before it; START is the last."""
        if self._next_bins is None:
            self._next_bins = distributions(self._follows)
        return self._next_bins

    def observe(self, key: int, confidences: Sequence[float], accepted: int) -> None:
        """A verified cycle: confidences of its drafts, of which `accepted` were right."""
        bins = bins_of(confidences)
        tried = bins[: accepted + 1]
        before = [START, *bins][: len(tried)]
        rejected = accepted < len(bins)
        self._rejection.observe(key, tried, rejected)
        self._next.observe(key, before, rejected)
        self._evidence.observe(key, bins[:accepted], bins[accepted + 1 :])
        for last, bin in zip(before, tried, strict=True):
            follows = self._follows[last]
            follows.counts[bin] += 1.0
            follows.total += 1.0
        self._next_bins = None

    def forget(self, key: int) -> None:
        self._rejection.forget(key)
        self._next.forget(key)
        self._evidence.forget(key)
