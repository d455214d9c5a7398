"""How likely drafts are to be accepted, by how many were: the smoothed rate, and the tokens a cycle then yields.

The map from a draft's confidence to its acceptance is in `calibration`.
"""

from __future__ import annotations

import math


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
