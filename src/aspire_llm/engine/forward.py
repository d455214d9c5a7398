"""From the host's description of a step to hidden states: gather from the slots, then the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from aspire_llm.attention.backend import AttentionBatch, AttentionPlan, Backend
from aspire_llm.context.state import ContextState
from aspire_llm.engine.slots import SlotState
from aspire_llm.engine.upload import Array
from aspire_llm.models.decoder import Decoder
from aspire_llm.request import RowKind
from aspire_llm.scheduler.plan import Row


@dataclass(frozen=True, slots=True)
class Described:
    """A step as the host describes it: R rows and T tokens, padding included."""

    kinds: tuple[RowKind, ...]  # [R], of the real rows only
    num_tokens: tuple[int, ...]  # [R], likewise
    scored_rows: tuple[int, ...]
    num_scored_tokens: int
    # slots, kinds, prefill starts: int64 [R]; row offsets: int32 [R + 1]; row of token, place in row: int64 [T];
    # score weights: float32 [T]
    arrays: tuple[Array, ...]


def describe(
    rows: Sequence[Row], weights: Sequence[list[float]], pad_rows: int, pad_tokens: int, scratch_slot: int
) -> Described:
    """weights: score weight of each token of each row. pad_rows, pad_tokens: sizes to pad to, with rows of no tokens in the
    scratch slot and tokens that belong to the last of them."""
    counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
    total = int(counts.sum())
    slots = np.full(max(pad_rows, len(rows)), scratch_slot, dtype=np.int64)
    kinds = np.full(len(slots), int(RowKind.PREFILL), dtype=np.int64)
    starts = np.zeros(len(slots), dtype=np.int64)
    slots[: len(rows)] = [row.slot for row in rows]
    kinds[: len(rows)] = [int(row.kind) for row in rows]
    starts[: len(rows)] = [row.start for row in rows]
    offsets = np.full(len(slots) + 1, total, dtype=np.int32)
    offsets[: len(rows) + 1] = [0, *np.cumsum(counts)]
    num_tokens = max(pad_tokens, total)
    row_of_token = np.full(num_tokens, len(slots) - 1, dtype=np.int64)
    row_of_token[:total] = np.repeat(np.arange(len(rows)), counts)
    within = np.zeros(num_tokens, dtype=np.int64)
    within[:total] = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    score = np.zeros(num_tokens, dtype=np.float32)
    score[:total] = [w for row in weights for w in row]
    scored = tuple(i for i, row in enumerate(weights) if any(row))
    kinds_of_rows = tuple(row.kind for row in rows)
    num_scored = int(np.count_nonzero(score))
    return Described(
        kinds_of_rows,
        tuple(counts.tolist()),
        scored,
        num_scored,
        (slots, kinds, starts, offsets, row_of_token, within, score),
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
        hidden = self._decoder(
            token_ids, batch.positions, lambda layer, q, k, v: self._backend.run(attention, layer, q, k, v)
        )
        return hidden, attention
