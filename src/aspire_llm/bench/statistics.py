"""Bootstrap intervals of repeated measurements."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median

RESAMPLES = 2000


def bootstrap_interval(
    values: Sequence[float],
    share: float = 0.95,
    seed: int = 0,
    statistic: Callable[[Sequence[float]], float] = median,
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the statistic; None of fewer than two values, which say nothing about spread."""
    if len(values) < 2:
        return None
    rng = random.Random(seed)
    found = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = (1.0 - share) / 2.0
    return found[int(cut * (RESAMPLES - 1))], found[round((1.0 - cut) * (RESAMPLES - 1))]
