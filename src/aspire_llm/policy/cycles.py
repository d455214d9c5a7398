"""What the confidence policy knows of its requests, as columns: all of them are asked about in every step, so that is arithmetic
on arrays, not a loop over requests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from aspire_llm.policy.calibration import NUM_BINS, START, DraftOdds
from aspire_llm.policy.rows import Floats, Ints

FIRST_PLACES = 16


class Cycles:
    """One place a request, in columns [places] or [places, bins]: its cycle under way, its tokens a second, and at what it was
    last asked."""

    has_odds: NDArray[np.bool_]  # False: a verification's outcome has made them out of date
    right: Floats  # [·, NUM_BINS]: see `DraftOdds`; 1 - reject
    reject: Floats  # [·, NUM_BINS]
    evidence: Floats  # [·, NUM_BINS]
    accept_next: Floats  # [·, NUM_BINS + 1]
    seen: Ints  # pending drafts whose confidences are in `survival`
    survival: Floats  # P(these are all right)
    last: Ints  # bin of the last of them
    tokens: Floats  # tokens in the time of `times` plain tokens, smoothed over cycles
    times: Floats
    draft: Floats  # seconds of a draft, of a plain verification and of one of drafts
    verify: Floats
    check: Floats
    price: Floats
    loss: Floats  # seconds that one more draft would lose

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # by key
        self._free = list(range(FIRST_PLACES))
        for name, kind in type(self).__annotations__.items():
            width = {"accept_next": (NUM_BINS + 1,)}.get(
                name, (NUM_BINS,) if name in ("right", "reject", "evidence") else ()
            )
            dtype = {"Floats": np.float64, "Ints": np.int64}.get(kind, np.bool_)
            setattr(self, name, np.zeros((FIRST_PLACES, *width), dtype=dtype))

    def places(self, keys: Iterable[int]) -> Ints:
        """[R]; a request that is new takes a place."""
        known = self._places
        return np.array([known[key] if key in known else self._take(key) for key in keys])

    def place(self, key: int) -> int | None:
        return self._places.get(key)

    @property
    def taken(self) -> list[int]:
        return list(self._places.values())

    def begin(self, places: Ints) -> None:
        """A new cycle: nothing is known of its drafts."""
        self.seen[places] = 0
        self.survival[places] = 1.0
        self.last[places] = START

    def set_odds(self, places: Ints, odds: DraftOdds) -> None:
        self.reject[places] = odds.reject
        self.right[places] = 1.0 - odds.reject
        self.evidence[places] = odds.evidence
        self.accept_next[places] = odds.accept_next
        self.has_odds[places] = True

    def forget(self, key: int) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            self._free.append(place)

    def _take(self, key: int) -> int:
        if not self._free:
            size = len(self.seen)
            self._free = list(range(size, 2 * size))
            for name in type(self).__annotations__:
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        place = self._places[key] = self._free.pop()
        self.has_odds[place] = False
        self.tokens[place] = self.times[place] = 0.0
        return place
