"""Which tokens of a step a selector wants scored, as one array."""

from __future__ import annotations

import numpy as np

from aspire_llm.context.selectors import Selector
from aspire_llm.engine.columns import Bools, Columns, Floats
from aspire_llm.request import RowKind

KEPT = 64  # tokens of the longest row whose weights are kept


class ScoreWeights:
    """`Selector.query_weights` of every row, looked up in a table but for the many lengths of prompt chunks."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self._table = np.zeros((len(RowKind), KEPT + 1, KEPT), dtype=np.float32)  # by kind, tokens of the row, token
        self._known = np.zeros((len(RowKind), KEPT + 1), dtype=bool)

    def of(self, rows: Columns, updates: Bools) -> Floats:
        """[T]: score weight of each token; 0 in rows whose context is not updated. updates: [R]"""
        weights = np.zeros(rows.num_tokens, dtype=np.float32)
        long = updates & (rows.counts > KEPT)
        short = np.flatnonzero(updates & ~long)
        kinds, counts = rows.kinds[short], rows.counts[short]
        unknown = ~self._known[kinds, counts]
        for kind, count in set(zip(kinds[unknown].tolist(), counts[unknown].tolist(), strict=True)):
            self._table[kind, count, :count] = self._selector.query_weights(RowKind(kind), count)
            self._known[kind, count] = True
        first = np.cumsum(counts) - counts  # of each row's tokens among those of short rows
        nth = np.arange(counts.sum()) - np.repeat(first, counts)
        at = np.repeat(rows.offsets[short], counts) + nth
        weights[at] = self._table[np.repeat(kinds, counts), np.repeat(counts, counts), nth]
        for row in np.flatnonzero(long).tolist():
            offset, count = int(rows.offsets[row]), int(rows.counts[row])
            weights[offset : offset + count] = self._selector.query_weights(RowKind(int(rows.kinds[row])), count)
        return weights
