"""What only rejection sampling needs of the kernels: proposals are kept, and a token is drawn where one was rejected.

See kernels.py for what is equal to the torch operations, and how far.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_llm.sampling.kernels import (
    BLOCK,
    COUNT,
    FOR_RESIDUAL,
    FOR_TARGET,
    NOTHING,
    OFFSET,
    PROPOSE,
    SLOT,
    TILE,
    VERIFY,
    WARPS,
    WAY,
    Parts,
    Step,
    key_of,
    log_exponential,
    scaled,
    splits_of,
    whole,
    winner,
)
from aspire_llm.sampling.proposals import Proposals


@triton.jit(do_not_specialize=["columns", "positions", "pool", "num_rows"])
def keep_kernel(
    logits,
    filtered,
    columns,
    positions,
    high,
    mass,
    pool,  # out float32 [blocks, ring, V]
    num_rows,
    vocab_size,
    stride,
    ring,
    SPLIT: tl.constexpr,
    S_PAD: tl.constexpr,
):
    """Grid (R, splits): q of PROPOSE rows."""
    row = tl.program_id(0)
    if tl.load(columns + WAY * num_rows + row) != PROPOSE:
        return
    token = tl.load(columns + OFFSET * num_rows + row).to(tl.int64)
    at = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    x = scaled(logits, filtered, columns, num_rows, row, token, at, at < vocab_size, vocab_size, stride)
    highest, total = whole(high, mass, token, tl.num_programs(1), S_PAD)
    place = tl.load(columns + BLOCK * num_rows + row) * ring + (tl.load(positions + token) + 1) % ring
    tl.store(pool + place * vocab_size + at, tl.div_rn(tl.exp(x - highest), total), mask=at < vocab_size)


@triton.jit(do_not_specialize=["columns", "positions", "seeds", "pool", "num_emitted", "num_rows"])
def residual_kernel(
    logits,
    filtered,
    columns,
    positions,
    seeds,
    high,
    mass,
    pool,
    num_emitted,
    score,  # out float64 [2, R, splits]: of races by p and by max(p - q, 0)
    index,  # out int32 [2, R, splits]
    num_rows,
    vocab_size,
    stride,
    ring,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    S_PAD: tl.constexpr,
):
    """Grid (R, splits): races for the token that ends a VERIFY row."""
    row = tl.program_id(0)
    splits = tl.num_programs(1)
    if tl.load(columns + WAY * num_rows + row) != VERIFY:
        return
    emitted = tl.load(num_emitted + row)
    is_bonus = emitted == tl.load(columns + COUNT * num_rows + row)  # no draft stands there
    token = tl.load(columns + OFFSET * num_rows + row).to(tl.int64) + emitted - 1
    place = tl.load(positions + token) + 1
    seed = tl.load(seeds + tl.load(columns + SLOT * num_rows + row))
    key = key_of(seed, place, tl.where(is_bonus, FOR_TARGET, FOR_RESIDUAL))
    highest, total = whole(high, mass, token, splits, S_PAD)
    kept = pool + (tl.load(columns + BLOCK * num_rows + row) * ring + place % ring) * vocab_size
    lane = tl.program_id(1) * SPLIT + tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float64)
    best_left = tl.full([TILE], float("-inf"), tl.float64)
    where = lane
    where_left = lane
    for low in range(0, SPLIT, TILE):
        at = lane + low
        inside = at < vocab_size
        x = scaled(logits, filtered, columns, num_rows, row, token, at, inside, vocab_size, stride)
        q = tl.load(kept + at, mask=inside, other=0.0)
        left = tl.div_rn(tl.exp(x - highest), total) - q
        noise = log_exponential(key, at)
        noisy = x.to(tl.float64) - noise
        where = tl.where(noisy > best, at, where)
        best = tl.where(noisy > best, noisy, best)
        possible = inside & (left > 0.0)
        noisy_left = tl.where(possible, tl.log(tl.where(possible, left, 1.0).to(tl.float64)) - noise, float("-inf"))
        where_left = tl.where(noisy_left > best_left, at, where_left)
        best_left = tl.where(noisy_left > best_left, noisy_left, best_left)
    out = row.to(tl.int64) * splits + tl.program_id(1)
    top, chosen = winner(best, where)
    tl.store(score + out, top)
    tl.store(index + out, chosen)
    top, chosen = winner(best_left, where_left)
    second = num_rows.to(tl.int64) * splits
    tl.store(score + second + out, tl.where(is_bonus, float("-inf"), top))
    tl.store(index + second + out, chosen)


@triton.jit(do_not_specialize=["columns", "num_emitted", "tokens", "num_rows", "width"])
def replace_kernel(
    columns,
    score,  # float64 [2, R, splits]
    index,  # int32 [2, R, splits]
    num_emitted,
    tokens,  # in place
    num_rows,
    vocab_size,
    splits,
    width,
    S_PAD: tl.constexpr,
):
    """Grid (R,): the token that ends a VERIFY row."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(columns + WAY * num_rows + row) != VERIFY:
        return
    s = tl.arange(0, S_PAD)
    at = row * splits + s
    second = num_rows.to(tl.int64) * splits + at
    _, in_p = winner(
        tl.load(score + at, mask=s < splits, other=float("-inf")),
        tl.load(index + at, mask=s < splits, other=NOTHING),
    )
    by_left, in_left = winner(
        tl.load(score + second, mask=s < splits, other=float("-inf")),
        tl.load(index + second, mask=s < splits, other=NOTHING),
    )
    # nothing is left of p where p and q agree but for rounding, and behind the last draft there is no q
    chosen = tl.where(by_left == float("-inf"), in_p, in_left)
    chosen = tl.minimum(chosen, vocab_size - 1).to(tl.int64)
    tl.store(tokens + row * width + tl.load(num_emitted + row) - 1, chosen)


def keep_proposals(step: Step, parts: Parts, proposals: Proposals) -> None:
    """q of PROPOSE rows into their blocks."""
    num_rows, vocab_size = step.columns.shape[1], step.logits.shape[1]
    splits, split = splits_of(vocab_size)
    keep_kernel[(num_rows, splits)](
        step.logits, step.filtered, step.columns, step.positions, parts.high, parts.mass, proposals.pool, num_rows,
        vocab_size, step.logits.stride(0), proposals.ring, SPLIT=split, S_PAD=triton.next_power_of_2(splits), num_warps=WARPS,
    )  # fmt: skip


def replace_rejected(step: Step, parts: Parts, proposals: Proposals, tokens: Tensor, num_emitted: Tensor) -> None:
    """The token that ends each VERIFY row, into `tokens`."""
    device, num_rows, vocab_size = step.logits.device, step.columns.shape[1], step.logits.shape[1]
    splits, split = splits_of(vocab_size)
    padded = triton.next_power_of_2(splits)
    score = torch.empty(2, num_rows, splits, dtype=torch.float64, device=device)
    index = torch.empty(2, num_rows, splits, dtype=torch.int32, device=device)
    residual_kernel[(num_rows, splits)](
        step.logits, step.filtered, step.columns, step.positions, step.seeds, parts.high, parts.mass, proposals.pool,
        num_emitted, score, index, num_rows, vocab_size, step.logits.stride(0), proposals.ring,
        SPLIT=split, TILE=min(split, TILE), S_PAD=padded, num_warps=WARPS,
    )  # fmt: skip
    replace_kernel[(num_rows,)](
        step.columns, score, index, num_emitted, tokens, num_rows, vocab_size, splits, tokens.shape[1], S_PAD=padded, num_warps=1
    )  # fmt: skip
