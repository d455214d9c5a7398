"""Medians and bootstrap intervals of repeated measurements."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

RESAMPLES = 2000


def bootstrap_interval(values: Sequence[float], share: float = 0.95, seed: int = 0) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the median; None of fewer than two values, which say nothing about spread."""
    if len(values) < 2:
        return None
    rng = random.Random(seed)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = (1.0 - share) / 2.0
    return medians[int(cut * (RESAMPLES - 1))], medians[round((1.0 - cut) * (RESAMPLES - 1))]
