"""What follows attention: pieces of a tile added up, and scores normalised once the sums are known."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row_offsets", "tiles", "row_tiles", "num_rows", "num_heads"])
def combine_kernel(
    part_acc,  # float32 [max pieces * KV heads, ROWS, D]
    part_max,  # float32 [max pieces * KV heads, ROWS]
    part_sum,  # float32 [max pieces * KV heads, ROWS]
    row_offsets,  # int32 [R + 1]
    token_row,  # int32 [T]
    tiles,  # int32 [max tiles, 2] of this layer
    row_tiles,  # int32 [max rows, 2] of this layer
    out,  # out [T, query heads, D]
    lse,  # out float32 [T, query heads]
    num_rows,
    num_heads,
    out_stride_t,
    out_stride_h,
    value_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Grid (T, KV heads). Pieces are added in their order, AT_ONCE at a time, so that the sum depends on nothing else."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.load(token_row + token)
    g = tl.arange(0, G_PAD)
    d = tl.arange(0, D_PAD)
    head = kv_head * GROUP + g
    at = out + token * out_stride_t + head[:, None] * out_stride_h + d[None, :]
    kept = (g < GROUP)[:, None] & (d < D)[None, :]
    if row >= num_rows:  # padding: finite, so that nothing downstream sees garbage
        tl.store(at, tl.zeros([G_PAD, D_PAD], out.dtype.element_ty), mask=kept)
        return
    first_tile = tl.load(row_tiles + row * 2)
    tile_tokens = tl.load(row_tiles + row * 2 + 1)
    local = token.to(tl.int32) - tl.load(row_offsets + row)
    tile = first_tile + local // tile_tokens
    piece = tl.load(tiles + tile * 2)
    count = tl.load(tiles + tile * 2 + 1)
    if count <= 1:
        return
    packed = local % tile_tokens * GROUP + g
    m = tl.full([G_PAD], float("-inf"), tl.float32)
    norm = tl.zeros([G_PAD], tl.float32)
    acc = tl.zeros([G_PAD, D_PAD], tl.float32)
    for first in range(0, count, AT_ONCE):
        p = first + tl.arange(0, AT_ONCE)
        part = ((piece + p) * KV_HEADS + kv_head).to(tl.int64)[:, None] * ROWS + packed[None, :]
        mask = (p < count)[:, None] & (g < GROUP)[None, :]
        maxima = tl.load(part_max + part, mask=mask, other=float("-inf"))
        sums = tl.load(part_sum + part, mask=mask, other=0.0)
        accs = tl.load(
            part_acc + part[:, :, None] * D + d[None, None, :],
            mask=mask[:, :, None] & (d < D)[None, None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(maxima, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(maxima - m_safe[None, :])
        alpha = tl.exp2(m - m_safe)
        norm = norm * alpha + tl.sum(sums * weight, 0)
        acc = acc * alpha[:, None] + tl.sum(accs * weight[:, :, None], 0)
        m = m_new
    safe = tl.where(norm > 0, norm, 1.0)
    tl.store(at, (acc / safe[:, None] * value_scale).to(out.dtype.element_ty), mask=kept)
    tl.store(lse + token * num_heads + head, m + tl.log2(safe), mask=g < GROUP)


@triton.jit(do_not_specialize=["score_ends", "score_blocks"])
def scores_kernel(
    score_p,  # float16 [E, query heads, score_len]
    score_max,  # float32 [E, query heads, score_blocks]
    lse,  # float32 [T, query heads]
    weights,  # float32 [T]
    positions,  # int64 [T]
    entry_token,  # int32 [E]
    row_entries,  # int32 [R, 2]
    score_ends,  # int32 [max rows, 2] of this layer
    scores,  # out float32 [max rows, max_len] of this layer
    max_len,
    score_len,
    score_blocks,
    NUM_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):
    """Grid (programs, R), each program a share of the positions: sum over the row's scored tokens of weight * mean over heads of
    the probability."""
    row = tl.program_id(1)
    end = tl.load(score_ends + row * 2)
    last = tl.maximum(end, tl.load(score_ends + row * 2 + 1))  # what was written the last time is cleared
    width = BLOCKS * BLOCK_N
    for low in range(tl.program_id(0) * width, last, tl.num_programs(0) * width):
        block = low // BLOCK_N + tl.arange(0, BLOCKS)
        n = block[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        # Heads are summed once, at the end: they lie across lanes.
        total = tl.zeros([HEADS_AT_ONCE, BLOCKS, BLOCK_N], tl.float32)
        if low < end:
            for entry in range(tl.load(row_entries + row * 2), tl.load(row_entries + row * 2 + 1)):
                token = tl.load(entry_token + entry)
                position = tl.load(positions + token).to(tl.int32)
                weight = tl.load(weights + token) / NUM_HEADS
                seen = n <= position
                if WINDOW > 0:
                    seen = seen & (n > position - WINDOW)
                some = tl.max(seen.to(tl.int32), 1) > 0
                for first in tl.static_range(0, NUM_HEADS, HEADS_AT_ONCE):
                    head = first + tl.arange(0, HEADS_AT_ONCE)
                    real = head < NUM_HEADS
                    line = (entry * NUM_HEADS + head).to(tl.int64)
                    maxima = tl.load(
                        score_max + line[:, None] * score_blocks + block[None, :],
                        mask=real[:, None] & some[None, :],
                        other=float("-inf"),
                    )
                    sums = tl.load(lse + token * NUM_HEADS + head, mask=real, other=0.0)
                    # Masked by whole blocks, so that loads stay 16 bytes wide.
                    p = tl.load(
                        score_p + line[:, None, None] * score_len + n[None, :, :],
                        mask=real[:, None, None] & some[None, :, None],
                        other=0.0,
                    )
                    p = tl.where(seen[None, :, :], p.to(tl.float32), 0.0)
                    factor = tl.exp2(maxima - sums[:, None]) * weight
                    total += p * factor[:, :, None]
        tl.store(scores + row.to(tl.int64) * max_len + n, tl.sum(total, 0), mask=n < max_len)
