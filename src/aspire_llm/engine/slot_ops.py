"""The arithmetic of slots: what a step reads from its requests' counters, and how it leaves them.

Written in torch here, which is what a CPU runs. On a GPU each function is one kernel (slot_kernels.py), which tests hold to
this. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_llm.engine.slots import SlotState
from aspire_llm.request import RowKind
from aspire_llm.sampling.batch import SampleOutput


@dataclass(frozen=True, slots=True)
class StepRows:
    """R rows on the device, int32. Padding rows come last: PREFILL, of no tokens, in the slot that nobody has."""

    slots: Tensor  # [R]
    kinds: Tensor  # [R]: RowKind
    starts: Tensor  # [R]: position of a PREFILL row's first token; 0 for others, whose place only the device knows
    offsets: Tensor  # [R + 1]: where each row's tokens begin


@dataclass(frozen=True, slots=True)
class Gathered:
    starts: Tensor  # int32 [R]: position of each row's first token
    sparse: Tensor  # bool [R]: DRAFT rows
    positions: Tensor  # int64 [T]
    token_ids: Tensor  # int64 [T]


def gather(state: SlotState, rows: StepRows, num_tokens: int) -> Gathered:
    """Positions and token ids of a step of T = `num_tokens` tokens. A VERIFY row begins at the newest committed token, a DRAFT
    row is the newest draft. Tokens behind the last row are padding: they repeat its first position."""
    if state.on_kernels:
        from aspire_llm.engine.slot_kernels import gather as gather_by_kernel

        return Gathered(*gather_by_kernel(state, rows.slots, rows.kinds, rows.starts, rows.offsets, num_tokens))
    slots = rows.slots.long()
    drafts = rows.kinds == RowKind.DRAFT
    starts = torch.where(
        rows.kinds == RowKind.PREFILL, rows.starts, state.computed[slots] + state.pending[slots] * drafts
    )
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
    row = (torch.searchsorted(rows.offsets, tokens, right=True) - 1).clamp(max=len(slots) - 1)
    within = (tokens - rows.offsets[row]).masked_fill(tokens >= rows.offsets[-1], 0)
    positions = starts[row] + within
    return Gathered(starts.int(), drafts, positions, state.tokens[slots[row], positions])


def settle(state: SlotState, rows: StepRows, places: Tensor, sampled: SampleOutput | None) -> None:
    """Counters and tokens of the rows' slots as they are after the step.

    places: int32 [R], real rows only: each one's row of `sampled`; -1 for a row that does not sample. No two have one slot.
    A prompt's chunk is exact to its end; a verification commits what it emitted; a draft is pending, and everything else
    ends what was pending.
    """
    if state.on_kernels:
        from aspire_llm.engine.slot_kernels import settle as settle_by_kernel

        output = None if sampled is None else (sampled.tokens, sampled.num_emitted)
        settle_by_kernel(state, rows.slots, rows.kinds, rows.starts, rows.offsets, places, output)
        return
    num_rows = len(places)
    slots, kinds = rows.slots[:num_rows].long(), rows.kinds[:num_rows]
    ends = rows.starts[:num_rows] + rows.offsets[1 : num_rows + 1] - rows.offsets[:num_rows]
    state.computed[slots] = torch.where(kinds == RowKind.PREFILL, ends.long(), state.computed[slots])
    if sampled is None:
        return
    sampling = places >= 0  # in the order of `sampled`, as the rows are
    slots, kinds = slots[sampling], kinds[sampling]
    drafts, verifies = kinds == RowKind.DRAFT, kinds == RowKind.VERIFY
    # the first new token stands right behind the newest committed token, or behind the last draft
    first = state.computed[slots] + torch.where(drafts, state.pending[slots] + 1, verifies.long())
    columns = torch.arange(sampled.tokens.shape[1], device=slots.device)
    at = (first[:, None] + columns).masked_fill(columns >= sampled.num_emitted[:, None], state.nowhere)
    state.tokens[slots[:, None], at] = sampled.tokens
    state.computed[slots] += sampled.num_emitted * verifies
    state.pending[slots] = (state.pending[slots] + 1) * drafts
