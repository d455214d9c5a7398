"""Reading memory and nothing else: how fast a device can, as the ceiling that other kernels are held against."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers that a program has on their way at once
PROGRAMS_EACH = 8  # of a multiprocessor


@triton.jit(do_not_specialize=["num_blocks"])
def read_kernel(
    numbers,  # int32 [num_blocks * BLOCK]
    sums,  # out int32 [programs]
    num_blocks,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Grid (PROGRAMS,): each reads every so many-th block. Sums wrap around; they keep the reads from being left out."""
    total = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(tl.program_id(0), num_blocks, PROGRAMS, num_stages=4):
        total += tl.load(numbers + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read(memory: Tensor) -> Tensor:
    """Reads a contiguous tensor of any type, but for a last part of less than 16 KiB; returns int32 sums of it, [programs], which
    wrap around. On a GPU one launch."""
    numbers = memory.view(-1).view(torch.int32)
    device = numbers.device
    programs = PROGRAMS_EACH * (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    )
    sums = torch.empty(programs, dtype=torch.int32, device=device)
    read_kernel[(programs,)](numbers, sums, len(numbers) // BLOCK, BLOCK=BLOCK, PROGRAMS=programs, num_warps=4)
    return sums
