"""From a draft's confidence (its top-1 probability) to the chance that it is right, learned online.

Everything is counted by confidence bin. What the batch has shown is the prior of a request; a request's own counts take
over as they grow (beta-binomial shrinkage). The batch itself starts from what was measured
on real models: of confidences under 0.3, 70-80 % are accepted; over 0.9, 99.8 %.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul

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
LIKELIHOOD_WEIGHT = 20.0  # drafts that the batch's distribution of bins is worth to a request
TEMPER = (
    0.5  # power of a likelihood ratio: neighbouring confidences go together, so each is worth less than one witness
)


def bin_of(confidence: float) -> int:
    """The bin of a top-1 probability in [0, 1]."""
    return bisect_right(BIN_EDGES, confidence)


class _RequestRates:
    __slots__ = ("expected", "happened", "rejected", "tried")

    def __init__(self, num_bins: int) -> None:
        self.rejected = [0.0] * num_bins
        self.tried = [0.0] * num_bins
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

    def observe(self, key: int, bin: int, rejected: bool) -> None:
        own = self._requests.get(key)
        if own is None:
            own = self._requests[key] = _RequestRates(len(self._tried))
        own.rejected[bin] = REQUEST_KEEP * own.rejected[bin] + rejected
        own.tried[bin] = REQUEST_KEEP * own.tried[bin] + 1.0
        forgotten = (1.0 - TREND_KEEP) * TREND_WEIGHT
        own.happened = TREND_KEEP * own.happened + forgotten + rejected
        own.expected = TREND_KEEP * own.expected + forgotten + self._rejected[bin] / self._tried[bin]
        self._rejected[bin] += rejected
        self._tried[bin] += 1.0

    def rates(self, key: int) -> list[float]:
        """By bin."""
        batch = [r / n for r, n in zip(self._rejected, self._tried, strict=True)]
        own = self._requests.get(key)
        if own is None:
            return batch
        trend = own.happened / own.expected
        return [
            (rejected + REQUEST_WEIGHT * min(0.95, trend * rate)) / (tried + REQUEST_WEIGHT)
            for rejected, tried, rate in zip(own.rejected, own.tried, batch, strict=True)
        ]

    def forget(self, key: int) -> None:
        self._requests.pop(key, None)


class _Histogram:
    __slots__ = ("counts", "total")

    def __init__(self, each: float) -> None:
        self.counts = [each] * NUM_BINS
        self.total = each * NUM_BINS

    def add(self, bin: int) -> None:
        self.counts[bin] += 1.0
        self.total += 1.0


class WrongTurnEvidence:
    """P(bin | an earlier draft was wrong) / P(bin | all right so far): drafts after a wrong one stay in the batch's
    verification, and their confidences tell how unsure a model is that has left the true path."""

    def __init__(self) -> None:
        self._batch = (_Histogram(1.0), _Histogram(1.0))  # right, wrong
        self._requests: dict[int, tuple[_Histogram, _Histogram]] = {}

    def observe(self, key: int, bin: int, wrong: bool) -> None:
        self._batch[wrong].add(bin)
        own = self._requests.get(key)
        if own is None:
            own = self._requests[key] = _Histogram(0.0), _Histogram(0.0)
        own[wrong].add(bin)

    def ratios(self, key: int) -> list[float]:
        """By bin, tempered."""
        right, wrong = self._batch
        own = self._requests.get(key)
        w = LIKELIHOOD_WEIGHT
        ratios = []
        for b in range(NUM_BINS):
            p, q = right.counts[b] / right.total, wrong.counts[b] / wrong.total
            if own is not None:
                p = (own[0].counts[b] + w * p) / (own[0].total + w)
                q = (own[1].counts[b] + w * q) / (own[1].total + w)
            ratios.append((q / p) ** TEMPER)
        return ratios

    def forget(self, key: int) -> None:
        self._requests.pop(key, None)


@dataclass(frozen=True)
class DraftOdds:
    """What is believed of a request's drafts in a cycle, by bin; where by the bin before, START is the last."""

    reject: list[float]  # [NUM_BINS]: this draft is the first that is wrong
    evidence: list[float]  # [NUM_BINS]: likelihood ratio of an earlier wrong turn
    accept_next: list[float]  # [NUM_BINS + 1]: the next draft, not made yet, is right if all before it are
    next_bins: list[list[float]]  # [NUM_BINS + 1][NUM_BINS]: distribution of the next draft's bin

    @cached_property
    def both_right(self) -> list[float]:
        """[NUM_BINS], by the bin of the draft to come: it and the one after it are right."""
        # `accept_next` has START too, which cannot come
        return [(1.0 - wrong) * after for wrong, after in zip(self.reject, self.accept_next, strict=False)]

    @cached_property
    def _ahead(self) -> dict[int, tuple[float, float]]:
        return {}

    def ahead(self, last: int) -> tuple[float, float]:
        """Chances that the draft to come after one of bin `last` is right, and that the one after it is too."""
        known = self._ahead.get(last)
        if known is None:
            chances = self.next_bins[last]
            one = sum(chance * (1.0 - wrong) for chance, wrong in zip(chances, self.reject, strict=True))
            known = self._ahead[last] = one, sum(map(mul, chances, self.both_right))
        return known

    def survival(self, before: float, bin: int) -> float:
        """P(all drafts right) once a draft of `bin` has joined, from that of the drafts before it (Bayes)."""
        right = before * (1.0 - self.reject[bin])
        wrong = before * self.reject[bin] + (1.0 - before) * self.evidence[bin]
        return right / (right + wrong)


class Calibration:
    """The three maps of a batch and its requests, and what follows what."""

    def __init__(self) -> None:
        self._rejection = RejectionRates(PRIOR_REJECTION)
        self._next = RejectionRates([PRIOR_NEXT_REJECTION] * (NUM_BINS + 1))
        self._evidence = WrongTurnEvidence()
        self._follows = [_Histogram(0.5) for _ in range(NUM_BINS + 1)]
        self._next_bins: list[list[float]] | None = None  # shared by all until the next cycle is observed

    def odds(self, key: int) -> DraftOdds:
        if self._next_bins is None:
            self._next_bins = [[n / row.total for n in row.counts] for row in self._follows]
        return DraftOdds(
            self._rejection.rates(key),
            self._evidence.ratios(key),
            [1.0 - rate for rate in self._next.rates(key)],
            self._next_bins,
        )

    def observe(self, key: int, confidences: Sequence[float], accepted: int) -> None:
        """A verified cycle: confidences of its drafts, of which `accepted` were right."""
        before = START
        self._next_bins = None
        for i, confidence in enumerate(confidences):
            bin = bin_of(confidence)
            if i <= accepted:
                self._rejection.observe(key, bin, i == accepted)
                self._next.observe(key, before, i == accepted)
                self._follows[before].add(bin)
            if i != accepted:
                self._evidence.observe(key, bin, i > accepted)
            before = bin

    def forget(self, key: int) -> None:
        self._rejection.forget(key)
        self._next.forget(key)
        self._evidence.forget(key)
