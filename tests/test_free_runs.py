"""Free pages as runs, against a set of them."""

import random

import pytest

from aspire_llm.cache.free_runs import FreeRuns


def test_free_runs_against_a_set() -> None:
    """Long enough for the heap to be rebuilt many times."""
    rng = random.Random(0)
    runs, free = FreeRuns(50), set(range(50))
    for _ in range(3000):
        taken = sorted(set(range(50)) - free)
        if free and (not taken or rng.random() < 0.5):
            start, end = rng.choice(runs.runs())
            offset = rng.randrange(end - start)
            count = runs.take(start, offset, rng.randint(1, 8))
            free -= set(range(start + offset, start + offset + count))
        else:
            given_back = rng.sample(taken, rng.randint(1, min(6, len(taken))))
            runs.give(given_back)
            free |= set(given_back)
        runs.check()
        assert {page for start, end in runs.runs() for page in range(start, end)} == free
        limit = rng.randint(1, 4)
        assert (
            runs.largest(limit)
            == sorted(((s, e - s) for s, e in runs.runs()), key=lambda run: (-run[1], run[0]))[:limit]
        )
        assert len(runs._by_length) <= 2 * len(runs.runs()) + 64 + 1 + limit


def test_free_runs_refuse_pages_that_are_not_free() -> None:
    runs = FreeRuns(4)
    for start, offset, limit in ((1, 0, 1), (0, 4, 1), (0, -1, 1), (0, 0, 0)):
        with pytest.raises(ValueError):
            runs.take(start, offset, limit)
    assert runs.runs() == [(0, 4)]
