"""From the host's description of a step to hidden states: gather from the slots, then the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aspire_llm.attention.backend import AttentionBatch, AttentionPlan, Backend
from aspire_llm.context.state import ContextState
from aspire_llm.engine.columns import Columns
from aspire_llm.engine.slots import SlotState
from aspire_llm.engine.upload import Array
from aspire_llm.models.decoder import Decoder
from aspire_llm.request import RowKind

Floats = NDArray[np.float32]
KINDS = tuple(RowKind)


@dataclass(frozen=True, slots=True)
class Described:
    """A step as the host describes it: R rows and T tokens, padding included."""

    kinds: tuple[RowKind, ...]  # [R], of the real rows only
    num_tokens: tuple[int, ...]  # [R], likewise
    scored_rows: tuple[int, ...]
    num_scored_tokens: int
    scores_verified: bool  # whether any scored row is no draft
    # slots, kinds, prefill starts: int64 [R]; row offsets: int32 [R + 1]; row of token, place in row: int64 [T];
    # score weights: float32 [T]
    arrays: tuple[Array, ...]


def describe(rows: Columns, weights: Sequence[Floats], pad_rows: int, pad_tokens: int, scratch_slot: int) -> Described:
    """weights: score weights of each row's tokens. pad_rows, pad_tokens: sizes to pad to, with rows of no tokens in the
    scratch slot and tokens that belong to the last of them."""
    num_rows, counts = len(rows.counts), rows.counts
    total = int(counts.sum())
    slots = np.full(max(pad_rows, num_rows), scratch_slot, dtype=np.int64)
    kinds = np.full(len(slots), int(RowKind.PREFILL), dtype=np.int64)
    starts = np.zeros(len(slots), dtype=np.int64)
    slots[:num_rows], kinds[:num_rows], starts[:num_rows] = rows.slots, rows.kinds, rows.starts
    offsets = np.full(len(slots) + 1, total, dtype=np.int32)
    offsets[:num_rows] = rows.offsets
    num_tokens = max(pad_tokens, total)
    row_of_token = np.full(num_tokens, len(slots) - 1, dtype=np.int64)
    row_of_token[:total] = np.repeat(np.arange(num_rows), counts)
    within = np.zeros(num_tokens, dtype=np.int64)
    within[:total] = np.arange(total) - np.repeat(rows.offsets, counts)
    score = np.zeros(num_tokens, dtype=np.float32)
    score[:total] = np.concatenate(weights)
    scored = np.unique(row_of_token[np.flatnonzero(score)])
    return Described(
        kinds=tuple(KINDS[kind] for kind in rows.kinds.tolist()),
        num_tokens=tuple(counts.tolist()),
        scored_rows=tuple(scored.tolist()),
        num_scored_tokens=int(np.count_nonzero(score)),
        scores_verified=bool((rows.kinds[scored] != int(RowKind.DRAFT)).any()),
        arrays=(slots, kinds, starts, offsets, row_of_token, within, score),
    )


def gather(
    state: SlotState, contexts: ContextState, step: Described, arrays: Sequence[Tensor]
) -> tuple[Tensor, AttentionBatch]:
    """Token ids [T] and the attention batch, read from the slots on the device. arrays: those of `step`, there."""
    slots, kinds, prefill_starts, row_offsets, row_of_token, within, weights = arrays
    drafts = kinds == RowKind.DRAFT
    starts = torch.where(
        kinds == RowKind.PREFILL, prefill_starts, state.computed[slots] + state.pending[slots] * drafts
    )
    positions = starts[row_of_token] + within
    batch = AttentionBatch(
        kinds=step.kinds,
        num_tokens=step.num_tokens,
        row_offsets=row_offsets,
        slots=slots.int(),
        starts=starts.int(),
        positions=positions,
        page_table=state.page_table,
        sparse=drafts,
        sets=contexts.sets,
        set_lengths=contexts.set_lengths,
        tail_starts=contexts.tail_starts,
        score_weights=weights,
        scored_rows=step.scored_rows,
        num_scored_tokens=step.num_scored_tokens,
    )
    return state.tokens[slots[row_of_token], positions], batch


class Forward(Protocol):
    @property
    def pad_rows(self) -> int:
        """Rows that a step is padded to; 0: none."""
        ...

    def padded(self, num_tokens: int) -> int:
        """Tokens that a step of `num_tokens` is padded to."""
        ...

    def run(self, step: Described, arrays: Sequence[Tensor]) -> tuple[Tensor, AttentionPlan]:
        """Hidden states [T, hidden] after the final norm, and the attention plan with its scores."""
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

    def run(self, step: Described, arrays: Sequence[Tensor]) -> tuple[Tensor, AttentionPlan]:
        """Hidden states [T, hidden] after the final norm, and the attention plan with its scores."""
        token_ids, batch = gather(self._state, self._contexts, step, arrays)
        attention: AttentionPlan = self._backend.plan(batch)
        hidden = self._decoder(token_ids, batch.positions, self._backend.attention(attention))
        return hidden, attention
