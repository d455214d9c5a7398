"""Reading memory and nothing else: how fast a device can, as the ceiling that other kernels are held against."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # numbers that a program has on their way at once
BLOCKS_EACH = 2  # of a program; of 90 variants, and ones that stay and loop, the fastest on an H200


@triton.jit(do_not_specialize=["num_blocks"])
def read_kernel(
    numbers,  # int32 [num_blocks * BLOCK]
    sums,  # out int32 [programs]
    num_blocks,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):
    """Grid (programs,): each reads EACH blocks. Sums wrap around; they keep the reads from being left out."""
    first = tl.program_id(0) * EACH
    total = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(EACH):
        at = tl.cast(first + i, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(numbers + at, mask=first + i < num_blocks, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read(memory: Tensor) -> Tensor:
    """Reads a contiguous tensor of any type, but for a last part of less than 32 KiB; returns int32 sums of it, [programs], which
    wrap around. On a GPU one launch."""
    numbers = memory.view(-1).view(torch.int32)
    blocks = len(numbers) // BLOCK
    programs = triton.cdiv(blocks, BLOCKS_EACH)
    sums = torch.empty(programs, dtype=torch.int32, device=numbers.device)
    read_kernel[(programs,)](numbers, sums, blocks, BLOCK=BLOCK, EACH=BLOCKS_EACH, num_warps=8)
    return sums
