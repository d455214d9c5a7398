"""What happens to a step's rows after the forward, as index lists: on the host, and the same on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from aspire_llm.engine.columns import Bools, Columns, Ints
from aspire_llm.engine.upload import Array


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
    renewed: Ints  # [V]
    refreshed: Ints  # [D]
    arrays: tuple[Array, ...]  # in the order of OnDevice's fields

    @staticmethod
    def of(rows: Columns, updates: Bools) -> AfterForward:
        """updates [R]: whether the row's attention renews or refreshes its request's context."""
        prefills = rows.prefills
        sampling = np.flatnonzero(rows.samples)
        # of a prompt's chunk the last token alone gets logits, and its place is its position
        num_logits = np.where(prefills, 1, rows.counts)[sampling]
        row = np.repeat(sampling, num_logits)
        within = np.arange(len(row)) - np.repeat(np.cumsum(num_logits) - num_logits, num_logits)
        within += np.where(prefills, rows.counts - 1, 0)[row]
        renewed = np.flatnonzero(updates & ~rows.drafts)
        refreshed = np.flatnonzero(updates & rows.drafts)
        slots, kinds = rows.slots, rows.kinds
        arrays = (
            *(rows.offsets[row] + within, slots[row], kinds[row], within + np.where(prefills, rows.starts, 0)[row]),
            *(slots[sampling], kinds[sampling]),
            *(slots[prefills], (rows.starts + rows.counts)[prefills]),
            *(renewed, slots[renewed]),
            *(refreshed, slots[refreshed]),
        )
        return AfterForward(renewed, refreshed, arrays)

    def on_device(self, arrays: Sequence[Tensor]) -> OnDevice:
        return OnDevice(*arrays)
