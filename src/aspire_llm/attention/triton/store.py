"""K and V of the step's tokens written into the paged cache."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from aspire_llm.models.kernels import as_cached


@triton.jit
def store_kernel(
    k,  # [T, KV heads, D]
    v,
    k_cache,  # out [KV heads, places, D], strided, D contiguous
    v_cache,
    token_place,  # int64 [T], -1 for padding
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    kc_stride_h,
    kc_stride,
    vc_stride_h,
    vc_stride,
    k_factor,  # 1 / scale of the cache
    v_factor,
    KV_HEADS: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(token_place + token)
    if place < 0:
        return
    h = tl.arange(0, H_PAD)[:, None]
    d = tl.arange(0, D_PAD)[None, :]
    mask = (h < KV_HEADS) & (d < D)
    key = tl.load(k + token * k_stride_t + h * k_stride_h + d, mask=mask)
    value = tl.load(v + token * v_stride_t + h * v_stride_h + d, mask=mask)
    key_kind: tl.constexpr = k_cache.dtype.element_ty
    value_kind: tl.constexpr = v_cache.dtype.element_ty
    far = h.to(tl.int64)
    tl.store(k_cache + far * kc_stride_h + place * kc_stride + d, as_cached(key, k_factor, key_kind), mask=mask)
    tl.store(v_cache + far * vc_stride_h + place * vc_stride + d, as_cached(value, v_factor, value_kind), mask=mask)
