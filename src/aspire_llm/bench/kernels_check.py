"""The measured kernels held to plain float32 attention, on fresh random data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aspire_llm.attention.backend import AttentionBatch
from aspire_llm.bench.kernels_batch import BackendName, Rows, make_backend, make_batch
from aspire_llm.bench.kernels_shape import Shape
from aspire_llm.cache.pool import KVPool
from aspire_llm.request import RowKind

D, V, P = RowKind.DRAFT, RowKind.VERIFY, RowKind.PREFILL
# every kind of row, at lengths around the edges of tiles and pages
CHECKED = (
    Rows(V, 2, 3001), Rows(V, 2, 2048, 8), Rows(V, 1, 9000, 17), Rows(V, 1, 4097, 20), Rows(V, 1, 700, 33),
    Rows(V, 1, 1), Rows(V, 2, 5000, 16), Rows(D, 3, 6000, 1, 512), Rows(D, 1, 5000, 1, 2048),
    Rows(D, 1, 3000, 8, 500), Rows(D, 1, 33, 1), Rows(P, 1, 1000, 300), Rows(P, 1, 200, 200),
)  # fmt: skip
SMALL = (
    Rows(V, 1, 61), Rows(V, 1, 48, 5), Rows(V, 1, 1), Rows(D, 2, 60, 1, 12), Rows(D, 1, 33, 1), Rows(P, 1, 40, 9),
)  # fmt: skip


def pages_of(groups: Sequence[Rows], page_size: int) -> int:
    return sum(group.count * -(-group.length // page_size) for group in groups)


def plain_attention(
    shape: Shape, pool: KVPool, batch: AttentionBatch, q: Tensor, layer: int, dense: bool
) -> tuple[Tensor, Tensor]:
    """Float32 attention [T, heads, D], and scores [R, longest]. dense: sparse rows read everything, as refresh layers do."""
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    starts, offsets = batch.starts.tolist(), batch.row_offsets.tolist()
    longest = max(start + n for start, n in zip(starts, batch.num_tokens, strict=True))
    scores = torch.zeros(len(starts), longest, device=q.device)
    group, page = shape.num_heads // shape.num_kv_heads, pool.page_size
    for i, (start, n) in enumerate(zip(starts, batch.num_tokens, strict=True)):
        seen = torch.arange(start + n, device=q.device)
        if batch.kinds[i] is D and not dense:
            chosen = batch.sets[layer, i, : int(batch.set_lengths[layer, i])].long()
            seen = torch.cat([chosen, torch.arange(int(batch.tail_starts[i]), start + n, device=q.device)])
        places = batch.page_table[i, seen // page].long() * page + seen % page
        k, v = (t[:, places].float().repeat_interleave(group, 0) for t in (pool.k[layer], pool.v[layer]))
        tokens = slice(offsets[i], offsets[i + 1])
        logits = q[tokens].float().transpose(0, 1) @ k.transpose(1, 2) * shape.head_dim**-0.5
        logits.masked_fill_(seen[None, None, :] > batch.positions[tokens][None, :, None], -torch.inf)
        p = logits.softmax(-1)  # [heads, n, seen]
        out[tokens] = (p @ v).transpose(0, 1)
        scores[i, seen] = torch.einsum("hnp,n->p", p, batch.score_weights[tokens]) / shape.num_heads
    return out, scores


def relative_error(got: Tensor, want: Tensor) -> float:
    value = float(((got.float() - want).norm() / want.norm()).item())
    return value if value == value else float("inf")


def check(
    backend_name: BackendName, shape: Shape, pool: KVPool, groups: Sequence[Rows] = CHECKED, **options: Any
) -> dict[str, float]:
    """Relative errors of a batch of every kind of row, with random data drawn anew: a sparse layer's output, a refresh
    layer's, and its scores. The pool needs two layers and `pages_of(groups)` pages."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device, page = pool.k[0].device, pool.page_size
    max_len = -(-max(group.length for group in groups) // page) * page
    batch = make_batch(groups, pool, max_len, weighted=True, seed=torch.seed() % 2**31)
    if backend_name == "triton":
        options |= {"max_scored_tokens": batch.positions.shape[0]}
    backend = make_backend(
        backend_name, shape, pool, batch, max_len, refresh_layers=[1], score_layers=[1], **options
    )  # fmt: skip
    tokens = batch.positions.shape[0]
    q = torch.randn(tokens, shape.num_heads, shape.head_dim, device=device, dtype=shape.dtype)
    k, v = (torch.randn(tokens, shape.num_kv_heads, shape.head_dim, device=device, dtype=shape.dtype) for _ in range(2))
    if backend_name == "triton":  # what is not written must not be read
        backend.layer_scores.fill_(float("nan"))
        backend.score_ends.fill_(max_len)
    plan = backend.plan(batch)
    errors = {}
    for layer in (0, 1):
        got = backend.run(plan, layer, q, k, v)
        want, scores = plain_attention(shape, pool, batch, q, layer, dense=layer == 1)
        errors[f"layer {layer}"] = relative_error(got, want)
        if layer == 1:
            errors["scores"] = relative_error(plan.scores[1][:, : scores.shape[1]], scores)
    return errors


def same_bits(shape: Shape, pool: KVPool, length: int = 9000) -> bool:
    """Deterministic Triton kernels: every token of a 17-token verification has the bits it has alone and in a smaller
    batch."""
    device, page = pool.k[0].device, pool.page_size
    max_len = -(-length // page) * page
    batch = make_batch([Rows(V, 3, length, 17)], pool, max_len)
    q = torch.randn(51, shape.num_heads, shape.head_dim, device=device, dtype=shape.dtype)
    backend = make_backend("triton", shape, pool, batch, max_len, deterministic=True)
    whole = torch.empty_like(q)
    backend.attend(backend.plan(batch), 0, q, whole)
    equal = True
    for j in (0, 7, 16):
        position = length - 17 + j
        one = replace(
            batch, kinds=batch.kinds[:1], num_tokens=(1,), slots=batch.slots[:1], sparse=batch.sparse[:1],
            row_offsets=torch.tensor([0, 1], dtype=torch.int32, device=device),
            starts=torch.tensor([position], dtype=torch.int32, device=device),
            positions=torch.tensor([position], device=device),
        )  # fmt: skip
        out = torch.empty_like(q[:1])
        backend.attend(backend.plan(one), 0, q[j : j + 1].contiguous(), out)
        equal = equal and torch.equal(out[0], whole[j])
    return equal
