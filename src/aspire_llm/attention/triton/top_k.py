"""Top-k over rows of different lengths, and the union of two sorted lists: what turns scores into context sets."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_llm.errors import UserError

NEVER = tl.constexpr(2147483647)
# Few sizes, so that no new one is met, and compiled, while serving.
CHUNK = 8192  # positions of a program: 16 a thread, which with their keys fit in registers
SHORT_CHUNK = 1024  # where no row has more
SHORT_MERGED = 2048  # candidates of one program, if there are no more; else CHUNK, or the next power of two
MAX_MERGED = 65536


@triton.jit
def _count_two(a, b, BLOCK: tl.constexpr):
    """How many of each hold: one reduction over the block for both, where two counts fit in 32 bits."""
    if BLOCK > 32768:
        return tl.sum(a.to(tl.int32), 0), tl.sum(b.to(tl.int32), 0)
    both = tl.sum(a.to(tl.uint32) + (b.to(tl.uint32) << 16), 0)
    return (both & 0xFFFF).to(tl.int32), (both >> 16).to(tl.int32)


@triton.jit
def _before_two(a, b, BLOCK: tl.constexpr):
    """As `_count_two`, of those before each element."""
    if BLOCK > 32768:
        a = a.to(tl.int32)
        b = b.to(tl.int32)
        return tl.cumsum(a, 0) - a, tl.cumsum(b, 0) - b
    both = a.to(tl.uint32) + (b.to(tl.uint32) << 16)
    both = tl.cumsum(both, 0) - both
    return (both & 0xFFFF).to(tl.int32), (both >> 16).to(tl.int32)


@triton.jit
def _take(score, forced, valid, have, want, BLOCK: tl.constexpr):
    """Which of the `have` valid elements are among the `want` best, of equals the first, and the place of each of them among
    those taken.

    The key of the last one taken is sought between `low`, which at least `want` keys reach, and `last`, beyond which fewer
    lie: a third of the range is left after each reduction over the block (keys stay in registers, a step is two comparisons),
    and none is needed once exactly `want` keys reach `low`.
    """
    bits = score.to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)  # sorts as the floats do
    key = tl.where(forced, 0xFFFFFFFF, key)
    key = tl.where(valid, tl.maximum(key.to(tl.uint32), 1), 0).to(tl.uint32)  # (0 would be a NaN's)
    low = tl.zeros([], tl.uint32) + 1
    last = low + 0xFFFFFFFE
    reach_low = have + tl.zeros([], tl.int32)
    past_last = tl.zeros([], tl.int32)
    while (low < last) & (reach_low > want):
        third = (last - low) // 3 + 1
        first = low + third
        second = first + tl.minimum(third, last - first)
        reach_first, reach_second = _count_two(key >= first, key >= second, BLOCK)
        in_first = reach_first < want
        in_last = reach_second >= want
        past_last = tl.where(in_first, reach_first, tl.where(in_last, past_last, reach_second))
        last = tl.where(in_first, first - 1, tl.where(in_last, last, second - 1))
        reach_low = tl.where(in_last, reach_second, tl.where(in_first, reach_low, reach_first))
        low = tl.where(in_last, second, tl.where(in_first, low, first))
    # Either exactly `want` keys reach `low`, or only some of those equal to it are taken.
    room = tl.where(reach_low <= want, want, want - past_last)
    above = key > low
    equal = key == low
    above_before, equal_before = _before_two(above, equal, BLOCK)
    return above | (equal & (equal_before < room)), above_before + tl.minimum(equal_before, room)


@triton.jit
def _sought(lengths, row, longest, n_sinks, n_recent, FORCED: tl.constexpr):
    """Positions from the first value on and below the second are sought; those below the third and from the fourth on come
    before all others."""
    length = tl.maximum(tl.minimum(tl.load(lengths + row), longest), 0).to(tl.int32)
    if FORCED:
        return length * 0, length, n_sinks, length - n_recent
    return n_sinks, length - n_recent, length * 0, length


@triton.jit
def _place(places, i, LISTED: tl.constexpr):
    if LISTED:
        return tl.load(places + i).to(tl.int64)
    return i.to(tl.int64)


@triton.jit(
    do_not_specialize=[
        "layers", "rows", "lengths", "out_layers", "slots", "counts", "tails", "longest", "k", "n_sinks", "n_recent",
        "out_stride_l", "out_stride_r", "out_stride_c", "counts_stride_l", "counts_stride_r", "counts_stride_c",
    ]
)  # fmt: skip
def _chunk_kernel(
    scores,  # float32 [N, M, columns]
    layers,  # int [L]: place of each layer in scores
    rows,  # int [R]: place of each row in scores
    lengths,  # int [R]
    out_layers,  # int [L]: place of each layer in out
    slots,  # int [R]: place of each row in out, and in tails
    out,  # out int32 [L', S, ...]
    counts,  # out int32 [L', S, ...]
    tails,  # out int32 [S]
    score_stride_l,
    score_stride_r,
    columns,
    longest,
    out_stride_l,
    out_stride_r,
    out_stride_c,
    counts_stride_l,
    counts_stride_r,
    counts_stride_c,
    k,
    n_sinks,
    n_recent,
    FORCED: tl.constexpr,
    FROM_LISTS: tl.constexpr,
    TO_LISTS: tl.constexpr,
    TAILS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R, chunks, L): the best k of each chunk of BLOCK positions, of which the row's best are a part."""
    r = tl.program_id(0)
    chunk = tl.program_id(1)
    layer = tl.program_id(2)
    begin, end, forced_below, forced_from = _sought(lengths, r, longest, n_sinks, n_recent, FORCED)
    have = tl.minimum(end, (chunk + 1) * BLOCK) - tl.maximum(begin, chunk * BLOCK)
    want = tl.maximum(tl.minimum(k, have), 0)
    out_layer = _place(out_layers, layer, TO_LISTS)
    slot = _place(slots, r, TO_LISTS)
    tl.store(counts + out_layer * counts_stride_l + slot * counts_stride_r + chunk * counts_stride_c, want)
    if TAILS:
        tl.store(tails + slot, tl.load(lengths + r).to(tl.int32), mask=(layer == 0) & (chunk == 0))
    if want > 0:
        scores += _place(layers, layer, FROM_LISTS) * score_stride_l + _place(rows, r, FROM_LISTS) * score_stride_r
        position = chunk * BLOCK + tl.arange(0, BLOCK)
        # (not masked by length, which would cut the loads into single words)
        score = tl.load(scores + position, mask=position < columns, other=0.0)
        forced = (position < forced_below) | (position >= forced_from)
        valid = (position >= begin) & (position < end)
        take, place = _take(score, forced, valid, have, want, BLOCK)
        out += out_layer * out_stride_l + slot * out_stride_r + chunk * out_stride_c
        tl.store(out + place, position, mask=take)


@triton.jit(
    do_not_specialize=[
        "layers", "rows", "lengths", "out_layers", "slots", "counts", "tails", "longest", "chunks", "fan", "width", "k",
        "n_sinks", "n_recent", "out_stride_l", "out_stride_r", "out_stride_g", "counts_stride_l", "counts_stride_r",
        "counts_stride_g",
    ]
)  # fmt: skip
def _merge_chunks_kernel(
    scores,  # float32 [N, M, columns]
    layers,  # int [L]
    rows,  # int [R]
    lengths,  # int [R]
    candidates,  # int32 [L, R, chunks, width + 1]: positions, and in the last place how many
    out_layers,  # int [L]
    slots,  # int [R]
    out,  # out int32 [L', S, ...]
    counts,  # out int32 [L', S, ...]
    tails,  # out int32 [S]
    score_stride_l,
    score_stride_r,
    longest,
    out_stride_l,
    out_stride_r,
    out_stride_g,
    counts_stride_l,
    counts_stride_r,
    counts_stride_g,
    chunks,
    fan,
    width,
    k,
    n_sinks,
    n_recent,
    FORCED: tl.constexpr,
    FROM_LISTS: tl.constexpr,
    TO_LISTS: tl.constexpr,
    TAILS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R, groups, L): the best k candidates of `fan` chunks. They stand in the order of their positions."""
    r = tl.program_id(0)
    group = tl.program_id(1)
    layer = tl.program_id(2)
    _, _, forced_below, forced_from = _sought(lengths, r, longest, n_sinks, n_recent, FORCED)
    scores += _place(layers, layer, FROM_LISTS) * score_stride_l + _place(rows, r, FROM_LISTS) * score_stride_r
    line = (layer.to(tl.int64) * tl.num_programs(0) + r) * chunks + group * fan
    candidates += line * (width + 1)
    n = tl.arange(0, BLOCK)
    chunk = n // width
    inside = chunk < tl.minimum(fan, chunks - group * fan)
    filled = tl.load(candidates + chunk * (width + 1) + width, mask=inside, other=0)
    valid = inside & (n % width < filled)
    position = tl.load(candidates + n + chunk, mask=valid, other=0)
    score = tl.load(scores + position, mask=valid, other=0.0)
    forced = (position < forced_below) | (position >= forced_from)
    have = tl.sum(valid.to(tl.int32), 0)
    want = tl.minimum(k, have)
    take, place = _take(score, forced, valid, have, want, BLOCK)
    out_layer = _place(out_layers, layer, TO_LISTS)
    slot = _place(slots, r, TO_LISTS)
    tl.store(out + out_layer * out_stride_l + slot * out_stride_r + group * out_stride_g + place, position, mask=take)
    tl.store(counts + out_layer * counts_stride_l + slot * counts_stride_r + group * counts_stride_g, want)
    if TAILS:
        tl.store(tails + slot, tl.load(lengths + r).to(tl.int32), mask=(layer == 0) & (group == 0))


def top_k(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    *,
    n_sinks: int = 0,
    n_recent: int = 0,
    forced: bool = True,
    out: Tensor,
    counts: Tensor,
) -> None:
    """The k positions of each row with the largest scores, ascending.

    scores: float32 [R, longest], rows strided; lengths: int [R], strided, cut to `longest`. Positions below `n_sinks` and from
    length - n_recent on are always taken and count towards k; unless `forced`, they are left out instead. Of equal scores
    the lowest positions are taken.
    out: int32 [R, ≥ k], written up to counts; counts: int32 [R] contiguous, min(k, positions that may be taken).
    """
    _launch(
        scores[None], None, scores.shape[1], lengths.contiguous(), k, n_sinks, n_recent, forced, out[None], counts[None], None
    )  # fmt: skip


def top_k_stored(
    scores: Tensor,
    layers: Tensor,
    rows: Tensor,
    longest: int,
    lengths: Tensor,
    k: int,
    *,
    n_sinks: int = 0,
    n_recent: int = 0,
    forced: bool = True,
    out: Tensor,
    counts: Tensor,
    out_layers: Tensor,
    slots: Tensor,
    tails: Tensor | None = None,
) -> None:
    """`top_k` of some rows of some layers, read where they lie and written where they belong.

    scores: float32 [N, M, ≥ longest], of which scores[layers[l], rows[r], :longest] is read; layers: int [L]; rows: int [R];
    lengths: int [R]. out: int32 [L', S, ≥ k], written at out[out_layers[l], slots[r]]; counts: int32 [L', S], likewise;
    out_layers: int [L], distinct; slots: int [R], distinct. tails: int32 [S], becomes lengths[r] at slots[r].
    """
    _launch(
        scores, (layers, rows, out_layers, slots), longest, lengths, k, n_sinks, n_recent, forced, out, counts, tails
    )  # fmt: skip


def _launch(
    scores: Tensor,
    lists: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    longest: int,
    lengths: Tensor,
    k: int,
    n_sinks: int,
    n_recent: int,
    forced: bool,
    out: Tensor,
    counts: Tensor,
    tails: Tensor | None,
) -> None:
    """lists: layers, rows, out_layers, slots, as `top_k_stored`; None: all rows of the one layer, in order."""
    if k < 1 or n_sinks < 0 or n_recent < 0 or (forced and n_sinks + n_recent > k):
        raise UserError(f"top-k of {k} positions cannot hold {n_sinks} sinks and {n_recent} recent ones", "budget")
    if out.shape[2] < k:
        raise UserError(f"top-k of {k} positions into room for {out.shape[2]}", "budget")
    num_rows = lengths.shape[0]
    listed = lists is not None
    layers, rows, out_layers, slots = lists or (lengths, lengths, lengths, lengths)  # not read unless listed
    num_layers = layers.shape[0] if listed else 1
    block = CHUNK if longest > SHORT_CHUNK else SHORT_CHUNK
    chunks = max(1, triton.cdiv(longest, block))
    width = min(k, block)
    written = counts if tails is None else tails

    def room(chunks: int, width: int) -> tuple[Tensor, Tensor, int]:
        """Where the winners of so many programs a row go, their counts, and how far one program's are from the next's."""
        if chunks == 1:
            return out, counts, 0
        made = torch.empty((num_layers, num_rows, chunks * (width + 1)), dtype=torch.int32, device=scores.device)
        return made, made[:, :, width:], width + 1

    found, found_counts, apart = room(chunks, width)
    _chunk_kernel[(num_rows, chunks, num_layers)](
        scores, layers, rows, lengths, out_layers, slots, found, found_counts, written,
        scores.stride(0), scores.stride(1), scores.shape[2], longest,
        found.stride(0), found.stride(1), apart, found_counts.stride(0), found_counts.stride(1), apart, k, n_sinks, n_recent,
        FORCED=forced, FROM_LISTS=listed, TO_LISTS=listed and chunks == 1, TAILS=chunks == 1 and tails is not None,
        BLOCK=block, num_warps=max(4, block // 512), maxnreg=64,
    )  # fmt: skip
    while chunks > 1:
        groups = triton.cdiv(chunks, max(2, CHUNK // width))
        fan = triton.cdiv(chunks, groups)
        total = max(triton.next_power_of_2(fan * width), SHORT_MERGED)
        if total > SHORT_MERGED:
            total = max(total, CHUNK)
        if total > MAX_MERGED:
            raise UserError(f"top-k of {k} among {longest} positions: too many", "budget")
        candidates = found
        found, found_counts, apart = room(groups, min(k, fan * width))
        _merge_chunks_kernel[(num_rows, groups, num_layers)](
            scores, layers, rows, lengths, candidates, out_layers, slots, found, found_counts, written,
            scores.stride(0), scores.stride(1), longest,
            found.stride(0), found.stride(1), apart, found_counts.stride(0), found_counts.stride(1), apart,
            chunks, fan, width, k, n_sinks, n_recent,
            FORCED=forced, FROM_LISTS=listed, TO_LISTS=listed and groups == 1, TAILS=groups == 1 and tails is not None,
            BLOCK=total, num_warps=min(32, max(4, total // 512)),
        )  # fmt: skip
        chunks, width = groups, min(k, fan * width)


@triton.jit
def _rank(values, into, count, STEPS: tl.constexpr):
    """How many of the ascending into[:count] are below each value, and whether the next one equals it."""
    low = values * 0
    high = low + count
    for _ in tl.static_range(STEPS):
        open_ = low < high
        middle = (low + high) // 2
        below = tl.load(into + middle, mask=open_, other=NEVER) < values
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
    return low, tl.load(into + low, mask=low < count, other=NEVER) == values


@triton.jit(
    do_not_specialize=[
        "layers", "slots", "first_stride_l", "first_stride_s", "second_stride_n", "second_stride_s",
        "out_stride_l", "out_stride_s", "num_slots",
    ]
)  # fmt: skip
def _merge_kernel(
    first,  # int32 [L, S, A]
    first_lengths,  # int32 [L, S]
    second,  # int32 [N, S, B]
    second_lengths,  # int32 [N, S]
    source,  # int32 [L]
    layers,  # int [L]: place of each layer in out
    slots,  # int [R]
    limits,  # int32 [S]
    out,  # out int32 [L', S, C]
    out_lengths,  # out int32 [L', S]
    first_stride_l,
    first_stride_s,
    second_stride_n,
    second_stride_s,
    out_stride_l,
    out_stride_s,
    num_slots,
    LAYERS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    STEPS_A: tl.constexpr,
    STEPS_B: tl.constexpr,
):
    """Grid (R, L). An element's place is its index, plus the others below it, less the common ones below it."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    other = tl.load(source + layer).to(tl.int64)
    limit = tl.load(limits + slot)
    first += layer * first_stride_l + slot * first_stride_s
    second += other * second_stride_n + slot * second_stride_s
    out_layer = _place(layers, layer, LAYERS)
    out += out_layer * out_stride_l + slot * out_stride_s
    i = tl.arange(0, BLOCK_A)
    j = tl.arange(0, BLOCK_B)
    a = tl.load(first + i, mask=i < tl.load(first_lengths + layer * num_slots + slot), other=NEVER)
    b = tl.load(second + j, mask=j < tl.load(second_lengths + other * num_slots + slot), other=NEVER)
    # Positions from the limit on are read by the tail: they stand last, so leaving them out shortens both lists.
    num_a = tl.sum((a < limit).to(tl.int32), 0)
    num_b = tl.sum((b < limit).to(tl.int32), 0)
    in_a = i < num_a
    in_b = j < num_b
    below_a, twice_a = _rank(tl.where(in_a, a, 0), second, num_b, STEPS_B)
    below_b, twice_b = _rank(tl.where(in_b, b, 0), first, num_a, STEPS_A)
    common_a = (twice_a & in_a).to(tl.int32)
    common_b = (twice_b & in_b).to(tl.int32)
    tl.store(out + i + below_a - (tl.cumsum(common_a, 0) - common_a), a, mask=in_a)
    tl.store(out + j + below_b - (tl.cumsum(common_b, 0) - common_b), b, mask=in_b & (common_b == 0))
    tl.store(out_lengths + out_layer * num_slots + slot, num_a + num_b - tl.sum(common_a, 0))


def merge_sets(
    first: Tensor,
    first_lengths: Tensor,
    second: Tensor,
    second_lengths: Tensor,
    source: Tensor,
    slots: Tensor,
    limits: Tensor,
    *,
    layers: Tensor | None = None,
    out: Tensor,
    out_lengths: Tensor,
) -> None:
    """Context sets from two ascending lists, without duplicates, ascending, of positions below a limit.

    first: int32 [L, S, A] with first_lengths [L, S], a list for each layer; second: int32 [N, S, B] with second_lengths
    [N, S]; source: int32 [L], which of the N lists serves the layer; slots: int [R], the ones to do; limits: int32 [S]
    (tail starts). out: int32 [L', S, ≥ A + B] and out_lengths [L', S], as `AttentionBatch.sets`; layers: int [L], the place of
    each layer in them, None: all in order. Lists contiguous in their last dimension, lengths contiguous.
    """
    num_layers, num_slots, width = first.shape
    if out.shape[2] < width + second.shape[2]:
        raise UserError(f"sets of {width} and {second.shape[2]} positions into room for {out.shape[2]}", "budget")
    _merge_kernel[(slots.shape[0], num_layers)](
        first, first_lengths, second, second_lengths, source, source if layers is None else layers, slots, limits,
        out, out_lengths,
        first.stride(0), first.stride(1), second.stride(0), second.stride(1), out.stride(0), out.stride(1), num_slots,
        LAYERS=layers is not None,
        BLOCK_A=max(16, triton.next_power_of_2(width)), BLOCK_B=max(16, triton.next_power_of_2(second.shape[2])),
        STEPS_A=width.bit_length(), STEPS_B=second.shape[2].bit_length(),
    )  # fmt: skip
