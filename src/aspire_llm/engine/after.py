"""What happens to a step's rows after the forward, as index lists: on the host, and the same on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from aspire_llm.engine.upload import Array
from aspire_llm.request import RowKind
from aspire_llm.scheduler.plan import Row


@dataclass(frozen=True, slots=True)
class OnDevice:
    """int64 index lists. Q rows sample, with N logits in all; F prefill rows; V rows renew their context, D refresh it."""

    sampled_tokens: Tensor  # [N]: tokens of the flat batch that get logits
    token_slots: Tensor  # [N]
    token_kinds: Tensor  # [N]
    token_places: Tensor  # [N]: place in the row; of a PREFILL token its position
    slots: Tensor  # [Q]
    kinds: Tensor  # [Q]
    prefill_slots: Tensor  # [F]
    prefill_ends: Tensor  # [F]: positions that are exact after the step
    renewed_rows: Tensor  # [V]: of the batch
    renewed_slots: Tensor  # [V]
    refreshed_rows: Tensor  # [D]
    refreshed_slots: Tensor  # [D]


@dataclass(frozen=True, slots=True)
class AfterForward:
    renewed: tuple[Row, ...]
    refreshed: tuple[Row, ...]
    arrays: tuple[Array, ...]  # in the order of OnDevice's fields

    @staticmethod
    def of(rows: Sequence[Row], updates: Sequence[bool]) -> AfterForward:
        """updates: for each row, whether its attention renews or refreshes its request's context."""
        tokens: list[tuple[int, int, int, int]] = []
        offset = 0
        for row in rows:
            if row.samples:
                first = row.num_tokens - 1 if row.kind is RowKind.PREFILL else 0
                base = row.start if row.kind is RowKind.PREFILL else 0
                tokens.extend((offset + j, row.slot, int(row.kind), base + j) for j in range(first, row.num_tokens))
            offset += row.num_tokens
        sampling = [row for row in rows if row.samples]
        prefill = [row for row in rows if row.kind is RowKind.PREFILL]
        updating = [(i, row) for i, row in enumerate(rows) if updates[i]]
        renewed = [(i, row) for i, row in updating if row.kind is not RowKind.DRAFT]
        refreshed = [(i, row) for i, row in updating if row.kind is RowKind.DRAFT]
        lists: list[Sequence[int]] = [
            *([token[field] for token in tokens] for field in range(4)),
            [row.slot for row in sampling],
            [int(row.kind) for row in sampling],
            [row.slot for row in prefill],
            [row.start + row.num_tokens for row in prefill],
            [i for i, _ in renewed],
            [row.slot for _, row in renewed],
            [i for i, _ in refreshed],
            [row.slot for _, row in refreshed],
        ]
        arrays = tuple(np.array(values, dtype=np.int64) for values in lists)
        return AfterForward(tuple(row for _, row in renewed), tuple(row for _, row in refreshed), arrays)

    def on_device(self, arrays: Sequence[Tensor]) -> OnDevice:
        return OnDevice(*arrays)
