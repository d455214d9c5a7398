"""`replay_decide.decide_in_torch` as a Triton kernel: one program a row."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from aspire_llm.request import RowKind

DRAFT = tl.constexpr(int(RowKind.DRAFT))
VERIFY = tl.constexpr(int(RowKind.VERIFY))


@triton.jit(
    do_not_specialize=[
        "counts", "offsets", "slots", "kinds", "best", "positions", "history", "accepted", "trace_confidence", "requests",
        "begins", "cycles", "tokens", "num_emitted", "confidence", "history_stride", "history_len", "widest", "stride",
        "num_starts", "num_drafts",
    ]
)  # fmt: skip
def decide_kernel(
    counts,  # int64 [R]
    offsets,  # int64 [R]
    slots,  # int64 [R]
    kinds,  # int64 [R]
    best,  # int64 [N]
    positions,  # int64 [N]
    history,  # int64 [slots, history_len]
    accepted,  # int64 [requests, num_starts]
    trace_confidence,  # float32 [requests, num_starts, num_drafts]
    requests,  # int64 [slots]
    begins,  # int64 [slots]
    cycles,  # int64 [slots], in place
    tokens,  # out int64 [R, widest]
    num_emitted,  # out int64 [R]
    confidence,  # out float32 [R]
    history_stride,
    history_len,
    widest,
    stride,
    num_starts,
    num_drafts,
    BLOCK: tl.constexpr,
):
    """Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    kind = tl.load(kinds + row)
    offset = tl.load(offsets + row)
    first = tl.load(positions + offset)
    cycle = tl.where(kind == DRAFT, tl.load(cycles + slot), first)
    output = tl.maximum(cycle - tl.load(begins + slot), 0)
    start = tl.load(requests + slot) * num_starts + output // stride % num_starts
    held = tl.minimum(tl.load(accepted + start), tl.load(counts + row) - 1)
    held = tl.where(kind == VERIFY, held, 0)
    newest = tl.load(best + offset + held)
    for block in range(0, widest, BLOCK):
        j = block + tl.arange(0, BLOCK)
        place = tl.minimum(first + j + 1, history_len - 1)
        draft = tl.load(history + slot * history_stride + place, mask=j < held, other=0)
        token = tl.where(j < held, draft, tl.where(j == held, newest, 0))
        tl.store(tokens + row * widest + j, token, mask=j < widest)
    tl.store(num_emitted + row, held + 1)
    # a draft's place in its cycle: how far its position is from the newest committed token's
    depth = tl.minimum(tl.maximum(first - cycle, 0), num_drafts - 1)
    sure = tl.load(trace_confidence + start * num_drafts + depth)
    tl.store(confidence + row, tl.where(kind == DRAFT, sure, 0.0))
    # the next cycle begins at the token that a verification, or the end of the prompt, just gave
    tl.store(cycles + slot, tl.where(kind == DRAFT, cycle, first + held + 1))
