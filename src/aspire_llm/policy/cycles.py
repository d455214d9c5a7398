"""What the confidence policy knows of its requests, as columns: all of them are asked about in every step, so that is arithmetic
on arrays, not a loop over requests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from aspire_llm.policy.calibration import NUM_BINS, START, Calibration
from aspire_llm.policy.rows import Floats, Ints

FIRST_PLACES = 16


class Cycles:
    """One place a request, in columns [places] or [places, bins]: its cycle under way, its tokens a second, and at what it was
    last asked. The places are those of `calibration` too."""

    def __init__(self) -> None:
        self.calibration = Calibration(FIRST_PLACES)
        self._places: dict[int, int] = {}  # by key
        self._free = list(range(FIRST_PLACES))

        def floats(*bins: int) -> Floats:
            return np.zeros((FIRST_PLACES, *bins))

        def ints() -> Ints:
            return np.zeros(FIRST_PLACES, dtype=np.int64)

        self.has_odds = np.zeros(FIRST_PLACES, dtype=bool)  # False: a verification's outcome has made them out of date
        self.right, self.reject, self.evidence = floats(NUM_BINS), floats(NUM_BINS), floats(NUM_BINS)  # see `DraftOdds`
        self.accept_next = floats(NUM_BINS + 1)
        self.both_right = floats(NUM_BINS)  # P(a draft is right, and the one after it too)
        self.seen = ints()  # pending drafts whose confidences are in `survival`
        self.survival = floats()  # P(these are all right)
        self.last = ints()  # bin of the last of them
        self.tokens, self.times = floats(), floats()  # tokens in the time of so many plain ones, smoothed over cycles
        self.draft, self.verify, self.check = floats(), floats(), floats()  # seconds, see `RowCosts`
        self.price = floats()  # tokens a second
        self.loss = floats()  # seconds that one more draft would lose

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

    def set_odds(self, places: Ints) -> None:
        """As the calibration has them now."""
        odds = self.calibration.odds(places)
        self.reject[places] = odds.reject
        right = 1.0 - odds.reject
        self.right[places], self.both_right[places] = right, right * odds.accept_next[:, :START]
        self.evidence[places] = odds.evidence
        self.accept_next[places] = odds.accept_next
        self.has_odds[places] = True

    def forget(self, key: int) -> int | None:
        """The request's place is nobody's until it is said to be free; None if it has none."""
        return self._places.pop(key, None)

    def free(self, places: Iterable[int]) -> None:
        """These may be given to other requests."""
        self._free.extend(places)

    def _take(self, key: int) -> int:
        if not self._free:
            size = len(self.seen)
            self._free = list(range(size, 2 * size))
            for name, column in vars(self).items():
                if isinstance(column, np.ndarray):
                    setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
            self.calibration.grow()
        place = self._places[key] = self._free.pop()
        self.calibration.begin(place)
        self.has_odds[place] = False
        self.tokens[place] = self.times[place] = 0.0
        return place
