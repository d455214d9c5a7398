"""The decoder's element-wise steps as Triton kernels: one launch each, rounding where the torch version rounds.

Every program has a token to itself, so that a token's result has the same bits whatever else is in the step.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _times(a, b):
    """a * b, rounded once: in float32 the product of two half-precision numbers is exact."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def _add_norm_kernel(
    x,  # [T, N], read, and written with the sum
    delta,  # [T, N]
    weight,  # [N]
    normed,  # out [T, N]
    n,
    eps,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(x + row * n + i, mask=inside, other=0.0)
    if HAS_DELTA:
        value = (value.to(tl.float32) + tl.load(delta + row * n + i, mask=inside, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(x + row * n + i, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / n + eps)
    scaled = (wide * scale).to(value.dtype)
    factor = tl.load(weight + i, mask=inside, other=0.0)
    tl.store(normed + row * n + i, _times(scaled, factor), mask=inside)


@triton.jit
def _norm_rope_kernel(
    qk,  # [T, heads, D], in place
    q_norm,  # [D]
    k_norm,  # [D]
    cos,  # [T, D / 2]
    sin,  # [T, D / 2]
    num_q,
    num_heads,
    token_stride,
    eps,
    NORM: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # power of two, at least D / 2
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    inside = (head[:, None] < num_heads) & (i[None, :] < D // 2)
    lane = i < D // 2
    place = qk + token * token_stride + head[:, None] * D + i[None, :]
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + D // 2, mask=inside, other=0.0)
    kind = first.dtype
    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        is_q = (head < num_q)[:, None]
        low = tl.where(
            is_q, tl.load(q_norm + i, mask=lane, other=0.0)[None, :], tl.load(k_norm + i, mask=lane, other=0.0)[None, :]
        )
        high = tl.where(
            is_q,
            tl.load(q_norm + D // 2 + i, mask=lane, other=0.0)[None, :],
            tl.load(k_norm + D // 2 + i, mask=lane, other=0.0)[None, :],
        )
        first, second = _times((a * scale).to(kind), low), _times((b * scale).to(kind), high)
    c = tl.load(cos + token * (D // 2) + i, mask=lane, other=0.0)[None, :].to(tl.float32)
    s = tl.load(sin + token * (D // 2) + i, mask=lane, other=0.0)[None, :].to(tl.float32)
    a, b = first.to(tl.float32), second.to(tl.float32)
    # products are rounded before they are added, as separate operations would
    turned = (a * c).to(kind).to(tl.float32) - (b * s).to(kind).to(tl.float32)
    turned_too = (b * c).to(kind).to(tl.float32) + (a * s).to(kind).to(tl.float32)
    tl.store(place, turned.to(kind), mask=inside)
    tl.store(place + D // 2, turned_too.to(kind), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    gate = tl.load(gate_up + row * 2 * n + i, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * n + n + i, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * n + i, _times((wide / (1.0 + tl.exp(-wide))).to(gate.dtype), up), mask=inside)


class TritonOps:
    """Implements `ops.Ops`. Inputs contiguous, but for qk, which may be part of a wider matrix."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def delta(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear(x, weight, bias)

    def gated(self, x: Tensor, gate_up: Tensor) -> Tensor:
        return self.silu_mul(self.linear(x, gate_up))

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        tokens, n = x.shape
        normed = torch.empty_like(x)
        block = triton.next_power_of_2(n)
        _add_norm_kernel[(tokens,)](
            x, x if delta is None else delta, weight, normed, n, eps,
            HAS_DELTA=delta is not None, BLOCK=block, num_warps=min(16, max(4, block // 512)),
        )  # fmt: skip
        return normed, x

    def norm_rope(
        self, qk: Tensor, num_q: int, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        tokens, heads, dim = qk.shape
        normed = q_norm is not None and k_norm is not None
        at_once = 8
        _norm_rope_kernel[(tokens, triton.cdiv(heads, at_once))](
            qk, q_norm if normed else qk, k_norm if normed else qk, cos, sin, num_q, heads, qk.stride(0), eps,
            NORM=normed, D=dim, HALF=triton.next_power_of_2(dim // 2), HEADS=at_once, num_warps=4,
        )  # fmt: skip
        return qk[:, :num_q], qk[:, num_q:]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 n] -> silu(first half) × second half, [T, n]."""
        tokens, twice = gate_up.shape
        out = torch.empty(tokens, twice // 2, dtype=gate_up.dtype, device=gate_up.device)
        block = min(1024, triton.next_power_of_2(twice // 2))
        _silu_mul_kernel[(tokens, triton.cdiv(twice // 2, block))](gate_up, out, twice // 2, BLOCK=block, num_warps=4)
        return out
