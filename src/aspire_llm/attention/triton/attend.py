"""Paged attention of one layer: every row of the step, whatever its kind, in one launch.

A program takes one piece (see work.py) for one KV head. The group's query heads and the tile's tokens are packed as rows of
one matrix, r = token * group + head, so keys and values are read once for all of them. Softmax is kept in base 2 and online.
A tile with one piece writes its output; else each piece leaves (accumulator, maximum, sum) for combine.py.

Tiles of 65-72 rows (17 tokens at a group of 4) hold 64 rows as usual and 8 more transposed, keys as the long side: both
products then read one copy of K and of V from shared memory, and no program multiplies more than 72 rows for 68.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from aspire_llm.attention.triton.work import PIECE_FIELDS


@triton.jit
def _places(
    start, base, list_len, high, set_row, table_row, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, LISTED: tl.constexpr
):
    """Cache places of the keys at indices start.., int64 [BLOCK_N]. Those past the end repeat the last one, so that nothing
    unwritten is read."""
    i = tl.minimum(start + tl.arange(0, BLOCK_N), high - 1)
    position = base + i
    if LISTED:
        position = tl.where(i < list_len, tl.load(set_row + i, mask=i < list_len, other=0), position)
    return tl.load(table_row + position // PAGE).to(tl.int64) * PAGE + position % PAGE


@triton.jit
def _whole_block(
    cache,
    first,
    table_row,
    offsets,
    stride,
    dtype: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys or values at positions first..first + BLOCK_N - 1, all written, of a row that has no list: in one page where a
    page holds a block, since rows start at a multiple of BLOCK_N. offsets: those of the block's elements."""
    if BLOCK_N <= PAGE:
        page = tl.load(table_row + first // PAGE)
        at = cache + (page.to(tl.int64) * PAGE + first % PAGE) * stride + offsets
    else:
        position = first + tl.arange(0, BLOCK_N)
        places = tl.load(table_row + position // PAGE).to(tl.int64) * PAGE + position % PAGE
        at = cache + places[:, None] * stride + tl.arange(0, D_PAD)[None, :]
    if D == D_PAD:
        block = tl.load(at)
    else:
        block = tl.load(at, mask=tl.arange(0, D_PAD)[None, :] < D, other=0.0)
    return block.to(dtype)


@triton.jit
def _offsets(stride, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.arange(0, BLOCK_N)[:, None] * stride + tl.arange(0, D_PAD)[None, :]


@triton.jit
def _whole_end(low, high, base, position0, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, LISTED: tl.constexpr):
    """Up to here every block from `low` on is seen whole by every token: no mask, and no end to mind."""
    if LISTED or WINDOW > 0:
        return low
    seen = tl.minimum(high, position0 + 1 - base)
    return low + tl.maximum(seen - low, 0) // BLOCK_N * BLOCK_N


@triton.jit
def _seen(start, base, list_len, high, BLOCK_N: tl.constexpr):
    """Positions for the causal mask: listed keys are before every token, keys past the end after every token."""
    i = start + tl.arange(0, BLOCK_N)
    return tl.where(i < high, tl.where(i < list_len, 0, base + i), 2147483647)


@triton.jit
def _visible(positions, queries, WINDOW: tl.constexpr):
    ok = positions <= queries
    if WINDOW > 0:
        ok = ok & (positions > queries - WINDOW)
    return ok


@triton.jit
def _write_rows(
    acc,
    m,
    norm,
    r,
    out,
    lse,
    part_acc,
    part_max,
    part_sum,
    token0,
    count,
    head0,
    pieces,
    part,
    out_stride_t,
    out_stride_h,
    num_heads,
    value_scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """acc [M, D_PAD], m and norm [M] of packed rows r [M]."""
    d = tl.arange(0, D_PAD)
    live = r < count * GROUP
    if pieces == 1:
        token = (token0 + r // GROUP).to(tl.int64)
        head = head0 + r % GROUP
        safe = tl.where(norm > 0, norm, 1.0)
        result = acc / safe[:, None] * value_scale
        at = out + token[:, None] * out_stride_t + head[:, None] * out_stride_h + d[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None] & (d[None, :] < D))
        tl.store(lse + token * num_heads + head, m + tl.log2(safe), mask=live)
    else:
        row = part * ROWS + r
        tl.store(part_acc + row[:, None] * D + d[None, :], acc, mask=live[:, None] & (d[None, :] < D))
        tl.store(part_max + row, m, mask=live)
        tl.store(part_sum + row, norm, mask=live)


@triton.jit
def _load_queries(
    q, r, token0, count, head0, stride_t, stride_h, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    d = tl.arange(0, D_PAD)
    at = (token0 + r // GROUP).to(tl.int64)[:, None] * stride_t + (head0 + r % GROUP)[:, None] * stride_h + d[None, :]
    return tl.load(q + at, mask=(r < count * GROUP)[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def _load_block(cache, places, stride, dtype: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    d = tl.arange(0, D_PAD)
    at = cache + places[:, None] * stride + d[None, :]
    if D == D_PAD:
        block = tl.load(at)
    else:
        block = tl.load(at, mask=d[None, :] < D, other=0.0)
    return block.to(dtype)


@triton.jit
def _load_scored(
    q, c, token0, scored0, scored1, head0, stride_t, stride_h,
    GROUP: tl.constexpr, CELL: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Queries of the tile's scored tokens, [len(c), D_PAD]: column c is head c % CELL of the row's first scored token, or of
    its last; zeros past GROUP. And which columns this tile stores: whole cells, so that they are stored as vectors."""
    d = tl.arange(0, D_PAD)
    local = tl.where(c < CELL, scored0, tl.where(c < 2 * CELL, scored1, -1))
    here = local >= 0
    real = here & (c % CELL < GROUP)
    at = (token0 + local).to(tl.int64)[:, None] * stride_t + (head0 + c % CELL)[:, None] * stride_h + d[None, :]
    return tl.load(q + at, mask=real[:, None] & (d[None, :] < D), other=0.0), here


@triton.jit
def _first_logits(
    qc,
    k_head,
    table_row,
    stride,
    scale_log2,
    dtype: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Logits of the row's first position, [len(qc)]: the point that stored ones are counted from. It is a sink, so those of
    the best positions are near it and half precision is enough."""
    d = tl.arange(0, D_PAD)
    key = tl.load(k_head + tl.load(table_row).to(tl.int64) * PAGE * stride + d, mask=d < D, other=0.0)
    return tl.sum(qc.to(tl.float32) * key.to(dtype).to(tl.float32)[None, :], 1) * scale_log2


@triton.jit
def _tile(
    q, out, lse, part_acc, part_max, part_sum, set_row, table_row, score_x, score_ref,
    k_head, v_head, token0, count, position0, list_len, base, low, high, pieces, scored0, scored1, score_line,
    score_stride, head0, part,
    q_stride_t, q_stride_h, k_stride, v_stride, out_stride_t, out_stride_h, num_heads, score_len,
    scale_log2, value_scale,
    M: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, LISTED: tl.constexpr, SCORED: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """A tile of at most M packed rows."""
    # Triton spreads stages over the chain of loads (page -> keys, or list -> page -> keys): this many keep DEPTH blocks of
    # keys and values on their way.
    STAGES: tl.constexpr = (3 if LISTED else 2) * DEPTH + 1
    r = tl.arange(0, M)
    queries = tl.where(r < count * GROUP, position0 + r // GROUP, -1)
    qs = _load_queries(q, r, token0, count, head0, q_stride_t, q_stride_h, GROUP, D, D_PAD)
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_PAD], tl.float32)
    if SCORED:
        c = tl.arange(0, COLUMNS)
        qc, here = _load_scored(q, c, token0, scored0, scored1, head0, q_stride_t, q_stride_h, GROUP, CELL, D, D_PAD)
        first = _first_logits(qc, k_head, table_row, k_stride, scale_log2, qc.dtype, D, D_PAD, PAGE)
        if low == 0:
            tl.store(score_ref + score_line.to(tl.int64) * (2 * CELL) + c, first, mask=here)
        qc = tl.trans(qc)
        score_x += score_line.to(tl.int64) * score_len * (2 * CELL) + base * score_stride
        score_at = tl.arange(0, BLOCK_N)[:, None] * score_stride + c[None, :]
    whole_end = _whole_end(low, high, base, position0, BLOCK_N, WINDOW, LISTED)
    if not (LISTED or WINDOW > 0):
        k_offsets = _offsets(k_stride, D_PAD, BLOCK_N)
        v_offsets = _offsets(v_stride, D_PAD, BLOCK_N)
        for start in tl.range(low, whole_end, BLOCK_N, num_stages=STAGES):
            k = _whole_block(k_head, base + start, table_row, k_offsets, k_stride, qs.dtype, D, D_PAD, PAGE, BLOCK_N)
            s = tl.dot(qs, tl.trans(k), input_precision="ieee")
            m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
            p = tl.exp2(s * scale_log2 - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            norm = norm * alpha + tl.sum(p, 1)
            v = _whole_block(v_head, base + start, table_row, v_offsets, v_stride, qs.dtype, D, D_PAD, PAGE, BLOCK_N)
            acc = tl.dot(p.to(qs.dtype), v, acc * alpha[:, None], input_precision="ieee")
            m = m_new
            if SCORED:
                x = tl.dot(k, qc, input_precision="ieee") * scale_log2 - first[None, :]
                tl.store(score_x + start * score_stride + score_at, x.to(score_x.dtype.element_ty), mask=here[None, :])
    for start in tl.range(whole_end, high, BLOCK_N, num_stages=STAGES if LISTED or WINDOW > 0 else 1):
        places = _places(start, base, list_len, high, set_row, table_row, PAGE, BLOCK_N, LISTED)
        k = _load_block(k_head, places, k_stride, qs.dtype, D, D_PAD)
        s = tl.dot(qs, tl.trans(k), input_precision="ieee")
        positions = _seen(start, base, list_len, high, BLOCK_N)
        s = tl.where(_visible(positions[None, :], queries[:, None], WINDOW), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * scale_log2 - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        norm = norm * alpha + tl.sum(p, 1)
        v = _load_block(v_head, places, v_stride, qs.dtype, D, D_PAD)
        acc = tl.dot(p.to(qs.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
        if SCORED:
            x = tl.dot(k, qc, input_precision="ieee") * scale_log2 - first[None, :]
            kept = here[None, :] & ((start + tl.arange(0, BLOCK_N)) < high)[:, None]
            tl.store(score_x + start * score_stride + score_at, x.to(score_x.dtype.element_ty), mask=kept)
    _write_rows(
        acc, m, norm, r, out, lse, part_acc, part_max, part_sum, token0, count, head0, pieces, part,
        out_stride_t, out_stride_h, num_heads, value_scale, GROUP, D, D_PAD, ROWS,
    )  # fmt: skip


@triton.jit
def _tile_72(
    q, out, lse, part_acc, part_max, part_sum, set_row, table_row, score_x, score_ref,
    k_head, v_head, token0, count, position0, list_len, base, low, high, pieces, scored0, scored1, score_line,
    score_stride, head0, part,
    q_stride_t, q_stride_h, k_stride, v_stride, out_stride_t, out_stride_h, num_heads, score_len,
    scale_log2, value_scale,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SCORED: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """A tile of 65-72 packed rows: `a` the first 64, `b` the other 8, transposed."""
    STAGES: tl.constexpr = 2 * DEPTH + 1
    ra = tl.arange(0, 64)
    EXTRA: tl.constexpr = 8
    rb = 64 + tl.arange(0, EXTRA)
    queries_a = tl.where(ra < count * GROUP, position0 + ra // GROUP, -1)
    queries_b = tl.where(rb < count * GROUP, position0 + rb // GROUP, -1)
    qa = _load_queries(q, ra, token0, count, head0, q_stride_t, q_stride_h, GROUP, D, D_PAD)
    qb = tl.trans(_load_queries(q, rb, token0, count, head0, q_stride_t, q_stride_h, GROUP, D, D_PAD))
    ma = tl.full([64], float("-inf"), tl.float32)
    mb = tl.full([EXTRA], float("-inf"), tl.float32)
    norm_a = tl.zeros([64], tl.float32)
    # Sums of `b` stay apart for each key of the block until the end: keys lie across warps.
    norm_b = tl.zeros([BLOCK_N, EXTRA], tl.float32)
    acc_a = tl.zeros([64, D_PAD], tl.float32)
    acc_b = tl.zeros([D_PAD, EXTRA], tl.float32)
    if SCORED:
        c = tl.arange(0, COLUMNS)
        qc, here = _load_scored(q, c, token0, scored0, scored1, head0, q_stride_t, q_stride_h, GROUP, CELL, D, D_PAD)
        first = _first_logits(qc, k_head, table_row, k_stride, scale_log2, qc.dtype, D, D_PAD, PAGE)
        if low == 0:
            tl.store(score_ref + score_line.to(tl.int64) * (2 * CELL) + c, first, mask=here)
        qc = tl.trans(qc)
        score_x += score_line.to(tl.int64) * score_len * (2 * CELL) + base * score_stride
        score_at = tl.arange(0, BLOCK_N)[:, None] * score_stride + c[None, :]
    whole_end = _whole_end(low, high, base, position0, BLOCK_N, WINDOW, False)
    if WINDOW == 0:
        k_offsets = _offsets(k_stride, D_PAD, BLOCK_N)
        v_offsets = _offsets(v_stride, D_PAD, BLOCK_N)
        for start in tl.range(low, whole_end, BLOCK_N, num_stages=STAGES):
            k = _whole_block(k_head, base + start, table_row, k_offsets, k_stride, qa.dtype, D, D_PAD, PAGE, BLOCK_N)
            sa = tl.dot(qa, tl.trans(k), input_precision="ieee")
            sb = tl.dot(k, qb, input_precision="ieee")
            ma_new = tl.maximum(ma, tl.max(sa, 1) * scale_log2)
            mb_new = tl.maximum(mb, tl.max(sb, 0) * scale_log2)
            pa = tl.exp2(sa * scale_log2 - ma_new[:, None])
            pb = tl.exp2(sb * scale_log2 - mb_new[None, :])
            alpha_a = tl.exp2(ma - ma_new)
            alpha_b = tl.exp2(mb - mb_new)
            norm_a = norm_a * alpha_a + tl.sum(pa, 1)
            norm_b = norm_b * alpha_b[None, :] + pb
            v = _whole_block(v_head, base + start, table_row, v_offsets, v_stride, qa.dtype, D, D_PAD, PAGE, BLOCK_N)
            acc_a = tl.dot(pa.to(qa.dtype), v, acc_a * alpha_a[:, None], input_precision="ieee")
            acc_b = tl.dot(tl.trans(v), pb.to(qa.dtype), acc_b * alpha_b[None, :], input_precision="ieee")
            ma = ma_new
            mb = mb_new
            if SCORED:
                x = tl.dot(k, qc, input_precision="ieee") * scale_log2 - first[None, :]
                tl.store(score_x + start * score_stride + score_at, x.to(score_x.dtype.element_ty), mask=here[None, :])
    for start in tl.range(whole_end, high, BLOCK_N, num_stages=STAGES if WINDOW > 0 else 1):
        places = _places(start, base, list_len, high, set_row, table_row, PAGE, BLOCK_N, False)
        k = _load_block(k_head, places, k_stride, qa.dtype, D, D_PAD)
        sa = tl.dot(qa, tl.trans(k), input_precision="ieee")
        sb = tl.dot(k, qb, input_precision="ieee")
        positions = _seen(start, base, list_len, high, BLOCK_N)
        sa = tl.where(_visible(positions[None, :], queries_a[:, None], WINDOW), sa, float("-inf"))
        sb = tl.where(_visible(positions[:, None], queries_b[None, :], WINDOW), sb, float("-inf"))
        ma_new = tl.maximum(ma, tl.max(sa, 1) * scale_log2)
        mb_new = tl.maximum(mb, tl.max(sb, 0) * scale_log2)
        ma_safe = tl.where(ma_new == float("-inf"), 0.0, ma_new)
        mb_safe = tl.where(mb_new == float("-inf"), 0.0, mb_new)
        pa = tl.exp2(sa * scale_log2 - ma_safe[:, None])
        pb = tl.exp2(sb * scale_log2 - mb_safe[None, :])
        alpha_a = tl.exp2(ma - ma_safe)
        alpha_b = tl.exp2(mb - mb_safe)
        norm_a = norm_a * alpha_a + tl.sum(pa, 1)
        norm_b = norm_b * alpha_b[None, :] + pb
        v = _load_block(v_head, places, v_stride, qa.dtype, D, D_PAD)
        acc_a = tl.dot(pa.to(qa.dtype), v, acc_a * alpha_a[:, None], input_precision="ieee")
        acc_b = tl.dot(tl.trans(v), pb.to(qa.dtype), acc_b * alpha_b[None, :], input_precision="ieee")
        ma = ma_new
        mb = mb_new
        if SCORED:
            x = tl.dot(k, qc, input_precision="ieee") * scale_log2 - first[None, :]
            kept = here[None, :] & ((start + tl.arange(0, BLOCK_N)) < high)[:, None]
            tl.store(score_x + start * score_stride + score_at, x.to(score_x.dtype.element_ty), mask=kept)
    _write_rows(
        acc_a, ma, norm_a, ra, out, lse, part_acc, part_max, part_sum, token0, count, head0, pieces, part,
        out_stride_t, out_stride_h, num_heads, value_scale, GROUP, D, D_PAD, ROWS,
    )  # fmt: skip
    _write_rows(
        tl.trans(acc_b), mb, tl.sum(norm_b, 0), rb, out, lse, part_acc, part_max, part_sum, token0, count, head0, pieces, part,
        out_stride_t, out_stride_h, num_heads, value_scale, GROUP, D, D_PAD, ROWS,
    )  # fmt: skip


# Not specialised: what differs between layers or steps, else the same kernel would be compiled again and again.
@triton.jit(do_not_specialize=["num_pieces", "sets", "num_heads", "table_stride", "set_stride"])
def attend_kernel(
    q,  # [T, query heads, D], heads and tokens strided
    k_cache,  # [KV heads, places, D], strided, D contiguous
    v_cache,
    out,  # out [T, query heads, D]
    lse,  # out float32 [T, query heads]: log2 of the sum of exp2 of scaled logits
    part_acc,  # out float32 [max pieces * KV heads, ROWS, D]
    part_max,  # out float32 [max pieces * KV heads, ROWS]
    part_sum,  # out float32 [max pieces * KV heads, ROWS]
    token_parts,  # out int32 [T, 4]: of a token's tile the first piece and their number; which of the tile's tokens it is
    pieces,  # int32 [max pieces, 16] of this layer
    num_pieces,  # int32 [1] of this layer
    page_table,  # int32 [S, max pages]
    sets,  # int32 [S, B] of this layer
    score_x,  # out float16 [max rows, KV heads, score_len, 2 * CELL]: scaled logits of scored tokens, less score_ref
    score_ref,  # out float32 [max rows, KV heads, 2 * CELL]: their logits at position 0
    num_heads, table_stride, set_stride,
    q_stride_t, q_stride_h, k_stride_h, k_stride, v_stride_h, v_stride, out_stride_t, out_stride_h,
    score_len,
    scale_log2,  # softmax scale * log2(e) * key scale
    value_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SCORED: tl.constexpr, ROWS: tl.constexpr, MIN_ROWS: tl.constexpr,
    NARROW_DEPTH: tl.constexpr,  # blocks on their way in tiles of 16 and 32 rows
    WIDE_DEPTH: tl.constexpr,  # and in larger ones, whose queries take shared memory too
    COLUMNS: tl.constexpr,  # of two scored tokens: 2 * CELL, padded
    CELL: tl.constexpr,  # GROUP, padded: of one scored token at one position
    TOKENS_PAD: tl.constexpr,  # most tokens of a tile, padded
):  # fmt: skip
    """Grid: (most pieces * KV heads,). MIN_ROWS 64 computes every tile alike, whatever its size (deterministic mode)."""
    piece = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    at = pieces + piece * PIECE_FIELDS
    token0 = tl.load(at)
    count = tl.load(at + 1)
    slot = tl.load(at + 2).to(tl.int64)
    position0 = tl.load(at + 3)
    list_len = tl.load(at + 4)
    base = tl.load(at + 5)
    low = tl.load(at + 6)
    high = tl.load(at + 7)
    tile_pieces = tl.load(at + 8)
    listed = tl.load(at + 9)
    scored0 = tl.load(at + 10)
    scored1 = tl.load(at + 11)
    score_line = tl.load(at + 12) * KV_HEADS + kv_head
    # A row with one scored token leaves half as much: its positions lie closer.
    score_stride = tl.load(at + 13) * CELL
    # After the loads, so that they need not wait for this one; past the end lies what an earlier step wrote.
    if piece >= tl.load(num_pieces):
        return
    set_row = sets + slot * set_stride
    table_row = page_table + slot * table_stride
    k_head = k_cache + kv_head.to(tl.int64) * k_stride_h
    v_head = v_cache + kv_head.to(tl.int64) * v_stride_h
    head0 = kv_head * GROUP
    part = (piece * KV_HEADS + kv_head).to(tl.int64)
    rows = count * GROUP
    if (low == 0) & (kv_head == 0):  # for combine.py, which would have to look it up: so many loads one after the other
        t = tl.arange(0, TOKENS_PAD)
        known = token_parts + (token0 + t) * 4
        tl.store(known, piece, mask=t < count)
        tl.store(known + 1, tile_pieces, mask=t < count)
        tl.store(known + 2, t, mask=t < count)
    if listed != 0:
        if (rows <= 16) & (MIN_ROWS <= 16):
            _tile(
                q, out, lse, part_acc, part_max, part_sum, set_row, table_row, score_x, score_ref,
                k_head, v_head, token0, count, position0, list_len, base, low, high, tile_pieces, scored0, scored1, score_line,
                score_stride, head0, part, q_stride_t, q_stride_h, k_stride, v_stride, out_stride_t, out_stride_h, num_heads,
                score_len, scale_log2, value_scale,
                16, GROUP, D, D_PAD, PAGE, BLOCK_N, WINDOW, True, False, ROWS, NARROW_DEPTH, COLUMNS, CELL,
            )  # fmt: skip
        else:
            _tile(
                q, out, lse, part_acc, part_max, part_sum, set_row, table_row, score_x, score_ref,
                k_head, v_head, token0, count, position0, list_len, base, low, high, tile_pieces, scored0, scored1, score_line,
                score_stride, head0, part, q_stride_t, q_stride_h, k_stride, v_stride, out_stride_t, out_stride_h, num_heads,
                score_len, scale_log2, value_scale,
                64, GROUP, D, D_PAD, PAGE, BLOCK_N, WINDOW, True, False, ROWS, WIDE_DEPTH, COLUMNS, CELL,
            )  # fmt: skip
    elif (rows <= 16) & (MIN_ROWS <= 16):
        _tile(
            q, out, lse, part_acc, part_max, part_sum, set_row, table_row, score_x, score_ref,
            k_head, v_head, token0, count, position0, list_len, base, low, high, tile_pieces, scored0, scored1, score_line,
            score_stride, head0, part, q_stride_t, q_stride_h, k_stride, v_stride, out_stride_t, out_stride_h, num_heads,
            score_len, scale_log2, value_scale,
            16, GROUP, D, D_PAD, PAGE, BLOCK_N, WINDOW, False, SCORED, ROWS, NARROW_DEPTH, COLUMNS, CELL,
        )  # fmt: skip
    elif (rows <= 32) & (MIN_ROWS <= 32):
        _tile(
            q, out, lse, part_acc, part_max, part_sum, set_row, table_row, score_x, score_ref,
            k_head, v_head, token0, count, position0, list_len, base, low, high, tile_pieces, scored0, scored1, score_line,
            score_stride, head0, part, q_stride_t, q_stride_h, k_stride, v_stride, out_stride_t, out_stride_h, num_heads,
            score_len, scale_log2, value_scale,
            32, GROUP, D, D_PAD, PAGE, BLOCK_N, WINDOW, False, SCORED, ROWS, NARROW_DEPTH, COLUMNS, CELL,
        )  # fmt: skip
    elif (rows <= 64) | (ROWS == 64):
        _tile(
            q, out, lse, part_acc, part_max, part_sum, set_row, table_row, score_x, score_ref,
            k_head, v_head, token0, count, position0, list_len, base, low, high, tile_pieces, scored0, scored1, score_line,
            score_stride, head0, part, q_stride_t, q_stride_h, k_stride, v_stride, out_stride_t, out_stride_h, num_heads,
            score_len, scale_log2, value_scale,
            64, GROUP, D, D_PAD, PAGE, BLOCK_N, WINDOW, False, SCORED, ROWS, WIDE_DEPTH, COLUMNS, CELL,
        )  # fmt: skip
    else:
        _tile_72(
            q, out, lse, part_acc, part_max, part_sum, set_row, table_row, score_x, score_ref,
            k_head, v_head, token0, count, position0, list_len, base, low, high, tile_pieces, scored0, scored1, score_line,
            score_stride, head0, part, q_stride_t, q_stride_h, k_stride, v_stride, out_stride_t, out_stride_h, num_heads,
            score_len, scale_log2, value_scale,
            GROUP, D, D_PAD, PAGE, BLOCK_N, WINDOW, SCORED, ROWS, WIDE_DEPTH, COLUMNS, CELL,
        )  # fmt: skip
