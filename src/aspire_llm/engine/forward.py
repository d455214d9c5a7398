"""From the host's description of a step to hidden states: gather from the slots, then the decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from aspire_llm.attention.backend import AttentionBatch, AttentionPlan, Backend
from aspire_llm.context.state import ContextState
from aspire_llm.engine.columns import Columns, Floats
from aspire_llm.engine.finish import Finished
from aspire_llm.engine.slot_ops import StepRows, gather
from aspire_llm.engine.slots import SlotState
from aspire_llm.engine.upload import Array
from aspire_llm.models.decoder import Decoder
from aspire_llm.request import RowKind

KINDS = tuple(RowKind)


@dataclass(frozen=True, slots=True)
class Described:
    """A step as the host describes it."""

    rows: Columns
    weights: Floats  # score weight of each token
    scores_verified: bool  # whether any scored row is no draft
    arrays: tuple[Array, ...]  # with padding: those of StepRows, int32; then score weights, float32

    # What follows is asked for only where the step is not replayed.

    @property
    def kinds(self) -> tuple[RowKind, ...]:
        return tuple(map(KINDS.__getitem__, self.rows.kinds.tolist()))

    @property
    def num_tokens(self) -> tuple[int, ...]:
        return tuple(self.rows.counts.tolist())

    @property
    def scored_rows(self) -> tuple[int, ...]:
        scored = np.flatnonzero(self.weights)
        return tuple(sorted(set((np.searchsorted(self.rows.offsets, scored, side="right") - 1).tolist())))

    @property
    def num_scored_tokens(self) -> int:
        return int(np.count_nonzero(self.weights))


def describe(rows: Columns, weights: Floats, pad_rows: int, pad_tokens: int, scratch_slot: int) -> Described:
    """weights: score weight of each token. pad_rows, pad_tokens: sizes to pad to, with rows of no tokens in the scratch slot
    and tokens behind the last of them."""
    num_rows, total = len(rows.counts), len(weights)
    size = max(pad_rows, num_rows)
    slots = np.full(size, scratch_slot, dtype=np.int32)
    kinds = np.full(size, int(RowKind.PREFILL), dtype=np.int32)
    starts = np.zeros(size, dtype=np.int32)
    slots[:num_rows], kinds[:num_rows], starts[:num_rows] = rows.slots, rows.kinds, rows.starts
    offsets = np.full(size + 1, total, dtype=np.int32)
    offsets[:num_rows] = rows.offsets
    padded = np.zeros(max(pad_tokens, total), dtype=np.float32)
    padded[:total] = weights
    return Described(
        rows=rows,
        weights=weights,
        scores_verified=bool(weights[np.repeat(~rows.drafts, rows.counts)].any()),
        arrays=(slots, kinds, starts, offsets, padded),
    )


def batch_of(
    state: SlotState, contexts: ContextState, step: Described, arrays: Sequence[Tensor]
) -> tuple[Tensor, AttentionBatch]:
    """Token ids [T] and the attention batch, read from the slots on the device. arrays: those of `step`, there."""
    *fields, weights = arrays
    rows = StepRows(*fields)
    gathered = gather(state, rows, len(weights))
    batch = AttentionBatch(
        kinds=step.kinds,
        num_tokens=step.num_tokens,
        row_offsets=rows.offsets,
        slots=rows.slots,
        starts=gathered.starts,
        positions=gathered.positions,
        page_table=state.page_table,
        sparse=gathered.sparse,
        sets=contexts.sets,
        set_lengths=contexts.set_lengths,
        tail_starts=contexts.tail_starts,
        score_weights=weights,
        scored_rows=step.scored_rows,
        num_scored_tokens=step.num_scored_tokens,
    )
    return gathered.token_ids, batch


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a forward leaves; T tokens, padding included."""

    hidden: Tensor  # [T, hidden], after the final norm
    positions: Tensor  # int64 [T]
    attention: AttentionPlan  # with its scores
    # Ends a step all of whose tokens get logits, as `Finish` does; None: nothing is captured for that
    finish: Callable[[], Finished] | None = None


class Forward(Protocol):
    @property
    def pad_rows(self) -> int:
        """Rows that a step is padded to; 0: none."""
        ...

    def padded(self, num_tokens: int) -> int:
        """Tokens that a step of `num_tokens` is padded to."""
        ...

    def run(self, step: Described, arrays: Sequence[Tensor]) -> Forwarded:
        """arrays: those of `step`, on the device."""
        ...


class EagerForward:
    """Runs every step as it comes. For the CPU, and on a GPU for steps wider than any captured graph."""

    pad_rows = 0

    def __init__(self, decoder: Decoder, backend: Backend[Any], state: SlotState, contexts: ContextState) -> None:
        self._decoder = decoder
        self._backend = backend
        self._state = state
        self._contexts = contexts

    @property
    def device(self) -> torch.device:
        return self._state.computed.device

    def padded(self, num_tokens: int) -> int:
        """Tokens that a step of `num_tokens` is padded to."""
        return num_tokens

    def run(self, step: Described, arrays: Sequence[Tensor]) -> Forwarded:
        """As `Forward.run`."""
        token_ids, batch = batch_of(self._state, self._contexts, step, arrays)
        attention: AttentionPlan = self._backend.plan(batch)
        hidden = self._decoder(token_ids, batch.positions, self._backend.attention(attention))
        return Forwarded(hidden, batch.positions, attention)
