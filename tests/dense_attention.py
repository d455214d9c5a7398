"""Dense causal attention for tests: every sequence of a flat batch whole, sliding windows honoured, nothing cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aspire_llm.models.config import DecoderConfig


def dense_attention(config: DecoderConfig, lengths: Sequence[int]) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """An `attend` for a decoder whose tokens are whole sequences of the given lengths, one after the other."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            out[part] = causal_attention(q[part], k[part], v[part], config.attention_scale, config.windows[layer])
            start += length
        assert start == len(q)
        return out

    return attend


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """q: [n, query heads, D], the last n positions of k, v: [m, KV heads, D]. Returns [n, query heads, D]."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    queries, keys = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)
