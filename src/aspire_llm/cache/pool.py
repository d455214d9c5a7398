"""K/V tensors of the whole engine: one paged pool, for committed and provisional positions alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # e4m3 has no infinity: anything larger would become NaN


class KVPool:
    """Per layer one K and one V tensor [KV heads, pages * page_size, D].

    Heads come first: one page of one head is a contiguous [page_size, D] block, and adjacent pages of a request read as
    one [KV heads, length, D] view without a copy.

    A pool may hold smaller numbers than the model computes with. An fp8 (e4m3) one holds k / key_scales[layer] and
    v / value_scales[layer], clamped to ±448 and rounded to the nearest; of any other, the scales are 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        key_scales: Sequence[float] | None = None,
        value_scales: Sequence[float] | None = None,
    ) -> None:
        shape = (num_kv_heads, num_pages * page_size, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.key_scales = tuple(key_scales or [1.0] * num_layers)
        self.value_scales = tuple(value_scales or [1.0] * num_layers)
        if dtype != FP8 and {*self.key_scales, *self.value_scales} != {1.0}:
            raise ValueError(f"a cache of {dtype} has no scales")
        # empty, not zeros: memory is taken only as pages are written
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, KV heads, D] at flat places `slots` int64 [T] (page * page_size + offset)."""
        for cache, given, scale in (
            (self.k[layer], k, self.key_scales[layer]),
            (self.v[layer], v, self.value_scales[layer]),
        ):
            values = given.transpose(0, 1)
            if self.dtype == FP8:
                values = (values.float() * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX)  # as the kernel that stores does
            indexable(cache).index_copy_(1, slots, indexable(values.to(self.dtype)))

    def read(self, layer: int, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Copies of K and V [KV heads, N, D] at flat places int64 [N], as numbers of `dtype`, scales applied."""
        k, v = (
            indexable(cache).index_select(1, places).view(self.dtype).to(dtype)
            for cache in (self.k[layer], self.v[layer])
        )
        if self.dtype == FP8:
            k, v = k * self.key_scales[layer], v * self.value_scales[layer]
        return k, v

    def clear(self, places: Tensor) -> None:
        """Zeros at flat places int64 [N], in all layers."""
        for cache in (*self.k, *self.v):
            indexable(cache)[:, places] = 0


def indexable(tensor: Tensor) -> Tensor:
    """The same memory, of a dtype that torch can index; it has no indexing for float8."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
