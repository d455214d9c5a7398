"""What the runner prepares on the host."""

from __future__ import annotations

import numpy as np

from aspire_llm.engine.after import AfterForward
from aspire_llm.engine.columns import Columns
from aspire_llm.engine.forward import describe
from aspire_llm.engine.runner import page_entries
from aspire_llm.request import RowKind
from aspire_llm.scheduler.plan import PageWrite, Row

P, D, V = RowKind.PREFILL, RowKind.DRAFT, RowKind.VERIFY


def test_a_slots_later_page_counts() -> None:
    writes = [PageWrite(1, 2, (7, 8)), PageWrite(0, 0, ()), PageWrite(1, 3, (9,)), PageWrite(0, 4, (5,))]
    places, pages = page_entries(writes, width=10)
    assert (places.dtype, pages.dtype) == (np.int64, np.int32)
    assert dict(zip(places.tolist(), pages.tolist(), strict=True)) == {12: 7, 13: 9, 4: 5}


def test_rows_as_arrays() -> None:
    rows = (Row(3, 0, V, 3), Row(0, 0, P, 4, 8), Row(5, 0, D, 1), Row(2, 0, P, 2, 1, samples=False), Row(4, 0, V, 1))
    columns = Columns.of(rows)
    weights = np.array([0.5, 0, 0.5, 0, 0, 0, 1, 1, 0, 0, 0], dtype=np.float32)
    step = describe(columns, weights, pad_rows=7, pad_tokens=16, scratch_slot=6)
    slots, kinds, starts, offsets, padded = (array.tolist() for array in step.arrays)
    assert slots == [3, 0, 5, 2, 4, 6, 6]
    assert kinds == [V, P, D, P, V, P, P]
    assert starts == [0, 8, 0, 1, 0, 0, 0]
    assert offsets == [0, 3, 7, 8, 10, 11, 11, 11]
    assert padded == [*weights.tolist(), *[0.0] * 5]
    assert (step.kinds, step.num_tokens) == ((V, P, D, P, V), (3, 4, 1, 2, 1))
    assert all(isinstance(kind, RowKind) for kind in step.kinds)
    assert (step.scored_rows, step.num_scored_tokens, step.scores_verified) == ((0, 1, 2), 4, True)

    tail = AfterForward.of(columns, np.array([True, True, True, False, False]))
    places, sampled, renewed, renewed_slots, refreshed, refreshed_slots = (array.tolist() for array in tail.arrays)
    assert places == [0, 1, 2, -1, 3]
    assert sampled == [0, 1, 2, 6, 7, 10]
    assert (renewed, renewed_slots, refreshed, refreshed_slots) == ([0, 1], [3, 0], [2], [5])
    assert (tail.num_logits, tail.all_sampled) == (6, False)
    assert AfterForward.of(Columns.of(rows[::4]), np.zeros(2, dtype=bool)).all_sampled
