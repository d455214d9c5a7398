"""The sampler's part of a step as Triton kernels: the best token of each row of logits with its probability, in one read of
them, and what a verification emits. What they compute is what `Sampler` does in torch operations elsewhere."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_llm.request import RowKind

SPLIT = 16384  # of the vocabulary, for one program: few tokens still fill a device; fixed, so that no result depends on the batch
BLOCK = 2048
DRAFT = tl.constexpr(int(RowKind.DRAFT))


@triton.jit
def _first_max(value_a, index_a, value_b, index_b):
    """The larger value; of equal ones the lower index."""
    first = (value_a > value_b) | ((value_a == value_b) & (index_a < index_b))
    return tl.where(first, value_a, value_b), tl.where(first, index_a, index_b)


@triton.jit
def _part_kernel(
    logits,  # [N, V]
    part_max,  # out float32 [N, splits]
    part_index,  # out int32 [N, splits]
    part_sum,  # out float32 [N, splits]: of exp(logit - part_max)
    vocab_size,
    stride,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (N, splits): the best logit of a part of the vocabulary."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SPLIT
    lane = tl.arange(0, BLOCK)
    # each lane keeps its own, and they are compared once, at the end
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK], tl.int32) + 2147483647
    total = tl.zeros([BLOCK], tl.float32)
    for low in range(0, SPLIT, BLOCK):
        at = first + low + lane
        x = tl.load(logits + token * stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(best, x)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(best - safe) + tl.exp(x - safe)
        index = tl.where((x > best) | (index == 2147483647), at, index)
        best = higher
    top, where = tl.reduce((best, index), 0, _first_max)
    safe = tl.where(top == float("-inf"), 0.0, top)
    place = token * tl.num_programs(1) + tl.program_id(1)
    tl.store(part_max + place, top)
    tl.store(part_index + place, where)
    tl.store(part_sum + place, tl.sum(total * tl.exp(best - safe), 0))


@triton.jit
def _whole_kernel(
    part_max,  # float32 [N, splits]
    part_index,  # int32 [N, splits]
    part_sum,  # float32 [N, splits]
    tokens,  # out int64 [N]
    probability,  # out float32 [N]
    splits,
    S_PAD: tl.constexpr,
):
    """Grid (N,)."""
    token = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S_PAD)
    at = token * splits + s
    best = tl.load(part_max + at, mask=s < splits, other=float("-inf"))
    index = tl.load(part_index + at, mask=s < splits, other=2147483647)
    total = tl.load(part_sum + at, mask=s < splits, other=0.0)
    top, where = tl.reduce((best, index), 0, _first_max)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tokens + token, where.to(tl.int64))
    tl.store(probability + token, 1.0 / tl.sum(total * tl.exp(best - safe), 0))


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row of logits [N, vocabulary], of any float type, contiguous in the vocabulary; of equal ones
    the first. Returns int64 [N] and its probability, float32 [N]. A row that has no finite logit means nothing."""
    num_tokens, vocab_size = logits.shape
    splits = triton.cdiv(vocab_size, SPLIT)
    parts = torch.empty(2, num_tokens, splits, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_tokens, splits, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_tokens, dtype=torch.int64, device=logits.device)
    probability = torch.empty(num_tokens, dtype=torch.float32, device=logits.device)
    if not num_tokens:
        return tokens, probability
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    split = min(SPLIT, triton.cdiv(vocab_size, block) * block)
    _part_kernel[(num_tokens, splits)](
        logits, parts[0], indices, parts[1], vocab_size, logits.stride(0), SPLIT=split, BLOCK=block, num_warps=8
    )
    _whole_kernel[(num_tokens,)](
        parts[0], indices, parts[1], tokens, probability, splits, S_PAD=triton.next_power_of_2(splits), num_warps=1
    )
    return tokens, probability


@triton.jit
def _emit_kernel(
    chosen,  # int64 [N]
    accepted,  # int8 [N]
    drafts,  # int64 [N]
    confidence,  # float32 [N]
    offsets,  # int64 [R]
    counts,  # int64 [R]
    kinds,  # int64 [R]
    tokens,  # out int64 [R, W]
    num_emitted,  # out int64 [R]
    row_confidence,  # out float32 [R]
    width,
    W_PAD: tl.constexpr,
):
    """Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets + row)
    count = tl.load(counts + row)
    j = tl.arange(0, W_PAD)
    has_draft = j < count - 1
    right = (tl.load(accepted + first + j, mask=has_draft, other=0) != 0) & has_draft
    taken = tl.min(tl.where(right, W_PAD, j), 0)  # the first draft that is wrong, or the place behind the last
    token = tl.load(drafts + first + j, mask=j < taken, other=0)
    token = tl.where(j == taken, tl.load(chosen + first + taken), token)
    tl.store(tokens + row * width + j, tl.where(j <= taken, token, 0), mask=j < width)
    tl.store(num_emitted + row, taken.to(tl.int64) + 1)
    own = tl.load(confidence + first)
    tl.store(row_confidence + row, tl.where(tl.load(kinds + row) == DRAFT, own, 0.0))


def emit(
    chosen: Tensor,
    accepted: Tensor,
    drafts: Tensor,
    confidence: Tensor,
    offsets: Tensor,
    counts: Tensor,
    kinds: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `acceptance.emitted`."""
    num_rows = len(counts)
    tokens = torch.empty(num_rows, width, dtype=torch.int64, device=chosen.device)
    num_emitted = torch.empty(num_rows, dtype=torch.int64, device=chosen.device)
    row_confidence = torch.empty(num_rows, dtype=torch.float32, device=chosen.device)
    _emit_kernel[(num_rows,)](
        chosen, accepted.view(torch.int8), drafts, confidence, offsets, counts, kinds, tokens, num_emitted, row_confidence,
        width, W_PAD=triton.next_power_of_2(width + 1), num_warps=1,
    )  # fmt: skip
    return tokens, num_emitted, row_confidence
