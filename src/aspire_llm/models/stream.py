"""Products of few tokens on a GPU: their time is that of reading the weights, so the kernel is a stream of them.

For up to 64 tokens a program multiplies a strip of weight rows with all tokens, weights as the long side of the tensor
cores' tile. Where there are too few strips to fill the card each is cut along K, and the parts are added by what comes next
(`add_norm`) instead of by a launch of their own; gate and up projections end in one program, which writes their activation.
Measured as a prototype on an H200 at Qwen3-8B's shapes with 32 tokens, microseconds, cuBLAS -> here: o 13.9 -> 10.7,
down 29.9 -> 26.3, gate_up 50.1 -> 49.5 (without its activation, whose launch, 2.5, it spares besides).
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire_llm.models.kernels import TritonOps, _times

MOST_TOKENS = 64  # more are cuBLAS's: by then it reaches the same bandwidth
STRIP = 64  # weight rows of a program
DELTA_K, DELTA_STAGES = 128, 5  # of K a step, and steps on their way; one program a multiprocessor
GATED_K = 64  # two programs a multiprocessor


@triton.jit
def _parts_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    parts,  # out float32 [splits, T, N]
    num_tokens,
    n_total,
    k_total,
    k_each,
    TOKENS: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (N / STRIP, splits): a strip of rows, times all tokens, over a share of K."""
    n = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    part = tl.program_id(1)
    t = tl.arange(0, TOKENS)
    k = part * k_each + tl.arange(0, BLOCK_K)
    weight_at = weight + n[:, None].to(tl.int64) * k_total + k[None, :]
    x_at = x + t[None, :] * k_total + k[:, None]
    live = (t < num_tokens)[None, :]
    acc = tl.zeros([STRIP, TOKENS], tl.float32)
    for _ in tl.range(0, k_each, BLOCK_K, num_stages=STAGES):
        acc = tl.dot(tl.load(weight_at), tl.load(x_at, mask=live, other=0.0), acc)
        weight_at += BLOCK_K
        x_at += BLOCK_K
    tl.store(parts + (part * num_tokens + t[None, :]) * n_total + n[:, None], acc, mask=live)


@triton.jit
def _gated_kernel(
    x,  # [T, K]
    weight,  # [2 N, K]: gate, up
    out,  # out [T, N]
    num_tokens,
    n_total,
    k_total,
    TOKENS: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (N / STRIP,): silu(gate) * up, each rounded as if it had been written."""
    n = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    t = tl.arange(0, TOKENS)
    k = tl.arange(0, BLOCK_K)
    gate_at = weight + n[:, None].to(tl.int64) * k_total + k[None, :]
    up_at = gate_at + tl.cast(n_total, tl.int64) * k_total
    x_at = x + t[None, :] * k_total + k[:, None]
    live = (t < num_tokens)[None, :]
    gates = tl.zeros([STRIP, TOKENS], tl.float32)
    ups = tl.zeros([STRIP, TOKENS], tl.float32)
    for _ in tl.range(0, k_total, BLOCK_K, num_stages=STAGES):
        inputs = tl.load(x_at, mask=live, other=0.0)
        gates = tl.dot(tl.load(gate_at), inputs, gates)
        ups = tl.dot(tl.load(up_at), inputs, ups)
        gate_at += BLOCK_K
        up_at += BLOCK_K
        x_at += BLOCK_K
    kind = out.dtype.element_ty
    gate = gates.to(kind).to(tl.float32)
    result = _times((gate / (1.0 + tl.exp(-gate))).to(kind), ups.to(kind))
    tl.store(out + t[None, :] * n_total + n[:, None], result, mask=live)


@triton.jit
def _add_parts_norm_kernel(
    x,  # [T, N], read, and written with the sum
    parts,  # float32 [PARTS, T, N]
    weight,  # [N]
    normed,  # out [T, N]
    num_tokens,
    n,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(x + row * n + i, mask=inside, other=0.0)
    delta = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        delta += tl.load(parts + (part * num_tokens + row) * n + i, mask=inside, other=0.0)
    value = (value.to(tl.float32) + delta.to(value.dtype).to(tl.float32)).to(value.dtype)
    tl.store(x + row * n + i, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / n + eps)
    factor = tl.load(weight + i, mask=inside, other=0.0)
    tl.store(normed + row * n + i, _times((wide * scale).to(value.dtype), factor), mask=inside)


class StreamOps(TritonOps):
    """As `TritonOps`, with its products of few tokens streamed. Other shapes, dtypes and token counts are cuBLAS's."""

    def __init__(self, num_programs: int) -> None:
        """num_programs: that the device runs at once, one on each multiprocessor."""
        self._programs = num_programs

    def delta(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `Ops.delta`: parts of the sum, float32 [splits, T, m], where the product is streamed."""
        tokens, k = x.shape
        rows = weight.shape[0]
        splits = num_splits(rows, k, self._programs)
        if bias is not None or not streamed(x, weight, DELTA_K * splits):
            return self.linear(x, weight, bias)
        parts = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
        _parts_kernel[(rows // STRIP, splits)](
            x, weight, parts, tokens, rows, k, k // splits, TOKENS=padded_tokens(tokens), STRIP=STRIP, BLOCK_K=DELTA_K,
            STAGES=DELTA_STAGES, num_warps=4,
        )  # fmt: skip
        return parts

    def gated(self, x: Tensor, gate_up: Tensor) -> Tensor:
        tokens, k = x.shape
        half = gate_up.shape[0] // 2
        if not streamed(x, gate_up, GATED_K) or half % STRIP:
            return super().gated(x, gate_up)
        out = torch.empty(tokens, half, dtype=x.dtype, device=x.device)
        _gated_kernel[(half // STRIP,)](
            x, gate_up, out, tokens, half, k, TOKENS=padded_tokens(tokens), STRIP=STRIP, BLOCK_K=GATED_K,
            STAGES=5 if tokens <= 32 else 4, num_warps=4,
        )  # fmt: skip
        return out

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if delta is None or delta.dim() == 2:
            return super().add_norm(x, delta, weight, eps)
        tokens, n = x.shape
        normed = torch.empty_like(x)
        block = triton.next_power_of_2(n)
        _add_parts_norm_kernel[(tokens,)](
            x, delta, weight, normed, tokens, n, eps, PARTS=delta.shape[0], BLOCK=block,
            num_warps=min(16, max(4, block // 512)),
        )  # fmt: skip
        return normed, x


def streamed(x: Tensor, weight: Tensor, multiple_of: int) -> bool:
    """Whether the kernels take this product: few tokens, half precision, whole strips and steps."""
    return (
        0 < x.shape[0] <= MOST_TOKENS
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.is_contiguous()
        and weight.shape[0] % STRIP == 0
        and weight.shape[1] % multiple_of == 0
    )


def padded_tokens(tokens: int) -> int:
    """The tile's tokens: few sizes, so that few kernels are compiled."""
    return 16 if tokens <= 16 else 32 if tokens <= 32 else 64


def num_splits(rows: int, k: int, programs: int) -> int:
    """As many parts of K as fill the device with one program each, of those that leave whole steps."""
    strips = max(1, rows // STRIP)
    return max((s for s in (1, 2, 3, 4, 6, 8) if strips * s <= 1.05 * programs and k % (s * DELTA_K) == 0), default=1)
