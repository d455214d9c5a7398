"""`slot_ops` as Triton kernels: one program a row, which writes its own slot alone.

Nothing is specialised on an argument's value or alignment: each kernel is compiled once.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_llm.engine.slots import SlotState
from aspire_llm.request import RowKind

PREFILL = tl.constexpr(int(RowKind.PREFILL))
DRAFT = tl.constexpr(int(RowKind.DRAFT))
VERIFY = tl.constexpr(int(RowKind.VERIFY))


@triton.jit(
    do_not_specialize=[
        "slots", "kinds", "prefill_starts", "offsets", "computed", "pending", "tokens", "starts", "sparse", "positions",
        "token_ids", "num_tokens", "tokens_stride",
    ]
)  # fmt: skip
def gather_kernel(
    slots,  # int32 [R]
    kinds,  # int32 [R]
    prefill_starts,  # int32 [R]
    offsets,  # int32 [R + 1]
    computed,  # int64 [S]
    pending,  # int64 [S]
    tokens,  # int64 [S, columns]
    starts,  # out int32 [R]
    sparse,  # out bool [R]
    positions,  # out int64 [T]
    token_ids,  # out int64 [T]
    num_tokens,
    tokens_stride,
    BLOCK: tl.constexpr,
):
    """Grid (R,)."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    kind = tl.load(kinds + row)
    first = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    newest = tl.load(computed + slot) + tl.where(kind == DRAFT, tl.load(pending + slot), 0)
    start = tl.where(kind == PREFILL, tl.load(prefill_starts + row).to(tl.int64), newest)
    tl.store(starts + row, start.to(tl.int32))
    tl.store(sparse + row, kind == DRAFT)
    stop = tl.where(row == tl.num_programs(0) - 1, num_tokens, end)  # padding tokens are the last row's
    for block in range(first, stop, BLOCK):
        t = block + tl.arange(0, BLOCK)
        mine = t < stop
        position = start + tl.where(t < end, t - first, 0)
        tl.store(positions + t, position, mask=mine)
        token = tl.load(tokens + slot * tokens_stride + position, mask=mine, other=0)
        tl.store(token_ids + t, token, mask=mine)


@triton.jit(
    do_not_specialize=[
        "slots", "kinds", "prefill_starts", "offsets", "places", "sampled", "num_emitted", "computed", "pending", "tokens",
        "sampled_stride", "tokens_stride",
    ]
)  # fmt: skip
def settle_kernel(
    slots,  # int32 [R]
    kinds,  # int32 [R]
    prefill_starts,  # int32 [R]
    offsets,  # int32 [R + 1]
    places,  # int32 [R]
    sampled,  # int64 [Q, widest]
    num_emitted,  # int64 [Q]
    computed,  # int64 [S], in place
    pending,  # int64 [S], in place
    tokens,  # int64 [S, columns], in place
    sampled_stride,
    tokens_stride,
    BLOCK: tl.constexpr,
):
    """Grid (R,)."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    kind = tl.load(kinds + row)
    drafted = tl.load(pending + slot)
    known = tl.load(computed + slot)
    end = tl.load(prefill_starts + row) + tl.load(offsets + row + 1) - tl.load(offsets + row)
    known = tl.where(kind == PREFILL, end.to(tl.int64), known)
    place = tl.load(places + row).to(tl.int64)
    emitted = tl.load(num_emitted + place, mask=place >= 0, other=0)
    # the first new token stands right behind the newest committed token, or behind the last draft
    first = known + tl.where(kind == DRAFT, drafted + 1, tl.where(kind == VERIFY, 1, 0))
    for block in range(0, emitted.to(tl.int32), BLOCK):
        j = block + tl.arange(0, BLOCK)
        token = tl.load(sampled + place * sampled_stride + j, mask=j < emitted, other=0)
        tl.store(tokens + slot * tokens_stride + first + j, token, mask=j < emitted)
    tl.store(computed + slot, known + tl.where(kind == VERIFY, emitted, 0))
    tl.store(pending + slot, tl.where(kind == DRAFT, drafted + 1, 0), mask=place >= 0)


def gather(
    state: SlotState, slots: Tensor, kinds: Tensor, prefill_starts: Tensor, offsets: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Starts, which rows are sparse, positions and token ids, as `slot_ops.Gathered` says."""
    device, rows = slots.device, slots.shape[0]
    starts = torch.empty(rows, dtype=torch.int32, device=device)
    sparse = torch.empty(rows, dtype=torch.bool, device=device)
    positions, token_ids = torch.empty(2, num_tokens, dtype=torch.int64, device=device).unbind()
    gather_kernel[(rows,)](
        slots, kinds, prefill_starts, offsets, state.computed, state.pending, state.tokens,
        starts, sparse, positions, token_ids, num_tokens, state.tokens.stride(0), BLOCK=256, num_warps=4,
    )  # fmt: skip
    return starts, sparse, positions, token_ids


def settle(
    state: SlotState,
    slots: Tensor,
    kinds: Tensor,
    prefill_starts: Tensor,
    offsets: Tensor,
    places: Tensor,
    sampled: tuple[Tensor, Tensor] | None,
) -> None:
    """As `slot_ops.settle`. sampled: tokens int64 [Q, widest], contiguous in a row, and how many of each row are emitted."""
    tokens, num_emitted = (state.tokens, state.computed) if sampled is None else sampled  # without any, none is read
    settle_kernel[(places.shape[0],)](
        slots, kinds, prefill_starts, offsets, places, tokens, num_emitted,
        state.computed, state.pending, state.tokens, tokens.stride(0), state.tokens.stride(0),
        BLOCK=32, num_warps=1,  # of one warp: counters are read by all of it before they are overwritten
    )  # fmt: skip
