"""What `Sampler.run` chooses for requests with a temperature alone, greedy ones among them, as work for the device alone: the
host knows no more of the step than how many rows and tokens it has, so that a CUDA graph can hold it."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_llm.sampling.kernels import (
    BLOCK,
    COUNT,
    DRAFT_ROW,
    FILTERED,
    KIND,
    OFFSET,
    RACE,
    SLOT,
    TEMPERATURE,
    WAY,
    Column,
    Step,
    Way,
    emit,
    read,
)
from aspire_llm.sampling.proposals import Proposals

LIKELIEST = tl.constexpr(int(Way.LIKELIEST))


@triton.jit(do_not_specialize=["slots", "kinds", "offsets", "temperatures", "columns", "token_rows", "num_tokens"])
def columns_kernel(
    slots,  # int32 [R]
    kinds,  # int32 [R]
    offsets,  # int32 [R + 1]
    temperatures,  # float32 [S + 1]; 0: greedy
    columns,  # out int32 [8, R]: see Column
    token_rows,  # out int32 [N]
    num_tokens,
    LIKELIEST_DRAFTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (R,)."""
    row = tl.program_id(0)
    num_rows = tl.num_programs(0)
    slot = tl.load(slots + row)
    kind = tl.load(kinds + row)
    first = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    temperature = tl.load(temperatures + slot)
    greedy = temperature == 0.0
    likeliest = greedy | (kind == DRAFT_ROW) if LIKELIEST_DRAFTS else greedy
    tl.store(columns + OFFSET * num_rows + row, first)
    tl.store(columns + COUNT * num_rows + row, end - first)
    tl.store(columns + SLOT * num_rows + row, slot)
    tl.store(columns + KIND * num_rows + row, kind)
    tl.store(columns + WAY * num_rows + row, tl.where(likeliest, LIKELIEST, RACE))
    tl.store(columns + FILTERED * num_rows + row, -1)
    tl.store(columns + BLOCK * num_rows + row, 0)
    divisor = tl.where(greedy, 1.0, temperature).to(tl.int32, bitcast=True)
    tl.store(columns + TEMPERATURE * num_rows + row, divisor)
    stop = tl.where(row == num_rows - 1, num_tokens, end)  # padding tokens are the last row's
    for block in range(first, stop, TOKENS):
        t = block + tl.arange(0, TOKENS)
        tl.store(token_rows + t, row, mask=t < stop)


def choose_by_row(
    slots: Tensor,
    kinds: Tensor,
    offsets: Tensor,
    temperatures: Tensor,
    logits: Tensor,
    positions: Tensor,
    history: Tensor,
    seeds: Tensor,
    no_logits: Tensor,
    proposals: Proposals,
    widest: int,
    *,
    likeliest_drafts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [R, widest], num_emitted and confidence of `SampleOutput`.

    slots, kinds: int32 [R]; offsets: int32 [R + 1], where each row's tokens begin; padding rows come last, in a slot of their
    own. temperatures: float32 [S + 1], 0 for greedy slots. logits [N, vocabulary], positions int64 [N]: of all tokens, those
    of padding last. history: as in `SampleBatch`; seeds: int64 [S]. no_logits: `Filters.no_logits`. widest: the most tokens
    of a row. likeliest_drafts: whether drafts are chosen greedily, whatever the temperature.
    """
    num_rows, num_tokens = len(slots), len(logits)
    columns = torch.empty(len(Column), num_rows, dtype=torch.int32, device=logits.device)
    token_rows = torch.empty(num_tokens, dtype=torch.int32, device=logits.device)
    columns_kernel[(num_rows,)](
        slots, kinds, offsets, temperatures, columns, token_rows, num_tokens,
        LIKELIEST_DRAFTS=likeliest_drafts, TOKENS=32, num_warps=1,
    )  # fmt: skip
    step = Step(logits, no_logits, columns, token_rows, positions, history, seeds)
    return emit(step, read(step), proposals, widest, widest, rejects=False)
