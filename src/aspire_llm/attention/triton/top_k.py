"""Top-k over rows of different lengths, and the union of two sorted lists: what turns scores into context sets."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_llm.errors import UserError

NEVER = tl.constexpr(2147483647)
MAX_CANDIDATES = 65536


@triton.jit
def _take(scores, position, valid, want, length, n_sinks, n_recent):
    """Which of the ascending positions are among the `want` best; of equals the first. The key of the last one taken is
    found bit by bit: keys stay in registers, a step is one comparison and one sum."""
    bits = tl.load(scores + position, mask=valid, other=0.0).to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)  # sorts as the floats do
    forced = (position < n_sinks) | (position >= length - n_recent)
    key = tl.where(forced, 0xFFFFFFFF, key).to(tl.uint32)
    last = tl.zeros([], tl.uint32)
    bit = last + 0x80000000
    for _ in range(32):
        trial = last | bit
        enough = tl.sum((valid & (key >= trial)).to(tl.int32), 0) >= want
        last = tl.where(enough, trial, last)
        bit = bit >> 1
    above = valid & (key > last)
    equal = (valid & (key == last)).to(tl.int32)
    rank = tl.cumsum(equal, 0) - equal
    return above | ((equal != 0) & (rank < want - tl.sum(above.to(tl.int32), 0)))


@triton.jit(do_not_specialize=["lengths", "counts", "k", "n_sinks", "n_recent"])
def _chunk_kernel(
    scores,  # float32 [R, longest]
    lengths,  # int32 [R]
    out,  # out int32 [R, chunks * width]
    counts,  # out int32 [R, chunks]
    score_stride,
    out_stride,
    width,
    k,
    n_sinks,
    n_recent,
    BLOCK: tl.constexpr,
):
    """Grid (R, chunks): the best k of each chunk of BLOCK positions, of which the row's best are a part."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    length = tl.load(lengths + row)
    position = chunk * BLOCK + tl.arange(0, BLOCK)
    valid = position < length
    want = tl.maximum(tl.minimum(tl.minimum(k, length - chunk * BLOCK), BLOCK), 0)
    tl.store(counts + row * tl.num_programs(1) + chunk, want)
    if want > 0:
        take = _take(scores + row * score_stride, position, valid, want, length, n_sinks, n_recent)
        chosen = take.to(tl.int32)
        tl.store(out + row * out_stride + chunk * width + tl.cumsum(chosen, 0) - chosen, position, mask=take)


@triton.jit(do_not_specialize=["lengths", "counts", "k", "n_sinks", "n_recent"])
def _merge_chunks_kernel(
    scores,  # float32 [R, longest]
    lengths,  # int32 [R]
    candidates,  # int32 [R, chunks * width]
    candidate_counts,  # int32 [R, chunks]
    out,  # out int32 [R, ≥ k]
    counts,  # out int32 [R]
    score_stride,
    candidate_stride,
    out_stride,
    chunks,
    width,
    k,
    n_sinks,
    n_recent,
    BLOCK: tl.constexpr,
):
    """Grid (R,): the best k of the chunks' candidates, which stand in the order of their positions."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    n = tl.arange(0, BLOCK)
    inside = n < chunks * width
    filled = tl.load(candidate_counts + row * chunks + n // width, mask=inside, other=0)
    valid = inside & (n % width < filled)
    position = tl.load(candidates + row * candidate_stride + n, mask=valid, other=0)
    want = tl.minimum(k, length)
    take = _take(scores + row * score_stride, position, valid, want, length, n_sinks, n_recent)
    chosen = take.to(tl.int32)
    tl.store(out + row * out_stride + tl.cumsum(chosen, 0) - chosen, position, mask=take)
    tl.store(counts + row, want)


CHUNK = 8192  # least positions of one program; at most 16 programs a row, so that their winners fit in one


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
    out: int32 [R, ≥ k], written up to counts; counts: int32 [R] contiguous, min(k, length).
    """
    if k < 1 or n_sinks < 0 or n_recent < 0 or n_sinks + n_recent > k:
        raise UserError(f"top-k of {k} positions cannot hold {n_sinks} sinks and {n_recent} recent ones", "budget")
    if out.shape[1] < k:
        raise UserError(f"top-k of {k} positions into room for {out.shape[1]}", "budget")
    num_rows, longest = scores.shape
    whole = max(128, triton.next_power_of_2(longest))
    block = min(whole, max(CHUNK, whole // 16))
    chunks = triton.cdiv(longest, block)
    warps = min(16, max(4, block // 512))
    if chunks == 1:
        _chunk_kernel[(num_rows, 1)](
            scores,
            lengths,
            out,
            counts,
            scores.stride(0),
            out.stride(0),
            k,
            k,
            n_sinks,
            n_recent,
            BLOCK=block,
            num_warps=warps,
        )
        return
    width = min(k, block)
    total = triton.next_power_of_2(chunks * width)
    if total > MAX_CANDIDATES:
        raise UserError(f"top-k of {k} among {longest} positions: too many", "budget")
    candidates = torch.empty((num_rows, chunks * width), dtype=torch.int32, device=scores.device)
    filled = torch.empty((num_rows, chunks), dtype=torch.int32, device=scores.device)
    _chunk_kernel[(num_rows, chunks)](
        scores, lengths, candidates, filled, scores.stride(0), candidates.stride(0), width, k, n_sinks, n_recent,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
    _merge_chunks_kernel[(num_rows,)](
        scores, lengths, candidates, filled, out, counts, scores.stride(0), candidates.stride(0), out.stride(0), chunks, width,
        k, n_sinks, n_recent, BLOCK=total, num_warps=min(32, max(4, total // 1024)),
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
        "slots", "first_stride_l", "first_stride_s", "second_stride_n", "second_stride_s",
        "out_stride_l", "out_stride_s", "num_slots",
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
