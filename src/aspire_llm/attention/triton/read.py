"""Reading memory and nothing else: how fast a device can, as the ceiling that other kernels are held against."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # numbers that a program has on their way at once
BLOCKS = 2  # of a program; of 90 variants, with ones that stay and loop, the fastest on an H200
SPAN = BLOCKS * BLOCK


@triton.jit
def read_kernel(
    numbers,  # int32 [programs * BLOCKS * BLOCK]
    sums,  # out int32 [programs]
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (programs,): each reads a span. Sums wrap around; they keep the reads from being left out."""
    first = numbers + tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(BLOCKS):
        total += tl.load(first + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read(memory: Tensor) -> Tensor:
    """Reads a contiguous tensor of any type, but for a last part of less than 64 KiB; returns int32 sums of it, [programs], which
    wrap around. On a GPU one launch."""
    numbers = memory.view(-1).view(torch.int32)
    sums = torch.empty(len(numbers) // SPAN, dtype=torch.int32, device=numbers.device)
    read_kernel[(len(sums),)](numbers, sums, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=8)
    return sums
