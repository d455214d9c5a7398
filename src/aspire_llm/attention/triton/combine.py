"""What follows attention: pieces of a tile added up, and scores normalised once the sums are known."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

MAXIMA_AT_ONCE = tl.constexpr(32)


@triton.jit
def _lines(piece, p, kv_head, packed, KV_HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Where the rows `packed` [G_PAD] of pieces piece + p [N] of a tile lie, int64 [N, G_PAD]."""
    return ((piece + p) * KV_HEADS + kv_head).to(tl.int64)[:, None] * ROWS + packed[None, :]


@triton.jit
def _maxima(
    part_max, piece, first, count, kv_head, packed,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """[N, G_PAD] of the tile's pieces from the first-th on, -inf past the last of `count`."""
    p = first + tl.arange(0, N)
    mask = (p < count)[:, None] & (tl.arange(0, packed.shape[0]) < GROUP)[None, :]
    return tl.load(part_max + _lines(piece, p, kv_head, packed, KV_HEADS, ROWS), mask=mask, other=float("-inf"))


@triton.jit
def _parts(
    part_acc, part_max, part_sum, piece, first, count, kv_head, packed,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """As `_maxima`; and their sums [N, G_PAD] and accumulators [N, G_PAD, D_PAD], zeros past the last."""
    p = first + tl.arange(0, N)
    d = tl.arange(0, D_PAD)
    mask = (p < count)[:, None] & (tl.arange(0, packed.shape[0]) < GROUP)[None, :]
    lines = _lines(piece, p, kv_head, packed, KV_HEADS, ROWS)
    maxima = tl.load(part_max + lines, mask=mask, other=float("-inf"))
    sums = tl.load(part_sum + lines, mask=mask, other=0.0)
    accs = tl.load(
        part_acc + lines[:, :, None] * D + d[None, None, :], mask=mask[:, :, None] & (d < D)[None, None, :], other=0.0
    )
    return maxima, sums, accs


@triton.jit(do_not_specialize=["row_offsets", "num_rows", "num_heads"])
def combine_kernel(
    part_acc,  # float32 [max pieces * KV heads, ROWS, D]
    part_max,  # float32 [max pieces * KV heads, ROWS]
    part_sum,  # float32 [max pieces * KV heads, ROWS]
    token_parts,  # int32 [T, 4], as attention left them; of padding they may be anything
    row_offsets,  # int32 [R + 1]
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
    """Grid (T, KV heads). Pieces are added in their order, AT_ONCE at a time, so that the sum depends on nothing else; few at a
    time, so that registers hold many programs."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    piece = tl.load(token_parts + token * 4)
    count = tl.load(token_parts + token * 4 + 1)
    local = tl.load(token_parts + token * 4 + 2)
    g = tl.arange(0, G_PAD)
    d = tl.arange(0, D_PAD)
    head = kv_head * GROUP + g
    at = out + token * out_stride_t + head[:, None] * out_stride_h + d[None, :]
    kept = (g < GROUP)[:, None] & (d < D)[None, :]
    if token >= tl.load(row_offsets + num_rows):  # padding: finite, so that nothing downstream sees garbage
        tl.store(at, tl.zeros([G_PAD, D_PAD], out.dtype.element_ty), mask=kept)
        return
    if count <= 1:
        return
    packed = local * GROUP + g
    # The first pieces are on their way while the maximum is sought among the others, of which there mostly are none.
    maxima, sums, accs = _parts(
        part_acc, part_max, part_sum, piece, 0, count, kv_head, packed, GROUP, D, D_PAD, KV_HEADS, ROWS, AT_ONCE
    )
    m = tl.max(maxima, 0)
    for first in range(AT_ONCE, count, MAXIMA_AT_ONCE):
        m = tl.maximum(
            m, tl.max(_maxima(part_max, piece, first, count, kv_head, packed, GROUP, KV_HEADS, ROWS, MAXIMA_AT_ONCE), 0)
        )
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    weight = tl.exp2(maxima - m_safe[None, :])
    norm = tl.sum(sums * weight, 0)
    acc = tl.sum(accs * weight[:, :, None], 0)
    for first in range(AT_ONCE, count, AT_ONCE):
        maxima, sums, accs = _parts(
            part_acc, part_max, part_sum, piece, first, count, kv_head, packed, GROUP, D, D_PAD, KV_HEADS, ROWS, AT_ONCE
        )
        weight = tl.exp2(maxima - m_safe[None, :])
        norm += tl.sum(sums * weight, 0)
        acc += tl.sum(accs * weight[:, :, None], 0)
    safe = tl.where(norm > 0, norm, 1.0)
    tl.store(at, (acc / safe[:, None] * value_scale).to(out.dtype.element_ty), mask=kept)
    tl.store(lse + token * num_heads + head, m + tl.log2(safe), mask=g < GROUP)


@triton.jit
def _block_ends(score_rows, num_scored, BLOCK_R: tl.constexpr, WIDTH: tl.constexpr):
    """Blocks of all scored rows lie end to end: past which one each row ends, int32 [BLOCK_R]. The last value is their
    number."""
    r = tl.arange(0, BLOCK_R)
    live = r < num_scored
    end = tl.load(score_rows + r * 8 + 3, mask=live, other=0)
    written = tl.load(score_rows + r * 8 + 4, mask=live, other=0)
    return tl.cumsum((tl.maximum(end, written) + WIDTH - 1) // WIDTH, 0)


@triton.jit
def _scored_block(flat, ends, WIDTH: tl.constexpr):
    """Block number `flat`: its row's line in score_rows, and its first position."""
    before = ends <= flat
    return tl.sum(before.to(tl.int32), 0), (flat - tl.max(tl.where(before, ends, 0), 0)) * WIDTH


@triton.jit
def _probabilities(
    score_x, score_ref, lse, weights, positions, place, token0, token1, n, end, score_len,
    TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, CELL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Scores of positions n [WIDTH] of a row that ends at `end` and has TOKENS scored tokens. place: int64, the row's first
    line in score_x."""
    c = tl.arange(0, TOKENS * CELL)
    token = tl.where(c < CELL, token0, token1).to(tl.int64)
    real = c % CELL < GROUP
    # Alike for all columns, so that they are loaded as vectors. What lies beyond a token's own tile may be anything.
    inside = n < end
    if WINDOW > 0:
        inside = inside & (n > tl.load(positions + token0).to(tl.int32) - WINDOW)
    x_at = score_x + place * score_len * (2 * CELL) + n[:, None] * (TOKENS * CELL) + c[None, :]
    # Columns are summed once, at the end, so that no sum waits for another.
    sums = tl.zeros([n.shape[0], TOKENS * CELL], tl.float32)
    for kv_head in tl.static_range(KV_HEADS):
        x = tl.load(x_at + kv_head * score_len * (2 * CELL), mask=inside[:, None], other=0.0)
        first = tl.load(score_ref + (place + kv_head) * (2 * CELL) + c)
        total = tl.load(lse + token * (KV_HEADS * GROUP) + kv_head * GROUP + c % CELL, mask=real, other=0.0)
        sums += tl.exp2(x.to(tl.float32) + (first - total)[None, :])
    position = tl.load(positions + token, mask=real, other=-1).to(tl.int32)
    weight = tl.load(weights + token, mask=real, other=0.0) / (KV_HEADS * GROUP)
    seen = n[:, None] <= position[None, :]
    if WINDOW > 0:
        seen = seen & (n[:, None] > position[None, :] - WINDOW)
    return tl.sum(tl.where(seen, sums * weight[None, :], 0.0), 1)


@triton.jit(do_not_specialize=["score_rows", "num_scored", "scores"])
def scores_kernel(
    score_x,  # float16 [max rows, KV heads, score_len, 2 * CELL], or CELL where a row has one scored token: see attend.py
    score_ref,  # float32 [max rows, KV heads, 2 * CELL]
    lse,  # float32 [T, query heads]
    weights,  # float32 [T]
    positions,  # int64 [T]
    score_rows,  # int32 [max rows, 8] of this layer
    num_scored,  # int32 [1] of this layer
    scores,  # out float32 [max rows, max_len] of this layer
    max_len,
    score_len,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    CELL: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (programs,): sum over a row's (at most two) scored tokens of weight * mean over heads of the probability."""
    ends = _block_ends(score_rows, tl.load(num_scored), BLOCK_R, WIDTH)
    for flat in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        rank, low = _scored_block(flat, ends, WIDTH)
        line = score_rows + rank * 8
        row = tl.load(line).to(tl.int64)
        token0 = tl.load(line + 1)
        token1 = tl.load(line + 2)
        end = tl.load(line + 3)
        tokens = tl.load(line + 6) - tl.load(line + 5)
        place = (rank * KV_HEADS).to(tl.int64)
        n = low + tl.arange(0, WIDTH)
        at = scores + row * max_len + n
        if tokens == 1:
            result = _probabilities(
                score_x, score_ref, lse, weights, positions, place, token0, token1, n, end, score_len,
                1, KV_HEADS, GROUP, CELL, WINDOW,
            )  # fmt: skip
            tl.store(at, result, mask=n < max_len)
        elif tokens == 2:
            result = _probabilities(
                score_x, score_ref, lse, weights, positions, place, token0, token1, n, end, score_len,
                2, KV_HEADS, GROUP, CELL, WINDOW,
            )  # fmt: skip
            tl.store(at, result, mask=n < max_len)
        else:  # done by `probe_kernel`, up to the row's end
            tl.store(at, tl.zeros([WIDTH], tl.float32), mask=(n >= end) & (n < max_len))


@triton.jit(do_not_specialize=["score_rows", "num_scored", "scores"])
def probe_kernel(
    q,  # [T, query heads, D]
    k_cache,  # [KV heads, places, D]
    lse,  # float32 [T, query heads]
    weights,  # float32 [T]
    positions,  # int64 [T]
    slots,  # int32 [R]
    page_table,  # int32 [S, max pages]
    entry_token,  # int32 [E]
    score_rows,  # int32 [max rows, 8] of this layer
    num_scored,  # int32 [1] of this layer
    scores,  # out float32 [max rows, max_len] of this layer
    max_len,
    table_stride,
    q_stride_t,
    q_stride_h,
    k_stride_h,
    k_stride,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (programs,): scores of rows with more than two scored tokens, which is what the end of a prompt has for some
    selectors. Reads those rows' keys again, once in a request's life."""
    c = tl.arange(0, COLUMNS)
    d = tl.arange(0, D_PAD)
    TOKENS: tl.constexpr = COLUMNS // GROUP
    ends = _block_ends(score_rows, tl.load(num_scored), BLOCK_R, WIDTH)
    for flat in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        rank, low = _scored_block(flat, ends, WIDTH)
        line = score_rows + rank * 8
        row = tl.load(line).to(tl.int64)
        end = tl.load(line + 3)
        entry0 = tl.load(line + 5)
        entry1 = tl.load(line + 6)
        if (entry1 - entry0 > 2) & (low < end):
            n = low + tl.arange(0, WIDTH)
            inside = n < end
            slot = tl.load(slots + row).to(tl.int64)
            page = tl.load(page_table + slot * table_stride + n // PAGE, mask=inside, other=0).to(tl.int64)
            places = page * PAGE + n % PAGE
            sums = tl.zeros([WIDTH, COLUMNS], tl.float32)
            for first in range(entry0, entry1, TOKENS):
                entry = first + c // GROUP
                real = (entry < entry1) & (c < TOKENS * GROUP)
                token = tl.load(entry_token + entry, mask=real, other=0).to(tl.int64)
                position = tl.load(positions + token, mask=real, other=-1).to(tl.int32)
                weight = tl.load(weights + token, mask=real, other=0.0) / (KV_HEADS * GROUP)
                seen = inside[:, None] & (n[:, None] <= position[None, :])
                if WINDOW > 0:
                    seen = seen & (n[:, None] > position[None, :] - WINDOW)
                for kv_head in range(KV_HEADS):
                    head = kv_head * GROUP + c % GROUP
                    qc = tl.load(
                        q + token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :],
                        mask=real[:, None] & (d[None, :] < D),
                        other=0.0,
                    )
                    k = tl.load(
                        k_cache + tl.cast(kv_head, tl.int64) * k_stride_h + places[:, None] * k_stride + d[None, :],
                        mask=inside[:, None] & (d[None, :] < D),
                        other=0.0,
                    )
                    x = tl.dot(k.to(qc.dtype), tl.trans(qc), input_precision="ieee") * scale_log2
                    norm = tl.load(lse + token * (KV_HEADS * GROUP) + head, mask=real, other=0.0)
                    sums += tl.where(seen, tl.exp2(x - norm[None, :]) * weight[None, :], 0.0)
            tl.store(scores + row * max_len + n, tl.sum(sums, 1), mask=inside)
