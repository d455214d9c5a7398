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

from aspire_llm.models.ops import LayerCache, StoringOps

HEADS_AT_ONCE = 8  # of a program that turns them


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
def _normed_and_turned(
    first, second, is_q, token, q_norm, k_norm, cos, sin, eps, NORM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr
):
    """Both halves [heads, HALF] of a token's heads, normed by head and turned by its position. is_q: bool [heads]."""
    i = tl.arange(0, HALF)
    lane = i < D // 2
    kind = first.dtype
    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        low = tl.where(
            is_q[:, None],
            tl.load(q_norm + i, mask=lane, other=0.0)[None, :],
            tl.load(k_norm + i, mask=lane, other=0.0)[None, :],
        )
        high = tl.where(
            is_q[:, None],
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
    return turned.to(kind), turned_too.to(kind)


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
    place = qk + token * token_stride + head[:, None] * D + i[None, :]
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + D // 2, mask=inside, other=0.0)
    turned, turned_too = _normed_and_turned(
        first, second, head < num_q, token, q_norm, k_norm, cos, sin, eps, NORM, D, HALF
    )
    tl.store(place, turned, mask=inside)
    tl.store(place + D // 2, turned_too, mask=inside)


@triton.jit
def as_cached(x, factor, kind: tl.constexpr):
    """Keys or values as a cache of dtype `kind` holds them. factor: 1 / scale of the cache."""
    if kind == tl.float8e4nv:
        # e4m3 has no infinity: 448 is its largest value, and anything beyond would become NaN.
        x = tl.clamp(x.to(tl.float32) * factor, -448.0, 448.0)
    return x.to(kind)


@triton.jit
def _norm_rope_store_kernel(
    qkv,  # [T, heads, D]: queries, turned in place, keys, values
    q_norm,  # [D]
    k_norm,  # [D]
    cos,  # [T, D / 2]
    sin,  # [T, D / 2]
    keys,  # out [KV heads, places, D], strided, D contiguous
    values,
    token_place,  # int64 [T], -1 for padding
    num_q,
    num_kv,
    token_stride,
    key_stride_h,
    key_stride,
    value_stride_h,
    value_stride,
    key_factor,  # 1 / scale of the cache
    value_factor,
    eps,
    NORM: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # power of two, at least D / 2
    HEADS: tl.constexpr,
):
    """Grid (T, blocks of heads). Keys and values go to the cache alone."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    inside = (head[:, None] < num_q + 2 * num_kv) & (i[None, :] < D // 2)
    at = qkv + token * token_stride + head[:, None] * D + i[None, :]
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + D // 2, mask=inside, other=0.0)
    place = tl.load(token_place + token)
    turned, turned_too = _normed_and_turned(
        first, second, head < num_q, token, q_norm, k_norm, cos, sin, eps, NORM, D, HALF
    )
    is_q = inside & (head < num_q)[:, None]
    tl.store(at, turned, mask=is_q)
    tl.store(at + D // 2, turned_too, mask=is_q)
    if place < 0:
        return
    is_key = inside & ((head >= num_q) & (head < num_q + num_kv))[:, None]
    is_value = inside & (head >= num_q + num_kv)[:, None]
    far = (head - num_q).to(tl.int64)[:, None]
    key_at = keys + far * key_stride_h + place * key_stride + i[None, :]
    value_at = values + (far - num_kv) * value_stride_h + place * value_stride + i[None, :]
    key_kind: tl.constexpr = keys.dtype.element_ty
    value_kind: tl.constexpr = values.dtype.element_ty
    tl.store(key_at, as_cached(turned, key_factor, key_kind), mask=is_key)
    tl.store(key_at + D // 2, as_cached(turned_too, key_factor, key_kind), mask=is_key)
    tl.store(value_at, as_cached(first, value_factor, value_kind), mask=is_value)
    tl.store(value_at + D // 2, as_cached(second, value_factor, value_kind), mask=is_value)


@triton.jit
def _silu_mul_kernel(gate_up, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    gate = tl.load(gate_up + row * 2 * n + i, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * n + n + i, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * n + i, _times((wide / (1.0 + tl.exp(-wide))).to(gate.dtype), up), mask=inside)


class TritonOps(StoringOps):
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
        _norm_rope_kernel[(tokens, triton.cdiv(heads, HEADS_AT_ONCE))](
            qk, q_norm if normed else qk, k_norm if normed else qk, cos, sin, num_q, heads, qk.stride(0), eps,
            NORM=normed, D=dim, HALF=triton.next_power_of_2(dim // 2), HEADS=HEADS_AT_ONCE, num_warps=4,
        )  # fmt: skip
        return qk[:, :num_q], qk[:, num_q:]

    def norm_rope_store(
        self,
        qkv: Tensor,
        num_q: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        cache: LayerCache,
    ) -> Tensor:
        tokens, heads, dim = qkv.shape
        normed = q_norm is not None and k_norm is not None
        keys, values = cache.keys, cache.values
        _norm_rope_store_kernel[(tokens, triton.cdiv(heads, HEADS_AT_ONCE))](
            qkv, q_norm if normed else qkv, k_norm if normed else qkv, cos, sin, keys, values, cache.token_place,
            num_q, (heads - num_q) // 2, qkv.stride(0),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), cache.key_factor, cache.value_factor, eps,
            NORM=normed, D=dim, HALF=triton.next_power_of_2(dim // 2), HEADS=HEADS_AT_ONCE, num_warps=4,
        )  # fmt: skip
        return qkv[:, :num_q]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 n] -> silu(first half) × second half, [T, n]."""
        tokens, twice = gate_up.shape
        out = torch.empty(tokens, twice // 2, dtype=gate_up.dtype, device=gate_up.device)
        block = min(1024, triton.next_power_of_2(twice // 2))
        _silu_mul_kernel[(tokens, triton.cdiv(twice // 2, block))](gate_up, out, twice // 2, BLOCK=block, num_warps=4)
        return out
