"""Work lists of the attention kernel, made on the device: which program reads which keys for which tokens.

A *tile* is the tokens of one row whose packed query heads (tokens × group) one program holds. A *piece* is a stretch of a
tile's key/value indices. Index i of a row is the position `sets[i]` below the row's `list_len`, else `base + i`: a list, then a
range. A dense row has no list. Pieces are the same for every KV head, so lists name them once.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# In halves of the time that a block of keys takes, read as a page of them; gathering one takes about 1.5 times that (measured).
LISTED_COST = tl.constexpr(3)
DENSE_COST = tl.constexpr(2)
START_BLOCKS = tl.constexpr(3)  # in blocks: a piece's first loads, one after the other (6 us of 2 on an H200)
ADD_BLOCKS = tl.constexpr(2)  # in blocks: the pass that adds pieces up
MAX_EVEN_PIECES = tl.constexpr(8)
GAP_BLOCKS = tl.constexpr(8)
CHUNKS = tl.constexpr(16)  # sizes of dense pieces that are tried
PIECE_FIELDS = tl.constexpr(16)  # int32 each, 64 bytes: see the stores in `work_kernel`


@triton.jit(do_not_specialize=["row_offsets", "slots", "num_rows", "num_tokens", "max_entries", "table_stride"])
def token_kernel(
    row_offsets,  # int32 [R + 1]
    slots,  # int32 [R]
    positions,  # int64 [T]
    weights,  # float32 [T]
    page_table,  # int32 [S, max pages]
    token_place,  # out int64 [T]: where in the cache its K/V lie, -1 for padding
    entry_token,  # out int32 [E]
    row_entries,  # out int32 [R, 2]: where each row's scored tokens begin and end
    num_rows,
    num_tokens,
    max_entries,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEPS: tl.constexpr,  # BLOCK_R is 2 to this power
):
    """One program: facts of tokens that no layer changes."""
    r = tl.arange(0, BLOCK_R)
    total = tl.load(row_offsets + num_rows)
    seen = 0
    for first in range(0, num_tokens, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        inside = t < num_tokens
        row = t * 0  # rows that end before the token: found by halves, and one step more where they are all of them
        for step in tl.static_range(STEPS + 1):
            half = BLOCK_R >> (step + 1) if step < STEPS else 1
            at = row + half - 1
            ended = tl.load(row_offsets + 1 + at, mask=inside & (at < num_rows), other=2147483647) <= t
            row = tl.where(ended, row + half, row)
        live = inside & (t < total)
        slot = tl.load(slots + row, mask=live, other=0).to(tl.int64)
        position = tl.load(positions + t, mask=live, other=0)
        page = tl.load(page_table + slot * table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
        tl.store(token_place + t, tl.where(live, page * PAGE + position % PAGE, -1), mask=inside)
        scored = live & (tl.load(weights + t, mask=live, other=0.0) != 0.0)
        entry = seen + tl.cumsum(scored.to(tl.int32), 0) - scored.to(tl.int32)
        scored = scored & (entry < max_entries)
        tl.store(entry_token + entry, t, mask=scored)
        begins = tl.load(row_offsets + row, mask=live, other=-1) == t
        tl.store(row_entries + row * 2, tl.minimum(entry, max_entries), mask=live & begins)
        closes = tl.load(row_offsets + row + 1, mask=live, other=-1) == t + 1
        tl.store(row_entries + row * 2 + 1, tl.minimum(entry + scored.to(tl.int32), max_entries), mask=live & closes)
        seen += tl.sum(scored.to(tl.int32), 0)
    begin = tl.load(row_offsets + r, mask=r < num_rows, other=0)
    empty = (r < num_rows) & (tl.load(row_offsets + 1 + r, mask=r < num_rows, other=-1) == begin)
    tl.store(row_entries + r * 2, 0, mask=empty)
    tl.store(row_entries + r * 2 + 1, 0, mask=empty)


@triton.jit
def _tile(j, n, start, num_tiles, tile_tokens, list_len, base0, window, is_sparse, ALIGN: tl.constexpr):
    """Tile j of every row: its first token, its token count, base, and the end of its key/value indices."""
    first = j * tile_tokens
    count = tl.where(j < num_tiles, tl.minimum(tile_tokens, n - first), 0)
    low = tl.maximum(start + first - window + 1, 0) // ALIGN * ALIGN
    base = tl.where(is_sparse, base0, tl.where(window > 0, low, 0))
    end = tl.where(count > 0, start + first + count - base, 0)
    return first, count, base, end


@triton.jit
def _even_pieces(tiles, blocks, programs, MIN_BLOCKS: tl.constexpr):
    """How many pieces to make of each of `tiles` tiles of so many blocks: those that end first, where half of `programs` pieces
    run at once (two a multiprocessor, and `programs` are four) and each has its start and all of them their addition."""
    at_once = tl.maximum(programs // 2, 1)
    best = tiles * 0 + 1
    least = (tiles + at_once - 1) // at_once * (blocks + START_BLOCKS)
    for k in tl.static_range(2, MAX_EVEN_PIECES + 1):
        waves = (tiles * k + at_once - 1) // at_once
        size = (blocks + k - 1) // k
        needed = waves * (size + START_BLOCKS) + ADD_BLOCKS
        better = (needed < least) & (size >= MIN_BLOCKS) & (tiles * (k - 1) <= 2 * programs)
        best = tl.where(better, k, best)
        least = tl.where(better, needed, least)
    return best


@triton.jit
def _chunks(dense_blocks, programs, MIN_BLOCKS: tl.constexpr):
    """[CHUNKS]: sizes of dense pieces, for about 0.35 to 1.9 times as many as run at once."""
    at_once = tl.maximum(programs // 2, 1).to(tl.float32)
    wanted = 0.35 * tl.exp2(tl.arange(0, CHUNKS).to(tl.float32) * (2.44 / (CHUNKS - 1))) * at_once
    return tl.maximum(tl.ceil(dense_blocks.to(tl.float32) / wanted).to(tl.int32), MIN_BLOCKS)


@triton.jit
def _best_chunk(chunks, counts, longest, sparse_pieces, sparse_size, programs):
    """The size of dense pieces, of which there would be counts [CHUNKS], with which the step ends first.

    They go in waves. Programs that the last wave leaves idle take sparse pieces (which last a sixth longer beside dense ones)
    and then nothing, when those that are left get more of the memory: a block takes three quarters of its time at most. If
    that is too slow for the sparse pieces, the rest of them follow the dense ones. (Fitted to 28 mixes on an H200.)
    """
    at_once = tl.maximum(programs // 2, 1)
    waves = tl.maximum((counts + at_once - 1) // at_once, 1)
    parts = (longest + chunks - 1) // chunks
    piece = (longest + parts - 1) // tl.maximum(parts, 1) + START_BLOCKS  # a tile is cut evenly
    sparse_piece = sparse_size + START_BLOCKS
    beside = sparse_piece * 7 // 6
    in_last = counts - (waves - 1) * at_once
    idle = at_once - in_last
    rounds = tl.where(idle > 0, (sparse_pieces + idle - 1) // tl.maximum(idle, 1), sparse_pieces)
    within = rounds * beside  # all sparse pieces done by the idle ones alone
    after = tl.maximum(sparse_pieces - idle * (piece // beside), 0)
    follow = piece + (after + at_once - 1) // at_once * sparse_piece
    alone = within + (piece - within) * tl.maximum(3 * at_once, 4 * in_last) // (4 * at_once)
    last = tl.where(within <= piece, alone, tl.minimum(follow, within))
    needed = (waves - 1) * piece + last + tl.where(parts > 1, ADD_BLOCKS + parts // 2, 0)
    best = tl.min(needed, 0)
    return tl.max(tl.where(needed == best, chunks, 0), 0)  # of equals the one with the fewest pieces


@triton.jit
def _pieces(blocks, cost, sparse_chunk, dense_chunk, is_sparse, even, mixed, FIXED_BLOCKS: tl.constexpr):
    """How many pieces each tile makes, and how many blocks each of them has but the last. Sparse rows alone are cut into
    `even` pieces. Beside dense rows they come last and fill the gaps: cut finer, but not into less than GAP_BLOCKS."""
    if FIXED_BLOCKS > 0:
        return (blocks + FIXED_BLOCKS - 1) // FIXED_BLOCKS, blocks * 0 + FIXED_BLOCKS
    fine = tl.minimum((blocks * cost + sparse_chunk - 1) // sparse_chunk, blocks // GAP_BLOCKS)
    k = tl.where(is_sparse, tl.where(mixed, fine, even), (blocks + dense_chunk - 1) // dense_chunk)
    k = tl.maximum(k, 1)
    size = tl.maximum((blocks + k - 1) // k, 1)
    return (blocks + size - 1) // size, size


@triton.jit(
    do_not_specialize=[
        "row_offsets", "slots", "starts", "sparse", "num_rows", "max_rows", "max_pieces",
        "set_lengths_stride", "programs",
    ]
)  # fmt: skip
def work_kernel(
    row_offsets,  # int32 [R + 1]
    slots,  # int32 [R]
    starts,  # int32 [R]
    sparse,  # bool [R]
    row_entries,  # int32 [R, 2]
    entry_token,  # int32 [E]
    set_lengths,  # int32 [L, S]
    tail_starts,  # int32 [S]
    windows,  # int32 [L]: 0 for none
    refresh,  # int32 [L]
    score,  # int32 [L]: whether dense rows leave scores here
    pieces,  # out int32 [L, max pieces, 16]
    num_pieces,  # out int32 [L]
    reads,  # out int32 [L, max rows]: KV tokens the row reads
    score_ends,  # int32 [L, max rows, 2]: positions scored now (0: none), and by the time before
    score_rows,  # out int32 [L, max rows, 8]: the rows scored now, see the stores
    num_scored,  # out int32 [L]
    num_rows,
    max_rows,
    max_pieces,
    set_lengths_stride,
    programs,  # pieces to aim at, per KV head
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_PACKED: tl.constexpr,  # most packed rows of one tile
    FIXED_BLOCKS: tl.constexpr,  # blocks of a piece, whatever the batch; 0: balance over `programs`
    MIN_BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program a layer."""
    layer = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    live = r < num_rows
    offset = tl.load(row_offsets + r, mask=live, other=0)
    n = tl.load(row_offsets + r + 1, mask=live, other=0) - offset
    slot = tl.load(slots + r, mask=live, other=0)
    start = tl.load(starts + r, mask=live, other=0)
    window = tl.load(windows + layer)
    refreshes = tl.load(refresh + layer)
    scores_dense = tl.load(score + layer)
    marked = tl.load(sparse + r, mask=live, other=0).to(tl.int32)
    is_sparse = marked * ((refreshes == 0) & (window == 0)).to(tl.int32) != 0
    list_len = tl.load(set_lengths + layer * set_lengths_stride + slot, mask=live & is_sparse, other=0)
    base0 = tl.load(tail_starts + slot, mask=live & is_sparse, other=0) - list_len

    per_tile = 64 // GROUP
    most = tl.where(is_sparse, per_tile, MAX_PACKED // GROUP)
    one = n <= most
    tile_tokens = tl.where(one, tl.maximum(n, 1), per_tile)
    num_tiles = tl.where(one, (n > 0).to(tl.int32), (n + per_tile - 1) // per_tile)

    low = tl.where(is_sparse, base0, tl.where(window > 0, tl.maximum(start - window + 1, 0), 0))
    tl.store(reads + layer * max_rows + r, tl.where(n > 0, start + n - low, 0), mask=live)
    entry0 = tl.load(row_entries + r * 2, mask=live, other=0)
    entry1 = tl.load(row_entries + r * 2 + 1, mask=live, other=0)
    leaves = (entry1 > entry0) & (n > 0) & (tl.where(marked != 0, refreshes, scores_dense) != 0)
    rank = tl.cumsum(leaves.to(tl.int32), 0) - leaves.to(tl.int32)
    first_scored = tl.load(entry_token + entry0, mask=leaves, other=-1)
    last_scored = tl.load(entry_token + entry1 - 1, mask=leaves & (entry1 - entry0 > 1), other=-1)
    ends = score_ends + (layer * max_rows + r) * 2
    every = r < max_rows
    written = tl.load(ends, mask=every, other=0)  # as far as this row's scores reached when it was scored last
    written = tl.where(written > 0, written, tl.load(ends + 1, mask=every, other=0))
    tl.store(ends + 1, written, mask=every)
    tl.store(ends, tl.where(leaves, start + n, 0), mask=every)
    scored = score_rows + (layer * max_rows + rank) * 8
    tl.store(scored, r, mask=leaves)
    tl.store(scored + 1, first_scored, mask=leaves)
    tl.store(scored + 2, last_scored, mask=leaves)  # -1: there is one alone
    tl.store(scored + 3, start + n, mask=leaves)
    tl.store(scored + 4, written, mask=leaves)  # past the end to be cleared
    tl.store(scored + 5, entry0, mask=leaves)
    tl.store(scored + 6, entry1, mask=leaves)
    tl.store(num_scored + layer, tl.sum(leaves.to(tl.int32), 0))
    # More than two scored tokens (the end of a prompt) are scored by a pass of their own.
    in_pass = leaves & (entry1 - entry0 <= 2)
    first_scored = tl.where(in_pass, first_scored, -1)
    last_scored = tl.where(in_pass, last_scored, -1)

    most_tiles = tl.max(num_tiles, 0)
    cost = tl.where(is_sparse, LISTED_COST, DENSE_COST)  # of a block
    row_blocks = tl.zeros([BLOCK_R], tl.int32)
    longest = 0  # blocks of a dense tile
    for j in range(most_tiles):
        _, _, _, end = _tile(j, n, start, num_tiles, tile_tokens, list_len, base0, window, is_sparse, BLOCK_N)
        blocks = (end + BLOCK_N - 1) // BLOCK_N
        row_blocks += blocks
        longest = tl.maximum(longest, tl.max(tl.where(is_sparse, 0, blocks), 0))
    # Twice as fine as even shares of the whole step, but no more than `programs` of them.
    share = tl.maximum((tl.sum(row_blocks * cost, 0) + programs - 1) // programs, MIN_BLOCKS * DENSE_COST)
    sparse_share = (tl.sum(tl.where(is_sparse, row_blocks * cost, 0), 0) + programs - 1) // programs
    sparse_chunk = tl.maximum((share + 1) // 2, sparse_share)
    sparse_rows = is_sparse & (n > 0)
    mixed = tl.sum((n > 0).to(tl.int32), 0) > tl.sum(sparse_rows.to(tl.int32), 0)
    sparse_blocks = tl.max(tl.where(sparse_rows, (start + n - base0 + BLOCK_N - 1) // BLOCK_N, 0), 0)
    even = _even_pieces(tl.sum(tl.where(sparse_rows, num_tiles, 0), 0), sparse_blocks, programs, MIN_BLOCKS)
    dense_chunk = 1
    if FIXED_BLOCKS == 0:
        chunks = _chunks(tl.sum(tl.where(is_sparse, 0, row_blocks), 0), programs, MIN_BLOCKS)
        counts = tl.zeros([CHUNKS], tl.int32)
        sparse_pieces, sparse_size = 0, 1
        for j in range(most_tiles):
            _, _, _, end = _tile(j, n, start, num_tiles, tile_tokens, list_len, base0, window, is_sparse, BLOCK_N)
            blocks = (end + BLOCK_N - 1) // BLOCK_N
            parts = (blocks[:, None] + chunks[None, :] - 1) // chunks[None, :]
            counts += tl.sum(tl.where(is_sparse[:, None], 0, parts), 0)
            k, size = _pieces(blocks, cost, sparse_chunk, 1, is_sparse, even, mixed, FIXED_BLOCKS)
            sparse_pieces += tl.sum(tl.where(is_sparse & (blocks > 0), k, 0), 0)
            sparse_size = tl.maximum(sparse_size, tl.max(tl.where(is_sparse, size, 0), 0))
        dense_chunk = _best_chunk(chunks, counts, longest, sparse_pieces, sparse_size, programs)
    row_pieces = tl.zeros([BLOCK_R], tl.int32)
    for j in range(most_tiles):
        _, _, _, end = _tile(j, n, start, num_tiles, tile_tokens, list_len, base0, window, is_sparse, BLOCK_N)
        blocks = (end + BLOCK_N - 1) // BLOCK_N
        k, _ = _pieces(blocks, cost, sparse_chunk, dense_chunk, is_sparse, even, mixed, FIXED_BLOCKS)
        row_pieces += k
    # Dense pieces first: the larger ones.
    dense_pieces = tl.where(is_sparse, 0, row_pieces)
    sparse_pieces = row_pieces - dense_pieces
    before = tl.where(is_sparse, tl.sum(dense_pieces, 0) + tl.cumsum(sparse_pieces, 0), tl.cumsum(dense_pieces, 0))
    piece = before - row_pieces
    tl.store(num_pieces + layer, tl.sum(row_pieces, 0))
    for j in range(most_tiles):
        first, count, base, end = _tile(
            j, n, start, num_tiles, tile_tokens, list_len, base0, window, is_sparse, BLOCK_N
        )
        blocks = (end + BLOCK_N - 1) // BLOCK_N
        k, size = _pieces(blocks, cost, sparse_chunk, dense_chunk, is_sparse, even, mixed, FIXED_BLOCKS)
        first_here = (first_scored >= offset + first) & (first_scored < offset + first + count)
        last_here = (last_scored >= offset + first) & (last_scored < offset + first + count)
        for p in range(tl.max(k, 0)):
            mine = (p < k) & (count > 0)
            at = pieces + (layer * max_pieces + piece + p) * PIECE_FIELDS
            tl.store(at, offset + first, mask=mine)  # index in the batch of the tile's first token
            tl.store(at + 1, count, mask=mine)  # tokens of the tile
            tl.store(at + 2, slot, mask=mine)
            tl.store(at + 3, start + first, mask=mine)  # position of the first token
            tl.store(at + 4, list_len, mask=mine)
            tl.store(at + 5, base, mask=mine)
            tl.store(at + 6, tl.minimum(p * size * BLOCK_N, end), mask=mine)  # first index
            tl.store(at + 7, tl.minimum((p + 1) * size * BLOCK_N, end), mask=mine)  # past the last index
            tl.store(at + 8, k, mask=mine)  # pieces of the tile
            tl.store(at + 9, is_sparse.to(tl.int32), mask=mine)
            # which of the tile's tokens are the row's first and last scored one, -1 for none; and the row's scores
            tl.store(at + 10, tl.where(first_here, first_scored - offset - first, -1), mask=mine)
            tl.store(at + 11, tl.where(last_here, last_scored - offset - first, -1), mask=mine)
            tl.store(at + 12, rank, mask=mine)
            tl.store(at + 13, entry1 - entry0, mask=mine)  # scored tokens of the row
        piece += k
