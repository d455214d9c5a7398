"""The cost model of a step, kept right online: the paper's three terms, and two for verifications of drafts.

    seconds = fixed + per_token · max(0, tokens - free_tokens) + per_kv · KV tokens + per_check · checked KV tokens
              + verify_step, if there is any verification of drafts

`fixed` is what every step pays (weights, launches), `per_token` the arithmetic of a token, `per_kv` the read of one KV token
in every layer, `per_check` what that costs more in a verification of drafts, whose attention has several query tokens, is
scored and renews the context: on two CPU cores as much again, on an H200 a third (calibrated: with three terms alone
71 % and 55-84 % of steps were predicted within 10 %).
`verify_step` is what one such verification costs the whole step, however many there are: on an H200 about 1 ms, since scores are
normalised and sets chosen in every layer, for all rows at once. It is calibrated and then follows the machine's speed alone.
`free_tokens` (0: the plain three-term model) is the hinge of a GPU, where up to about 128 tokens hide behind
the read of the weights and each further one costs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np
from numpy.typing import NDArray

from aspire_llm.errors import UserError
from aspire_llm.policy.base import StepLoad

Vector = tuple[float, float, float, float]
TERMS = 4

FORGETTING = 0.99  # weight of a step falls to 1/e in 100 steps
LARGEST = 10.0  # relative features beyond that are weighed down: one odd step must not outweigh the rest
PULL = 0.01  # of one observation: holds directions that recent steps say nothing about
SPEED_STEPS = (
    5  # the median ratio of so many steps follows a machine that changes speed, in three, and ignores two outliers
)
CLIP = 0.25  # an observation is trusted up to this relative distance from its prediction
TINY = 1e-12  # least pivot: rounding may leave 0 of a nearly singular direction
RESIDUALS = 200  # steps in the residual statistics


@dataclass(frozen=True, slots=True)
class ReadModel:
    """KV tokens that rows read, mean over the layers (a set of `budget` positions; all of them in refresh layers)."""

    budget: int  # positions of a context set
    num_layers: int
    num_refresh_layers: int  # layers that read everything in DRAFT rows too
    passes: tuple[int, ...] = ()  # [tokens]: of a verification over its keys; beyond the table no token costs another

    def __post_init__(self) -> None:
        if self.budget < 0 or self.num_layers < 1 or not 0 <= self.num_refresh_layers <= self.num_layers:
            raise UserError(
                f"read model {self}: allowed are budget >= 0 and 0 <= num_refresh_layers <= num_layers, >= 1"
            )

    def draft(self, length: int, tail: int) -> float:
        """A DRAFT row at `length` tokens, `tail` of them since the last verified one: budget · (L-R)/L + length · R/L,
        the tail always read and no layer reading more than there is."""
        sparse = self.budget + tail
        if sparse > length:
            sparse = length
        refresh = self.num_refresh_layers / self.num_layers
        return sparse * (1.0 - refresh) + length * refresh

    def verify(self, length: int) -> float:
        return float(length)

    def drafts(self, lengths: NDArray[np.float64], tails: NDArray[np.int64]) -> NDArray[np.float64]:
        """`draft` of many rows, [R]."""
        refresh = self.num_refresh_layers / self.num_layers
        reads: NDArray[np.float64] = np.minimum(self.budget + tails, lengths) * (1.0 - refresh) + lengths * refresh
        return reads

    def other_passes(self, num_tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """`another_pass` of many rows, [R]."""
        return np.array([*map(self.another_pass, range(len(self.passes) + 1))])[
            np.minimum(num_tokens, len(self.passes))
        ]

    def extra_passes(self, num_tokens: int) -> int:
        """Passes of a verification of so many tokens, but the first."""
        return self.passes[min(num_tokens, len(self.passes) - 1)] - 1 if self.passes else 0

    def another_pass(self, num_tokens: int) -> bool:
        """Whether a verification of so many tokens goes over its keys once more than one of a token less."""
        return 0 < num_tokens < len(self.passes) and self.passes[num_tokens] > self.passes[num_tokens - 1]


def _solve(a: list[list[float]], b: list[float], active: Sequence[int]) -> list[float]:
    """Solve rows and columns `active` of a·x = b by elimination (positive definite: no pivoting); the rest of x is 0."""
    m = [[a[i][j] for j in active] + [b[i]] for i in active]
    n = len(active)
    for i in range(n):
        for k in range(i + 1, n):
            f = m[k][i] / max(m[i][i], TINY)
            for j in range(i, n + 1):
                m[k][j] -= f * m[i][j]
    x = [0.0] * len(b)
    for i in reversed(range(n)):
        x[active[i]] = (m[i][n] - sum(m[i][j] * x[active[j]] for j in range(i + 1, n))) / max(m[i][i], TINY)
    return x


def _solve_nonnegative(a: list[list[float]], b: list[float]) -> list[float]:
    """The x >= 0 that minimises x·a·x/2 - b·x: mostly the entries that are positive without that condition are those that are
    positive with it; else by trying every set of positive entries (of four: fifteen)."""
    x = _solve(a, b, range(len(b)))
    if min(x) >= 0.0:
        return x
    x = _solve(a, b, [i for i, value in enumerate(x) if value > 0.0])
    # no entry of 0 would make it less by growing (Karush-Kuhn-Tucker)
    if min(x) >= 0.0 and all(v > 0.0 or _dot(row, x) >= rest for v, row, rest in zip(x, a, b, strict=True)):
        return x
    best, least = [0.0] * len(b), 0.0
    for size in range(1, len(b)):
        for active in combinations(range(len(b)), size):
            x = _solve(a, b, active)
            value = -0.5 * sum(x[i] * b[i] for i in active)
            if min(x) >= 0.0 and value < least:
                best, least = x, value
    return best


class CostModel:
    """Coefficients, never negative, in seconds; `observe` keeps them right: recursive least squares with forgetting.

    The recursion keeps the information matrix (weighted sums of squares of relative features) instead of its inverse, so
    nothing can blow up when steps stop varying; a weak pull to the last estimate fills what they do not tell.
    A common factor, the median of the last few ratios of measured to predicted, follows sudden changes of speed; the least
    squares see every step as it would have been without it, so that steps from before and after a change agree.
    """

    def __init__(
        self,
        fixed: float,
        per_token: float,
        per_kv: float,
        free_tokens: float = 0.0,
        per_check: float = 0.0,
        verify_step: float = 0.0,
    ) -> None:
        given = (fixed, per_token, per_kv, free_tokens, per_check, verify_step)
        if min(given) < 0.0 or fixed + per_token + per_kv <= 0.0:
            raise UserError(f"cost coefficients {given}: none may be negative, nor all be zero")
        self._weights: Vector = (fixed, per_token, per_kv, per_check)
        self._free_tokens = free_tokens
        self._verify_step = verify_step
        self._scale = list(
            self._weights
        )  # seconds per unit of each feature, so that all are shares of a step; 0: not known yet
        self._a = [[0.0] * TERMS for _ in range(TERMS)]
        self._b = [0.0] * TERMS
        self._ratios: deque[float] = deque(maxlen=SPEED_STEPS)
        self._speed = 1.0
        self._residuals: deque[float] = deque(maxlen=RESIDUALS)
        self.last_prediction = 0.0  # seconds that were predicted for the step observed last; 0.0 before any

    @classmethod
    def fit(
        cls, samples: Sequence[StepLoad], free_tokens: Sequence[float] = (0.0,), *, verify_step: bool = False
    ) -> CostModel:
        """Least squares of relative errors over measured steps; of several hinges the one that fits best is kept.
        verify_step: whether to look for that term; without, it is 0."""
        samples = [s for s in samples if s.seconds > 0.0]
        if len(samples) < 3:
            raise UserError(f"cost model: {len(samples)} measured steps, needed are at least 3")
        models = [cls._fit_hinge(samples, hinge, verify_step) for hinge in free_tokens]
        return min(models, key=lambda m: sum((m.predict(s) / s.seconds - 1.0) ** 2 for s in samples))

    @classmethod
    def _fit_hinge(cls, samples: list[StepLoad], hinge: float, verify_step: bool) -> CostModel:
        model = cls(1.0, 0.0, 0.0, hinge)
        features = [[*model._features(s), float(verify_step and s.checked_kv > 0.0)] for s in samples]
        mean = sum(s.seconds for s in samples) / len(samples)
        means = [sum(x[i] for x in features) / len(samples) for i in range(TERMS + 1)]
        scale = [mean / m if m else 0.0 for m in means]  # 0: no step had any of it
        a, b = [[1e-9 * (i == j) for j in range(TERMS + 1)] for i in range(TERMS + 1)], [0.0] * (TERMS + 1)
        for sample, x in zip(samples, features, strict=True):
            _accumulate(a, b, [v * s / sample.seconds for v, s in zip(x, scale, strict=True)], 1.0)
        found = [x * s for x, s in zip(_solve_nonnegative(a, b), scale, strict=True)]
        fixed, per_token, per_kv, per_check, per_step = found
        fitted = cls(fixed, per_token, per_kv, hinge, per_check, per_step)
        # Serving starts with the calibration as its past, worth at most as much as the memory of the recursion.
        weigh = math.sqrt(min(1.0, 1.0 / ((1.0 - FORGETTING) * len(samples))))
        for sample, x in zip(samples, features, strict=True):
            shares = [weigh * v * s / sample.seconds for v, s in zip(x[:TERMS], scale, strict=False)]
            _accumulate(fitted._a, fitted._b, shares, weigh * (1.0 - per_step * x[TERMS] / sample.seconds))
        fitted._scale = scale[:TERMS]
        return fitted

    def _features(self, load: StepLoad) -> Vector:
        return 1.0, max(0.0, load.tokens - self._free_tokens), load.kv_tokens, load.checked_kv

    def predict(self, load: StepLoad) -> float:
        """Seconds the step will take."""
        return self._speed * (_dot(self._weights, self._features(load)) + self._once(load))

    def _once(self, load: StepLoad) -> float:
        return self._verify_step if load.checked_kv > 0.0 else 0.0

    def observe(self, load: StepLoad) -> None:
        """A measured step. Steps without a time are ignored."""
        if load.seconds <= 0.0:
            return
        x = self._features(load)
        predicted = self.predict(load)
        if predicted <= 0.0:
            predicted = load.seconds  # nothing that this step has costs anything so far
        self.last_prediction = predicted
        self._residuals.append(predicted / load.seconds - 1.0)
        base = predicted / self._speed
        once = self._once(load)
        target = min(max(load.seconds / predicted, 1.0 - CLIP), 1.0 + CLIP) - once / base  # at a speed of 1
        self._scale = [s or (base / v if v else 0.0) for s, v in zip(self._scale, x, strict=True)]
        shares = [v * s / base for v, s in zip(x, self._scale, strict=True)]
        weigh = min(1.0, LARGEST / max(shares))
        self._a = [[FORGETTING * v for v in row] for row in self._a]
        self._b = [FORGETTING * v for v in self._b]
        _accumulate(self._a, self._b, [weigh * v for v in shares], weigh * target)
        last = [w / s if s else 0.0 for w, s in zip(self._weights, self._scale, strict=True)]
        a = [[v + PULL * (i == j) for j, v in enumerate(row)] for i, row in enumerate(self._a)]
        shares = _solve_nonnegative(a, [v + PULL * w for v, w in zip(self._b, last, strict=True)])
        if sum(shares) > 0.0:
            fixed, per_token, per_kv, per_check = (m * s for m, s in zip(shares, self._scale, strict=True))
            self._weights = (fixed, per_token, per_kv, per_check)
        now = once + _dot(self._weights, x)
        if now > 0.0:
            # Older ratios were taken against older weights: express them against the new ones, near this load.
            self._ratios = deque((r * base / now for r in self._ratios), SPEED_STEPS)
            self._ratios.append(load.seconds / now)
            self._speed = median(self._ratios)

    @property
    def fixed(self) -> float:
        return self._speed * self._weights[0]

    @property
    def per_token(self) -> float:
        return self._speed * self._weights[1]

    @property
    def per_kv(self) -> float:
        return self._speed * self._weights[2]

    @property
    def per_check(self) -> float:
        return self._speed * self._weights[3]

    @property
    def verify_step(self) -> float:
        return self._speed * self._verify_step

    @property
    def free_tokens(self) -> float:
        return self._free_tokens

    def share_within(self, tolerance: float = 0.1) -> float:
        """Share of the last steps that were within `tolerance` of what was predicted before them; 1.0 before any."""
        if not self._residuals:
            return 1.0
        return sum(abs(r) <= tolerance for r in self._residuals) / len(self._residuals)


def _dot(weights: Sequence[float], features: Sequence[float]) -> float:
    return sum([w * x for w, x in zip(weights, features, strict=True)])


def _accumulate(a: list[list[float]], b: list[float], features: Sequence[float], target: float) -> None:
    for i, u in enumerate(features):
        b[i] += u * target
        for j, v in enumerate(features):
            a[i][j] += u * v
