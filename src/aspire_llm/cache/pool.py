"""K/V tensors of the whole engine: one paged pool, for committed and provisional positions alike."""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """Per layer one K and one V tensor [KV heads, pages * page_size, D].

    Heads come first: one page of one head is a contiguous [page_size, D] block, and adjacent pages of a request read as
    one [KV heads, length, D] view without a copy.
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
    ) -> None:
        shape = (num_kv_heads, num_pages * page_size, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        # empty, not zeros: memory is taken only as pages are written
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, KV heads, D] at flat places `slots` int64 [T] (page * page_size + offset)."""
        self.k[layer].index_copy_(1, slots, k.transpose(0, 1))
        self.v[layer].index_copy_(1, slots, v.transpose(0, 1))
