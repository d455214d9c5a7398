"""A step's rows as columns: read once from the plan, so that all that follows is arithmetic on arrays, not a loop over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aspire_llm.request import RowKind
from aspire_llm.scheduler.plan import Row

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Columns:
    """R rows, in the plan's order, on the host."""

    slots: Ints  # [R]
    kinds: Ints  # [R]: RowKind
    counts: Ints  # [R]: tokens
    offsets: Ints  # [R]: of each row's first token in the flat batch
    starts: Ints  # [R]: of PREFILL rows
    reaches: Ints  # [R]
    samples: Bools  # [R]

    @staticmethod
    def of(rows: Sequence[Row]) -> Columns:
        def ints(values: list[int]) -> Ints:
            return np.fromiter(values, np.int64, len(values))

        counts = ints([row.num_tokens for row in rows])
        # by way of bytes: numpy is slow with the members of an enumeration
        kinds = np.frombuffer(bytes([row.kind for row in rows]), np.uint8).astype(np.int64)
        return Columns(
            slots=ints([row.slot for row in rows]),
            kinds=kinds,
            counts=counts,
            offsets=np.cumsum(counts) - counts,
            starts=ints([row.start for row in rows]),
            reaches=ints([row.reach for row in rows]),
            samples=np.frombuffer(bytes([row.samples for row in rows]), np.bool_),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def drafts(self) -> Bools:
        return _are(self.kinds, RowKind.DRAFT)

    @property
    def verifies(self) -> Bools:
        return _are(self.kinds, RowKind.VERIFY)

    @property
    def prefills(self) -> Bools:
        return _are(self.kinds, RowKind.PREFILL)

    @property
    def num_logits(self) -> Ints:
        """[R]: tokens of each row that get logits; of a prompt's chunk the last one alone, and that only where it samples."""
        tokens: Ints = np.where(self.prefills, 1, self.counts) * self.samples
        return tokens


def _are(kinds: Ints, kind: RowKind) -> Bools:
    same: Bools = kinds == int(kind)
    return same
