"""What happens to a step's rows after the forward, as index lists: on the host, and the same on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from aspire_llm.engine.columns import Bools, Columns, Ints
from aspire_llm.engine.upload import Array


@dataclass(frozen=True, slots=True)
class OnDevice:
    """R rows. Q of them sample, with N logits in all; U update their context: V renew it first, all refresh it."""

    places: Tensor  # int32 [R]: which of the Q each row is; -1: none
    sampled_tokens: (
        Tensor  # int64 [≥ N]: tokens of the flat batch that get logits, and as many more as the step is padded to
    )
    renewed_rows: Tensor  # int64 [V]: of the batch
    renewed_slots: Tensor  # int64 [V]
    refreshed_rows: Tensor  # int64 [U]
    refreshed_slots: Tensor  # int64 [U]


@dataclass(frozen=True, slots=True)
class AfterForward:
    num_logits: int  # N
    all_sampled: bool  # every token of the batch gets logits: no more than one of any prompt
    renewed: Ints  # [V]
    refreshed: Ints  # [U]
    arrays: tuple[Array, ...]  # in the order of OnDevice's fields

    @staticmethod
    def of(rows: Columns, updates: Bools, padded: Callable[[int], int]) -> AfterForward:
        """updates [R]: whether the row's attention updates its request's context. padded: as
        `Forward.padded`, since a product of a new size makes a GPU load a kernel and wait for it."""
        num_logits = rows.num_logits
        total = int(num_logits.sum())
        # the last of each row's tokens
        skipped = rows.offsets + rows.counts - num_logits - (np.cumsum(num_logits) - num_logits)
        sampled_tokens = np.zeros(padded(total) if total else 0, dtype=np.int64)  # padding: any token
        sampled_tokens[:total] = np.arange(total) + np.repeat(skipped, num_logits)
        places = np.where(rows.samples, np.cumsum(rows.samples) - 1, -1).astype(np.int32)
        renewed, refreshed = np.flatnonzero(updates & ~rows.drafts), np.flatnonzero(updates)
        return AfterForward(
            num_logits=total,
            all_sampled=total == rows.num_tokens,
            renewed=renewed,
            refreshed=refreshed,
            arrays=(places, sampled_tokens, renewed, rows.slots[renewed], refreshed, rows.slots[refreshed]),
        )

    def on_device(self, arrays: Sequence[Tensor]) -> OnDevice:
        return OnDevice(*arrays)
