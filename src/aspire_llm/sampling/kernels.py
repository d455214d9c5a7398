"""The sampler's work on a GPU as Triton kernels; `by_kernel.choose` says which rows take which way through them.

`read` looks at every logit once, in parts of the vocabulary that are the same whatever the batch; `emit` puts the parts together
and settles each row. Only rejection sampling needs more (rejection_kernels.py). No kernel writes anything as large as the logits,
but for the proposals that are kept.

Random numbers are those of random.py: keys, hashes and uniform numbers to the bit, in the same integer arithmetic. Logarithms are
float64, as there, and may differ in the last place; probabilities are float32. So a race has another winner than in torch
operations only where two scores agree in about 15 digits (rejection sampling's residual: 7 digits), and a draft is accepted
otherwise only where u q and p agree in about 7.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_llm.request import RowKind
from aspire_llm.sampling.proposals import Proposals
from aspire_llm.sampling.random import GAMMA, MIX_1, MIX_2, Purpose, signed

WARPS = 8
TILE = 1024  # of a race at a time
SPLIT = 4096  # of the vocabulary, for one program: four tokens of 151,936 still fill an H200's 132 multiprocessors


class Way(IntEnum):
    """How a row's tokens are chosen, from p = softmax(logits / temperature)."""

    LIKELIEST = 0
    RACE = 1  # by the target's random numbers; a DRAFT row's confidence is the winner's share of the perturbed distribution
    PROPOSE = 2  # a draft by its own random numbers; q is kept
    VERIFY = 3  # rejection sampling of at least one draft


class Column(IntEnum):
    """Of `Step.columns`, for each row."""

    OFFSET = 0  # its first token
    COUNT = 1  # its tokens
    SLOT = 2
    KIND = 3  # RowKind
    WAY = 4
    FILTERED = 5  # where its tokens begin in `Step.filtered`; -1: they are read from `Step.logits`
    BLOCK = 6  # of the proposals' pool
    TEMPERATURE = 7  # the bits of a float32


@dataclass(frozen=True, slots=True)
class Step:
    """R rows, N tokens."""

    logits: Tensor  # float32, bfloat16 or float16 [N, vocabulary], contiguous in a row
    filtered: Tensor  # float32 [n, vocabulary], contiguous: logits of the rows that are not read from `logits`
    columns: Tensor  # int32 [8, R]: see Column
    token_rows: Tensor  # int32 [N]
    positions: Tensor  # int64 [N]: of the tokens that were fed
    history: Tensor  # int64 [slots, columns]
    seeds: Tensor  # int64 [slots]


@dataclass(frozen=True, slots=True)
class Parts:
    """Of each token, what each part of the vocabulary has: [N, splits]."""

    score: Tensor  # float64: the best logit or, in a race, the best score
    index: Tensor  # int32: the token that has it; of equal ones the lowest
    high: Tensor  # float32: the largest logit (with RACE the best score)
    mass: Tensor  # float32: sum of exp(logit - high) (with RACE of scores)


OFFSET, COUNT, SLOT, KIND = (tl.constexpr(int(c)) for c in (Column.OFFSET, Column.COUNT, Column.SLOT, Column.KIND))
WAY, FILTERED, BLOCK = (tl.constexpr(int(c)) for c in (Column.WAY, Column.FILTERED, Column.BLOCK))
TEMPERATURE = tl.constexpr(int(Column.TEMPERATURE))
RACE, PROPOSE, VERIFY = (tl.constexpr(int(way)) for way in (Way.RACE, Way.PROPOSE, Way.VERIFY))
DRAFT_ROW = tl.constexpr(int(RowKind.DRAFT))
STEP, FIRST, SECOND = tl.constexpr(GAMMA), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
FOR_TARGET, FOR_DRAFT, FOR_ACCEPT, FOR_RESIDUAL = (
    tl.constexpr(signed(GAMMA * (purpose + 1) % (1 << 64)))
    for purpose in (Purpose.TARGET, Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL)
)
LOW_34, LOW_37, LOW_33, LOW_52 = (tl.constexpr((1 << bits) - 1) for bits in (34, 37, 33, 52))
NOTHING = tl.constexpr(2**31 - 1)


@triton.jit
def mix(z):
    """`random._mix`: int64."""
    z = (z ^ ((z >> 30) & LOW_34)) * FIRST
    z = (z ^ ((z >> 27) & LOW_37)) * SECOND
    return z ^ ((z >> 31) & LOW_33)


@triton.jit
def key_of(seed, place, purpose):
    """`random.keys`: int64. purpose: FOR_TARGET and so on."""
    key = mix(mix(seed + STEP) + (place + 1) * STEP)
    return mix(key + purpose)


@triton.jit
def unit(bits):
    """`random._unit`: float64."""
    return (((bits >> 12) & LOW_52).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def log_exponential(key, i):
    """Logarithm of number i of `random.exponential`: float64."""
    return tl.log(-tl.log(unit(mix(key + (i.to(tl.int64) + 1) * STEP))))


@triton.jit
def scaled(logits, filtered, columns, num_rows, row, token, at, inside, vocab_size, stride):
    """Logits at `at` of tokens of a row, over its temperature: float32; -inf outside."""
    first = tl.load(columns + FILTERED * num_rows + row)
    if first >= 0:
        own = token - tl.load(columns + OFFSET * num_rows + row) + first
        x = tl.load(filtered + own.to(tl.int64) * vocab_size + at, mask=inside, other=float("-inf"))
    else:
        x = tl.load(logits + token * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.load(columns + TEMPERATURE * num_rows + row).to(tl.float32, bitcast=True))


@triton.jit
def winner(score, at):
    """The best of a tile's scores, and of those that have it the lowest `at`. NaN never wins."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, at, NOTHING), 0)


@triton.jit
def finite(high):
    """To subtract from logits none of which is larger: 0 in place of -inf."""
    return tl.where(high == float("-inf"), 0.0, high)


@triton.jit
def whole(high, mass, token, splits, S_PAD: tl.constexpr):
    """The largest logit of a token, and the sum of exp(logit - largest)."""
    s = tl.arange(0, S_PAD)
    part_high = tl.load(high + token * splits + s, mask=s < splits, other=float("-inf"))
    part_mass = tl.load(mass + token * splits + s, mask=s < splits, other=0.0)
    highest = finite(tl.max(part_high, 0))
    return highest, tl.sum(part_mass * tl.exp(part_high - highest), 0)


@triton.jit(do_not_specialize=["columns", "token_rows", "positions", "seeds", "num_rows"])
def read_kernel(
    logits,  # as in Step, and so on
    filtered,
    columns,
    token_rows,
    positions,
    seeds,
    score,  # out, as in Parts
    index,
    high,
    mass,
    num_rows,
    vocab_size,
    stride,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,  # of a race at a time
):
    """Grid (N, splits)."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    out = token * tl.num_programs(1) + part
    row = tl.load(token_rows + token)
    way = tl.load(columns + WAY * num_rows + row)
    if (way == RACE) | (way == PROPOSE):
        seed = tl.load(seeds + tl.load(columns + SLOT * num_rows + row))
        key = key_of(seed, tl.load(positions + token) + 1, tl.where(way == RACE, FOR_TARGET, FOR_DRAFT))
        # each lane keeps its own best, and its sum relative to its own largest
        lane = part * SPLIT + tl.arange(0, TILE)
        best = tl.full([TILE], float("-inf"), tl.float64)
        where = lane
        largest = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        for low in range(0, SPLIT, TILE):
            at = lane + low
            inside = at < vocab_size
            x = scaled(logits, filtered, columns, num_rows, row, token, at, inside, vocab_size, stride)
            noisy = x.to(tl.float64) - log_exponential(key, at)
            where = tl.where(noisy > best, at, where)
            best = tl.where(noisy > best, noisy, best)
            y = tl.where(way == RACE, noisy.to(tl.float32), x)
            larger = tl.where(y > largest, y, largest)
            total = total * tl.exp(largest - finite(larger)) + tl.exp(y - finite(larger))
            largest = larger
        top, chosen = winner(best, where)
        tl.store(score + out, top)
        tl.store(index + out, chosen)
        top_y = tl.max(largest, 0)
        tl.store(high + out, top_y)
        tl.store(mass + out, tl.sum(total * tl.exp(largest - finite(top_y)), 0))
    else:
        all_at = part * SPLIT + tl.arange(0, SPLIT)
        inside_all = all_at < vocab_size
        z = scaled(logits, filtered, columns, num_rows, row, token, all_at, inside_all, vocab_size, stride)
        top_z, likeliest = winner(z, all_at)
        tl.store(score + out, top_z.to(tl.float64))
        tl.store(index + out, likeliest)
        tl.store(high + out, top_z)
        tl.store(mass + out, tl.sum(tl.exp(z - finite(top_z)), 0))


@triton.jit(
    do_not_specialize=[
        "columns", "positions", "history", "seeds", "pool", "tokens", "num_emitted", "confidence", "num_rows",
        "history_stride", "history_len", "width",
    ]
)  # fmt: skip
def emit_kernel(
    logits,
    filtered,
    columns,
    positions,
    history,
    seeds,
    score,
    index,
    high,
    mass,
    pool,
    tokens,  # out int64 [R, width]
    num_emitted,  # out int64 [R]
    confidence,  # out float32 [R]
    num_rows,
    vocab_size,
    stride,
    history_stride,
    history_len,
    width,
    splits,
    ring,
    REJECTS: tl.constexpr,  # whether there can be VERIFY ways
    W_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
):
    """Grid (R,)."""
    row = tl.program_id(0)
    first = tl.load(columns + OFFSET * num_rows + row).to(tl.int64)
    count = tl.load(columns + COUNT * num_rows + row)
    slot = tl.load(columns + SLOT * num_rows + row).to(tl.int64)
    way = tl.load(columns + WAY * num_rows + row)
    j = tl.arange(0, W_PAD)
    s = tl.arange(0, S_PAD)
    token = first + j
    at = token[:, None] * splits + s[None, :]
    inside = (j < count)[:, None] & (s < splits)[None, :]
    part = tl.load(score + at, mask=inside, other=float("-inf"))
    best = tl.max(part, 1)
    winners = tl.load(index + at, mask=inside, other=NOTHING)
    chosen = tl.min(tl.where(part == best[:, None], winners, NOTHING), 1)
    chosen = tl.minimum(chosen, vocab_size - 1).to(tl.int64)  # where nothing is a number
    place = tl.load(positions + token, mask=j < count, other=0) + 1
    has_draft = j < count - 1
    draft = tl.load(history + slot * history_stride + tl.minimum(place, history_len - 1), mask=has_draft, other=0)
    right = chosen == draft
    if REJECTS:  # noqa: SIM102 (what is known when compiling stands apart)
        if way == VERIFY:
            part_high = tl.load(high + at, mask=inside, other=float("-inf"))
            part_mass = tl.load(mass + at, mask=inside, other=0.0)
            highest = finite(tl.max(part_high, 1))
            total = tl.sum(part_mass * tl.exp(part_high - highest[:, None]), 1)
            x = scaled(logits, filtered, columns, num_rows, row, token, draft, has_draft, vocab_size, stride)
            p = tl.div_rn(tl.exp(x - highest), tl.where(has_draft, total, 1.0))
            at_q = tl.load(columns + BLOCK * num_rows + row) * ring + place % ring
            q = tl.load(pool + at_q * vocab_size + draft, mask=has_draft, other=0.0)
            u = unit(mix(key_of(tl.load(seeds + slot), place, FOR_ACCEPT) + STEP))
            right = u * q.to(tl.float64) < p.to(tl.float64)
            chosen = tl.zeros([W_PAD], tl.int64)  # drawn by residual_kernel
    # the first draft that is wrong, or the place behind the last
    taken = tl.min(tl.where(right & has_draft, W_PAD, j), 0)
    emitted = tl.where(j < taken, draft, tl.where(j == taken, chosen, 0))
    tl.store(tokens + row.to(tl.int64) * width + j, emitted, mask=j < width)
    tl.store(num_emitted + row, taken.to(tl.int64) + 1)
    _, own = whole(high, mass, first, splits, S_PAD)
    is_draft = tl.load(columns + KIND * num_rows + row) == DRAFT_ROW
    tl.store(confidence + row, tl.where(is_draft, tl.minimum(1.0 / own, 1.0), 0.0))


def read(step: Step) -> Parts:
    """Every logit once: of each token and part of the vocabulary the best, and the mass of all."""
    num_tokens, vocab_size = step.logits.shape
    splits, split = splits_of(vocab_size)
    device = step.logits.device
    score = torch.empty(num_tokens, splits, dtype=torch.float64, device=device)
    index = torch.empty(num_tokens, splits, dtype=torch.int32, device=device)
    high, mass = torch.empty(2, num_tokens, splits, dtype=torch.float32, device=device).unbind()
    read_kernel[(num_tokens, splits)](
        step.logits, step.filtered, step.columns, step.token_rows, step.positions, step.seeds, score, index, high, mass,
        step.columns.shape[1], vocab_size, step.logits.stride(0), SPLIT=split, TILE=min(split, TILE), num_warps=WARPS,
    )  # fmt: skip
    return Parts(score, index, high, mass)


def emit(
    step: Step, parts: Parts, proposals: Proposals, width: int, widest: int, *, rejects: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What the rows emit, as SampleOutput has it: tokens int64 [R, width], num_emitted int64 [R], confidence float32 [R].

    width: of the widest row; widest: that a row can be. rejects: whether there may be VERIFY ways; the last token of their rows
    is left to `rejection_kernels.replace_rejected`.
    """
    device, num_rows, vocab_size = step.logits.device, step.columns.shape[1], step.logits.shape[1]
    tokens = torch.empty(num_rows, width, dtype=torch.int64, device=device)
    num_emitted = torch.empty(num_rows, dtype=torch.int64, device=device)
    confidence = torch.empty(num_rows, dtype=torch.float32, device=device)
    splits, _ = splits_of(vocab_size)
    w_pad, s_pad = triton.next_power_of_2(widest), triton.next_power_of_2(splits)
    emit_kernel[(num_rows,)](
        step.logits, step.filtered, step.columns, step.positions, step.history, step.seeds,
        parts.score, parts.index, parts.high, parts.mass, proposals.pool, tokens, num_emitted, confidence,
        num_rows, vocab_size, step.logits.stride(0), step.history.stride(0), step.history.shape[1], width, splits,
        proposals.ring, REJECTS=rejects, W_PAD=w_pad, S_PAD=s_pad, num_warps=min(16, max(4, w_pad * s_pad // 128)),
    )  # fmt: skip
    return tokens, num_emitted, confidence


def splits_of(vocab_size: int) -> tuple[int, int]:
    """How many parts a vocabulary has, and how long each is."""
    split = min(SPLIT, triton.next_power_of_2(vocab_size))
    return triton.cdiv(vocab_size, split), split
