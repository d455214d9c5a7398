"""Top-k over rows of different lengths, and the union of two sorted lists: what turns scores into context sets."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aspire_llm.errors import UserError

NEVER = tl.constexpr(2147483647)


@triton.jit
def _keys(scores, position, length, n_sinks, n_recent):
    """uint32 keys that sort as the floats do; sinks and recent positions above all."""
    bits = tl.load(scores + position, mask=position < length, other=0.0).to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)
    forced = (position < n_sinks) | (position >= length - n_recent)
    return tl.where(forced, 0xFFFFFFFF, key)


@triton.jit(do_not_specialize=["lengths", "counts", "k", "n_sinks", "n_recent"])
def _top_k_kernel(
    scores,  # float32 [R, longest]
    lengths,  # int32 [R]
    out,  # out int32 [R, ≥ k]
    counts,  # out int32 [R]
    score_stride,
    out_stride,
    k,
    n_sinks,
    n_recent,
    BLOCK: tl.constexpr,
):
    """Radix select, one program a row: four passes find the k-th largest key eight bits at a time, a fifth writes."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    scores += row * score_stride
    left = tl.minimum(k, length)
    tl.store(counts + row, left)
    bins = tl.arange(0, 256)
    found = tl.zeros([], tl.uint32)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        histogram = tl.zeros([256], tl.int32)
        for first in range(0, length, BLOCK):
            position = first + tl.arange(0, BLOCK)
            key = _keys(scores, position, length, n_sinks, n_recent)
            match = position < length
            if step > 0:
                match = match & ((key >> (shift + 8)) == (found >> (shift + 8)))
            histogram += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=match)
        above = tl.sum(histogram, 0) - tl.cumsum(histogram, 0)
        here = (above < left) & (above + histogram >= left)
        found |= tl.sum(tl.where(here, bins, 0), 0).to(tl.uint32) << shift
        left -= tl.sum(tl.where(here, above, 0), 0)
    # Of keys equal to the k-th, the lowest positions.
    written = tl.zeros([], tl.int32)
    ties = tl.zeros([], tl.int32)
    for first in range(0, length, BLOCK):
        position = first + tl.arange(0, BLOCK)
        key = _keys(scores, position, length, n_sinks, n_recent)
        equal = ((position < length) & (key == found)).to(tl.int32)
        rank = ties + tl.cumsum(equal, 0) - equal
        take = ((position < length) & (key > found)) | ((equal != 0) & (rank < left))
        chosen = take.to(tl.int32)
        tl.store(out + row * out_stride + written + tl.cumsum(chosen, 0) - chosen, position, mask=take)
        written += tl.sum(chosen, 0)
        ties += tl.sum(equal, 0)


def top_k(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    *,
    n_sinks: int = 0,
    n_recent: int = 0,
    out: Tensor,
    counts: Tensor,
) -> None:
    """The k positions of each row with the largest scores, ascending.

    scores: float32 [R, longest], rows strided; lengths: int32 [R], at most `longest`. Positions below `n_sinks` and from
    length - n_recent on are always taken and count towards k. Of equal scores the lowest positions are taken.
    out: int32 [R, ≥ k], written up to counts; counts: int32 [R], min(k, length).
    """
    if k < 1 or n_sinks < 0 or n_recent < 0 or n_sinks + n_recent > k:
        raise UserError(f"top-k of {k} positions cannot hold {n_sinks} sinks and {n_recent} recent ones", "budget")
    if out.shape[1] < k:
        raise UserError(f"top-k of {k} positions into room for {out.shape[1]}", "budget")
    block = min(4096, max(128, triton.next_power_of_2(scores.shape[1])))
    _top_k_kernel[(scores.shape[0],)](
        scores, lengths, out, counts, scores.stride(0), out.stride(0), k, n_sinks, n_recent,
        BLOCK=block, num_warps=16 if block >= 2048 else 4,
    )  # fmt: skip


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
        "slots", "first_stride_l", "first_stride_s", "second_stride_n", "second_stride_s", "out_stride_l", "out_stride_s", "num_slots",
    ]
)  # fmt: skip
def _merge_kernel(
    first,  # int32 [L, S, A]
    first_lengths,  # int32 [L, S]
    second,  # int32 [N, S, B]
    second_lengths,  # int32 [N, S]
    source,  # int32 [L]
    slots,  # int32 [R]
    limits,  # int32 [S]
    out,  # out int32 [L, S, C]
    out_lengths,  # out int32 [L, S]
    first_stride_l,
    first_stride_s,
    second_stride_n,
    second_stride_s,
    out_stride_l,
    out_stride_s,
    num_slots,
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
    out += layer * out_stride_l + slot * out_stride_s
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
    tl.store(out_lengths + layer * num_slots + slot, num_a + num_b - tl.sum(common_a, 0))


def merge_sets(
    first: Tensor,
    first_lengths: Tensor,
    second: Tensor,
    second_lengths: Tensor,
    source: Tensor,
    slots: Tensor,
    limits: Tensor,
    *,
    out: Tensor,
    out_lengths: Tensor,
) -> None:
    """Context sets from two ascending lists, without duplicates, ascending, of positions below a limit.

    first: int32 [L, S, A] with first_lengths [L, S], a list for each layer; second: int32 [N, S, B] with second_lengths
    [N, S]; source: int32 [L], which of the N lists serves the layer; slots: int32 [R], the ones to do; limits: int32 [S]
    (tail starts). out: int32 [L, S, ≥ A + B] and out_lengths [L, S], as `AttentionBatch.sets`. Lists contiguous in their last
    dimension, lengths contiguous.
    """
    num_layers, num_slots, width = first.shape
    if out.shape[2] < width + second.shape[2]:
        raise UserError(f"sets of {width} and {second.shape[2]} positions into room for {out.shape[2]}", "budget")
    _merge_kernel[(slots.shape[0], num_layers)](
        first, first_lengths, second, second_lengths, source, slots, limits, out, out_lengths,
        first.stride(0), first.stride(1), second.stride(0), second.stride(1), out.stride(0), out.stride(1), num_slots,
        BLOCK_A=max(16, triton.next_power_of_2(width)), BLOCK_B=max(16, triton.next_power_of_2(second.shape[2])),
        STEPS_A=width.bit_length(), STEPS_B=second.shape[2].bit_length(),
    )  # fmt: skip
