"""How likely drafts are to be accepted: the smoothed rate, and the online map from a draft's confidence to its acceptance.

Both are kept for each request and for the batch; the batch's estimate is the prior of a request that has shown little.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

# Upper edges of the confidence bins: even in the middle, finer near 1 where most drafts lie and the rejection rate still
# falls tenfold. The last bin is (0.999, 1].
BIN_EDGES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.999)
NUM_BINS = len(BIN_EDGES) + 1


def bin_of(confidence: float) -> int:
    """The bin of a top-1 probability in [0, 1]."""
    return bisect_right(BIN_EDGES, confidence)


def expected_tokens(rate: float, drafts: int) -> float:
    """Tokens a cycle of `drafts` drafts yields when each is accepted with probability `rate` if those before it were:
    1 + a + … + a^g = (1 - a^(g+1)) / (1 - a), the bonus token included (Leviathan et al. 2023, eq. 1)."""
    if rate >= 1.0:
        return drafts + 1.0
    return (1.0 - math.pow(rate, drafts + 1)) / (1.0 - rate)


class SmoothedRate:
    """Acceptance rate of one draft given that those before it were accepted, of one request.

    A cycle shows `accepted` successes and one failure if a draft was rejected; drafts after the rejected one show nothing.
    a = accepted / (accepted + 1 if rejected), numerator and denominator each exponentially smoothed over cycles: smoothing
    the quotients instead would weigh a cycle of one draft as much as one of twenty, which biases a downwards.
    """

    def __init__(self, prior: float, weight: float, keep: float) -> None:
        """prior: the rate to start from; weight: of how many drafts; keep: what a cycle leaves of the ones before it."""
        self._accepted = prior * weight
        self._tried = weight
        self._keep = keep

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self._accepted = self._keep * self._accepted + accepted
            self._tried = self._keep * self._tried + accepted + (accepted < drafted)

    @property
    def value(self) -> float:
        return self._accepted / self._tried


class BinnedRates:
    """Rejection rate by bin, with a prior of `weight` draws a bin and exponential forgetting by draws in that bin."""

    def __init__(self, prior: Sequence[float], weight: float, memory: float) -> None:
        self._rejected = [rate * weight for rate in prior]
        self._tried = [weight] * len(prior)
        self._keep = 1.0 - 1.0 / memory

    def observe(self, bin: int, rejected: bool) -> None:
        self._tried[bin] = self._keep * self._tried[bin] + 1.0
        self._rejected[bin] = self._keep * self._rejected[bin] + rejected

    def rate(self, bin: int) -> float:
        return self._rejected[bin] / self._tried[bin]


# Rejection rates by bin before anything is known: FINDINGS, "under 0.3, 70-80 % are accepted; over 0.9, 99.8 %".
CONFIDENCE_PRIOR = (0.35, 0.3, 0.25, 0.2, 0.12, 0.08, 0.05, 0.02, 0.01, 0.004, 0.002, 0.001)
PRIOR_DRAWS = 10.0  # of each bin of the batch
BATCH_MEMORY = 1000.0
K1=2.0; K2=20.0; FADE=0.98; REQ_BINS=True


class RequestCal:
    __slots__=('rej','exp','bins_r','bins_n')
    def __init__(self):
        self.rej=K1; self.exp=K1
        self.bins_r=[0.0]*(NUM_BINS+1); self.bins_n=[0.0]*(NUM_BINS+1)


class Calibration:
    def __init__(self, prior):
        self.batch=BinnedRates(prior, PRIOR_DRAWS, BATCH_MEMORY)
        self.req={}
    def hazard(self,key,bin):
        h=self.batch.rate(bin)
        c=self.req.get(key)
        if c is None: return h
        h=min(.95,h*c.rej/c.exp)
        if REQ_BINS:
            n=c.bins_n[bin]; h=(c.bins_r[bin]+K2*h)/(n+K2)
        return h
    def observe(self,key,bin,rejected):
        c=self.req.get(key)
        if c is None: c=self.req[key]=RequestCal()
        h=self.batch.rate(bin)
        c.rej=FADE*c.rej+(1-FADE)*K1+rejected; c.exp=FADE*c.exp+(1-FADE)*K1+h
        c.bins_n[bin]+=1; c.bins_r[bin]+=rejected
        self.batch.observe(bin,rejected)
    def forget(self,key): self.req.pop(key,None)
