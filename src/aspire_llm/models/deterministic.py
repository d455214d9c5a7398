"""Batch-invariant products: a token's result has the same bits whatever else is in the step.

How an element out[t, n] is summed depends on the weight's shape and dtype alone, never on the number of tokens:
- one tile, of the same instructions, for every step (short steps are padded, long ones take several tiles). Weights are the
  long side of a tile, tokens the short one, so that a padded token costs tensor-core time, which is idle, and no memory;
- columns are added block after block in their order, within `num_splits(n, k)` equal stretches, which are then added in
  their order. Stretches run side by side, as small matrices have too few tiles to keep the memory busy;
- within a block, an element is one chain of the tensor cores' multiply-adds, each over 16 columns. That a chain does not
  depend on where in the tile its row and token stand is a property of the hardware: benchmarks/deterministic.py checks it.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_llm.models.kernels import TritonOps

MAX_TOKENS = 512  # of one launch: bounds the memory of the stretches' sums
PROGRAMS = 128  # aimed at by splitting; close to the multiprocessors of a large GPU, and the same on every one
MIN_BLOCKS = 4  # of columns, in a stretch
MAX_STAGES = 6


# Not specialised: whether the token count is 1 or a multiple of 16 must not choose another kernel.
@triton.jit(do_not_specialize=["num_tokens"])
def product_kernel(
    x,  # [T, k]
    weight,  # [n, k]
    bias,  # [n]
    out,  # out [T, n]
    parts,  # out float32 [SPLITS, T, n]
    num_tokens,
    n,
    k,
    split_columns,  # a multiple of BLOCK_K
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,  # k is a multiple of BLOCK_K
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (token tiles * SPLITS * row tiles,): tiles that share weights are neighbours, so that one read serves them."""
    token_tiles = tl.cdiv(num_tokens, BLOCK_T)
    program = tl.program_id(0)
    split = program // token_tiles % SPLITS
    row = program // token_tiles // SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)
    token = program % token_tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < num_tokens
    low = split * split_columns
    high = tl.minimum(low + split_columns, k)
    column = low + tl.arange(0, BLOCK_K)
    weight_at = weight + tl.minimum(row, n - 1).to(tl.int64)[:, None] * k + column[None, :]
    x_at = x + token.to(tl.int64)[:, None] * k + column[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(low, high, BLOCK_K):
        if EVEN_K:
            w = tl.load(weight_at)
            xs = tl.load(x_at, mask=real[:, None], other=0.0)
        else:
            inside = start + tl.arange(0, BLOCK_K) < k
            w = tl.load(weight_at, mask=inside[None, :], other=0.0)
            xs = tl.load(x_at, mask=real[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(xs), acc, input_precision="ieee")
        weight_at += BLOCK_K
        x_at += BLOCK_K
    kept = (row < n)[:, None] & real[None, :]
    if SPLITS == 1:
        if HAS_BIAS:
            acc += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
        at = token.to(tl.int64)[None, :] * n + row[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=kept)
    else:
        at = (split * num_tokens + token).to(tl.int64)[None, :] * n + row[:, None]
        tl.store(parts + at, acc, mask=kept)


@triton.jit(do_not_specialize=["num_tokens"])
def sum_kernel(
    parts,  # float32 [SPLITS, T, n]
    bias,  # [n]
    out,  # out [T, n]
    num_tokens,
    n,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T, blocks of n)."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    total = tl.load(parts + token * n + row, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + (split * num_tokens + token) * n + row, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * n + row, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tile:
    """rows of the weight, tokens, columns; warps. Chosen by dtype alone."""

    rows: int = 128
    tokens: int = 128
    columns: int = 64
    warps: int = 4

    def bytes(self, dtype: torch.dtype) -> int:
        """Shared memory of one block of columns on its way."""
        return (self.rows + self.tokens) * self.columns * dtype.itemsize


HALF_TILE = Tile()
FLOAT_TILE = Tile(rows=32, tokens=32, columns=32)  # no tensor cores: float32 is multiplied exactly as written


def num_splits(n: int, k: int, tile: Tile) -> int:
    """Stretches of the columns of a weight [n, k]: enough programs to read it at full speed, none shorter than it pays."""
    row_tiles, blocks = triton.cdiv(n, tile.rows), triton.cdiv(k, tile.columns)
    return max(1, min(PROGRAMS // row_tiles, blocks // MIN_BLOCKS))  # type: ignore[no-any-return]


class DeterministicOps(TritonOps):
    """`TritonOps`, whose other kernels take one token a program and so are batch-invariant as they are, with products that
    are so too. device: of all tensors. tile: instead of the dtype's, to measure others."""

    def __init__(self, device: torch.device, tile: Tile | None = None) -> None:
        self._shared_memory = shared_memory(device)
        self._tile = tile

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `Ops.linear`, for dtypes float32, bfloat16 and float16; weight and bias contiguous."""
        x = x.contiguous()
        if x.data_ptr() % 16:  # a kernel for unaligned rows would be another kernel
            x = x.clone()
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        for first in range(0, x.shape[0], MAX_TOKENS):
            last = first + MAX_TOKENS
            self._product(x[first:last], weight, bias, out[first:last])
        return out

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        tokens, (n, k) = x.shape[0], weight.shape
        tile = self._tile or (FLOAT_TILE if x.dtype == torch.float32 else HALF_TILE)
        splits = num_splits(n, k, tile)
        blocks = triton.cdiv(triton.cdiv(k, tile.columns), splits)  # of a stretch
        programs = triton.cdiv(n, tile.rows) * splits
        parts = torch.empty(splits, tokens, n, dtype=torch.float32, device=x.device) if splits > 1 else out
        product_kernel[(triton.cdiv(tokens, tile.tokens) * programs,)](
            x, weight, weight if bias is None else bias, out, parts, tokens, n, k, blocks * tile.columns,
            SPLITS=splits, HAS_BIAS=bias is not None, EVEN_K=k % tile.columns == 0,
            BLOCK_N=tile.rows, BLOCK_T=tile.tokens, BLOCK_K=tile.columns, num_warps=tile.warps,
            num_stages=num_stages(tile, x.dtype, self._shared_memory, 1 if programs <= PROGRAMS else 2),
        )  # fmt: skip
        if splits > 1:
            block = min(512, triton.next_power_of_2(n))
            sum_kernel[(tokens, triton.cdiv(n, block))](
                parts, weight if bias is None else bias, out, tokens, n,
                SPLITS=splits, HAS_BIAS=bias is not None, BLOCK=block, num_warps=4,
            )  # fmt: skip


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; 0 on the CPU, where the interpreter needs none."""
    if device.type == "cpu":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def num_stages(tile: Tile, dtype: torch.dtype, shared_memory: int, programs: int) -> int:
    """Blocks of columns on their way: as many as `programs` on one multiprocessor have memory for. No bit depends on it."""
    return max(2, min(MAX_STAGES, (shared_memory - 4096) // programs // tile.bytes(dtype)))
