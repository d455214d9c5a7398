"""Batches of rows over a paged cache of random numbers, and the backends that attend over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from aspire_llm.attention.backend import AttentionBatch
from aspire_llm.attention.reference import ReferenceBackend
from aspire_llm.bench.kernels_shape import Shape
from aspire_llm.cache.pool import KVPool
from aspire_llm.errors import UserError
from aspire_llm.request import RowKind

BackendName = Literal["triton", "reference"]
TAIL = 32  # positions of a DRAFT row's tail


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of one kind."""

    kind: RowKind
    count: int
    length: int  # of the request, the row's tokens included
    num_tokens: int = 1
    budget: int = 0  # DRAFT: size of the set; the tail is the last TAIL positions

    def kv_bytes(self, shape: Shape, *, dense: bool = False) -> int:
        """Keys and values, each read once. dense: DRAFT rows read everything, as in refresh layers."""
        sparse = self.kind is RowKind.DRAFT and not dense
        positions = self.budget + TAIL if sparse else self.length
        return self.count * positions * shape.kv_bytes_per_position

    def flops(self, shape: Shape, *, dense: bool = False) -> int:
        """Of both products: logits, and values weighted."""
        if self.kind is RowKind.DRAFT and not dense:
            keys = self.num_tokens * (self.budget + TAIL)
        else:
            keys = self.num_tokens * self.length - self.num_tokens * (self.num_tokens - 1) // 2
        return 4 * self.count * keys * shape.num_heads * shape.head_dim


def make_pool(shape: Shape, num_layers: int, num_pages: int, page_size: int, device: torch.device) -> KVPool:
    pool = KVPool(num_layers, shape.num_kv_heads, shape.head_dim, num_pages, page_size, shape.dtype, device)
    for tensor in (*pool.k, *pool.v):
        tensor.normal_()
    return pool


def make_batch(
    groups: Sequence[Rows], pool: KVPool, max_len: int, *, weighted: bool = False, seed: int = 0
) -> AttentionBatch:
    """A batch over randomly scattered pages; one layer's worth of sets serves every layer. weighted: the first and the last
    token of every row are scored."""
    device, page = pool.k[0].device, pool.page_size
    gen = torch.Generator(device=device).manual_seed(seed)
    rows = [group for group in groups for _ in range(group.count)]
    order = torch.randperm(pool.num_pages, generator=gen, device=device, dtype=torch.int64).int()
    table = torch.zeros(len(rows), -(-max_len // page), dtype=torch.int32, device=device)
    width = max([group.budget for group in groups] + [1])
    sets = torch.zeros(1, len(rows), width, dtype=torch.int32, device=device)
    used = 0
    for i, row in enumerate(rows):
        pages = -(-row.length // page)
        if used + pages > pool.num_pages:
            raise UserError(f"a pool of {pool.num_pages} pages is too small for this batch")
        table[i, :pages] = order[used : used + pages]
        used += pages
        if row.budget:
            chosen = torch.randperm(row.length - TAIL, generator=gen, device=device)[: row.budget]
            sets[0, i, : row.budget] = chosen.sort().values.int()
    num_tokens = [row.num_tokens for row in rows]
    starts = torch.tensor([row.length - row.num_tokens for row in rows], device=device)
    offsets = torch.tensor([0, *torch.tensor(num_tokens).cumsum(0).tolist()], dtype=torch.int32, device=device)
    token_rows = torch.repeat_interleave(
        torch.arange(len(rows), device=device), torch.tensor(num_tokens, device=device)
    )
    positions = starts[token_rows] + torch.arange(len(token_rows), device=device) - offsets[token_rows]
    weights = torch.zeros(len(token_rows), device=device)
    if weighted:
        weights[offsets[:-1].long()] += 0.5
        weights[offsets[1:].long() - 1] += 0.5
    layers = len(pool.k)
    return AttentionBatch(
        kinds=tuple(row.kind for row in rows),
        num_tokens=tuple(num_tokens),
        row_offsets=offsets,
        slots=torch.arange(len(rows), dtype=torch.int32, device=device),
        starts=starts.int(),
        positions=positions,
        page_table=table,
        sparse=torch.tensor([row.kind is RowKind.DRAFT for row in rows], device=device),
        sets=sets.expand(layers, -1, -1),
        set_lengths=torch.tensor([[row.budget for row in rows]] * layers, dtype=torch.int32, device=device),
        tail_starts=torch.tensor([max(0, row.length - TAIL) for row in rows], dtype=torch.int32, device=device),
        score_weights=weights,
        scored_rows=tuple(range(len(rows))) if weighted else (),
        num_scored_tokens=int(weights.count_nonzero()),
    )


def make_backend(
    name: BackendName, shape: Shape, pool: KVPool, batch: AttentionBatch, max_len: int, **options: Any
) -> Any:
    """options: of the backend. Raises UserError."""
    if name not in get_args(BackendName):
        raise UserError(f"--backend {name!r} is unknown; known: {', '.join(get_args(BackendName))}")
    common: dict[str, Any] = {
        "num_heads": shape.num_heads,
        "scale": shape.head_dim**-0.5,
        "windows": [None] * len(pool.k),
        **options,
    }
    if name == "reference":
        return ReferenceBackend(pool, **common)
    from aspire_llm.attention.triton.backend import TritonBackend

    return TritonBackend(
        pool, max_tokens=batch.positions.shape[0], max_rows=batch.slots.shape[0], max_len=max_len, **common
    )
