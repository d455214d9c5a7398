"""Attention in plain torch: the oracle that kernels are tested against, and what runs on the CPU.

Dense rows are attended one by one: a request's pages are usually adjacent in the pool, so its keys are a view and nothing
is copied. Sparse rows are gathered and attended together. Where the cache holds smaller numbers than the model computes
with, what a row reads is converted first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire_llm.attention.backend import AttentionBatch
from aspire_llm.cache.pool import KVPool
from aspire_llm.models.decoder import Attend

# From this many query tokens on, fused attention that never stores the probabilities is faster (measured on a CPU).
FUSED_QUERY_TOKENS = 32
MAX_RUNS = 8  # a row whose pages lie in more runs than this is gathered


Runs = Sequence[tuple[int, int]]  # stretches of the pool: (first place, length)


@dataclass(slots=True)
class DenseRow:
    """One row that reads every position of its request."""

    index: int  # of the row in the batch
    first_token: int
    num_tokens: int
    start: int  # position of the first token
    runs: tuple[
        tuple[int, int], ...
    ]  # where positions 0 .. start + num_tokens - 1 lie in the pool: (first place, length)
    weighted: Tensor | None  # int64 [W]: the row's tokens that carry score weight
    weights: Tensor | None  # float32 [n]: of all of them, 0 for the others


@dataclass(slots=True)
class SparseRows:
    """Rows that read a context set and their tail, padded to a common width. R rows, N tokens, M = set + tail."""

    indices: list[int]  # of the rows in the batch
    tokens: Tensor  # int64 [R, N]: index into the flat batch
    real: Tensor  # bool [R, N]: not padding
    places: Tensor  # int64 [L, R, M]
    visible: Tensor  # bool [L, R, N, M]
    reads: list[list[int]]  # [L][R]: KV tokens read


@dataclass(slots=True)
class ReferencePlan:
    dense: list[DenseRow]  # rows that are dense at every layer
    refreshed: list[DenseRow]  # the sparse rows as they are at refresh and sliding-window layers
    sparse: SparseRows | None
    write_places: Tensor  # int64 [T]
    score_rows: dict[int, int]  # row -> its place in scored_rows
    longest: int  # positions a score tensor has
    device: torch.device
    scores: dict[int, Tensor] = field(default_factory=dict)  # layer -> float32 [scored rows, longest]
    reads: list[int] = field(default_factory=list)  # [R]

    def scores_of(self, layers: tuple[int, ...], rows: Tensor, longest: int) -> Tensor:
        places = torch.tensor([self.score_rows.get(row, 0) for row in rows.tolist()], device=self.device)
        return torch.stack([self.scores[layer][places, :longest] for layer in layers])

    def score_store(self, layers: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
        return None

    @property
    def row_reads(self) -> Tensor:
        return torch.tensor(self.reads, dtype=torch.int64, device=self.device)


class ReferenceBackend:
    """windows: sliding window of each layer or None. refresh_layers: where sparse rows read everything and are scored.
    score_layers: where dense rows are scored. scale: of the logits, 1/sqrt(D) for most models."""

    def __init__(
        self,
        pool: KVPool,
        *,
        num_heads: int,
        scale: float,
        windows: Sequence[int | None],
        refresh_layers: Sequence[int] = (),
        score_layers: Sequence[int] = (),
    ) -> None:
        self.pool = pool
        self.num_heads = num_heads
        self.scale = scale
        self.windows = tuple(windows)
        self.refresh_layers = frozenset(refresh_layers)
        self.score_layers = frozenset(score_layers)
        # (a sliding-window layer is never sparse)
        self.sparse_layers = [i for i, w in enumerate(self.windows) if w is None and i not in self.refresh_layers]

    def plan(self, batch: AttentionBatch) -> ReferencePlan:
        page_size = self.pool.page_size
        slots, starts = batch.slots.tolist(), batch.starts.tolist()
        sparse_flags = batch.sparse.tolist()
        token_slots = torch.repeat_interleave(batch.slots, torch.tensor(batch.num_tokens, device=batch.slots.device))
        write_places = flat_places(batch.page_table, token_slots.long(), batch.positions, page_size)
        dense: list[DenseRow] = []
        refreshed: list[DenseRow] = []
        sparse: list[tuple[int, int]] = []
        offset, longest = 0, 0
        for i, n in enumerate(batch.num_tokens):
            row = self._dense_row(batch, i, offset, n, slots[i], starts[i])
            if sparse_flags[i]:
                refreshed.append(row)
                sparse.append((i, offset))
            else:
                dense.append(row)
            offset += n
            longest = max(longest, starts[i] + n)
        return ReferencePlan(
            dense=dense,
            refreshed=refreshed,
            sparse=self._sparse_rows(batch, sparse) if sparse and self.sparse_layers else None,
            write_places=write_places,
            score_rows={row: i for i, row in enumerate(batch.scored_rows)},
            longest=longest,
            device=batch.slots.device,
            reads=[0] * len(batch.kinds),
        )

    def _dense_row(self, batch: AttentionBatch, i: int, offset: int, n: int, slot: int, start: int) -> DenseRow:
        end, page_size = start + n, self.pool.page_size
        pages = batch.page_table[slot, : -(-end // page_size)].long()
        begins = (pages[1:] - pages[:-1] != 1).nonzero().flatten() + 1  # pages that do not follow the one before
        edges = [0, *begins.tolist(), pages.numel()]
        runs = tuple(
            (int(pages[a]) * page_size, min(b * page_size, end) - a * page_size) for a, b in itertools.pairwise(edges)
        )
        weighted = weights = None
        if i in batch.scored_rows:
            weights = batch.score_weights[offset : offset + n]
            weighted = weights.nonzero().flatten()
        return DenseRow(i, offset, n, start, runs, weighted, weights)

    def _sparse_rows(self, batch: AttentionBatch, rows: list[tuple[int, int]]) -> SparseRows:
        device = batch.slots.device
        index = torch.tensor([i for i, _ in rows], device=device)
        slots = batch.slots[index].long()
        widest = max(batch.num_tokens[i] for i, _ in rows)
        tokens = torch.tensor(
            [[offset + min(j, batch.num_tokens[i] - 1) for j in range(widest)] for i, offset in rows], device=device
        )
        real = torch.tensor([[j < batch.num_tokens[i] for j in range(widest)] for i, _ in rows], device=device)
        positions = batch.positions[tokens]  # [R, N]
        tail_start = batch.tail_starts[slots].long()
        tail_end = positions[:, -1] + 1
        tail = tail_start[:, None] + torch.arange(int((tail_end - tail_start).max()), device=device)  # [R, tail]
        set_lengths = batch.set_lengths[:, slots]  # [L, R]
        sets = batch.sets[:, slots, : int(set_lengths[self.sparse_layers].max())].long()  # [L, R, B]
        in_set = torch.arange(sets.shape[2], device=device) < set_lengths[:, :, None]
        set_places = flat_places(batch.page_table, slots[None, :, None], sets.where(in_set, 0), self.pool.page_size)
        tail_places = flat_places(
            batch.page_table, slots[:, None], tail.minimum(tail_end[:, None] - 1), self.pool.page_size
        )
        layers = sets.shape[0]
        places = torch.cat([set_places, tail_places.expand(layers, -1, -1)], dim=2)
        in_tail = tail[:, None, :] <= positions[:, :, None]  # [R, N, tail]: causal
        visible = torch.cat(
            [in_set[:, :, None, :].expand(-1, -1, widest, -1), in_tail.expand(layers, -1, -1, -1)],
            dim=3,
        )
        reads = (set_lengths + (tail_end - tail_start)).tolist()
        return SparseRows([i for i, _ in rows], tokens, real, places, visible, reads)

    def attention(self, plan: ReferencePlan) -> Attend:
        """As `Backend.attention`."""
        return partial(self.run, plan)

    def run(self, plan: ReferencePlan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write(layer, plan.write_places, k, v)
        out = torch.empty_like(q)
        keys, values = self.pool.k[layer], self.pool.v[layer]
        window = self.windows[layer]
        dense_everywhere = window is not None or layer in self.refresh_layers
        for row in plan.dense:
            self._run_dense(plan, row, layer, layer in self.score_layers, q, keys, values, out)
        if dense_everywhere:
            for row in plan.refreshed:
                self._run_dense(plan, row, layer, layer in self.refresh_layers, q, keys, values, out)
        elif plan.sparse is not None:
            self._run_sparse(plan, plan.sparse, layer, q, out)
        return out

    def _run_dense(
        self,
        plan: ReferencePlan,
        row: DenseRow,
        layer: int,
        score: bool,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None:
        end = row.start + row.num_tokens
        window = self.windows[layer]
        low = 0 if window is None else max(0, row.start - window + 1)
        runs = runs_from(row.runs, low)
        scattered = len(runs) > 1 and (len(runs) > MAX_RUNS or row.num_tokens >= FUSED_QUERY_TOKENS)
        if scattered or self.pool.dtype != q.dtype:
            places = torch.cat([torch.arange(first, first + n, device=q.device) for first, n in runs])
            keys, values = self.pool.read(layer, places, q.dtype)
            runs = [(0, end - low)]
        plan.reads[row.index] += end - low
        span = slice(row.first_token, row.first_token + row.num_tokens)
        queries = q[span].transpose(0, 1)  # [Hq, n, D]
        weighted = row.weighted if score else None
        probabilities, weights = None, row.weights  # of scored tokens, and of others whose weight is 0
        if row.num_tokens >= FUSED_QUERY_TOKENS:
            k, v = (t.narrow(1, *runs[0]) for t in (keys, values))
            out[span] = self._attend_fused(queries, k, v, row.start - low, window).transpose(0, 1)
            if weighted is not None:
                positions = row.start - low + weighted
                probabilities = self._probabilities(queries[:, weighted], keys, runs, positions, window)
                weights = None if weights is None else weights[weighted]
        else:
            positions = row.start - low + torch.arange(row.num_tokens, device=q.device)
            p = self._probabilities(queries, keys, runs, positions, window)
            attended = weighted_sum(p.to(values.dtype).flatten(1, 2), values, runs)
            out[span] = attended.view(self.num_heads, row.num_tokens, -1).transpose(0, 1)
            probabilities = None if weighted is None else p
        if probabilities is not None and weights is not None:
            scores = plan.scores.get(layer)
            if scores is None:
                scores = plan.scores[layer] = torch.zeros(len(plan.score_rows), plan.longest, device=q.device)
            by_head = weights.repeat(self.num_heads) / self.num_heads  # one product instead of a mean over copies
            scores[plan.score_rows[row.index], low:end] = by_head @ probabilities.flatten(0, 2)

    def _probabilities(
        self, queries: Tensor, keys: Tensor, runs: Runs, positions: Tensor, window: int | None
    ) -> Tensor:
        """Softmax probabilities float32 [KV heads, group, n, keys] of queries [Hq, n, D] at `positions`, counted from the first
        of the keys, which lie in `runs` of the pool."""
        n, dim = queries.shape[1:]
        packed = (queries * self.scale).reshape(keys.shape[0], -1, dim)  # [KV heads, group * n, D]
        parts = [torch.bmm(packed, keys.narrow(1, first, size).transpose(1, 2)) for first, size in runs]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        num_keys = whole.shape[2]
        logits = whole.view(keys.shape[0], -1, n, num_keys).float()
        # only the last few columns can be hidden by causality
        first = int(positions.min()) + 1 if n else num_keys
        if first < num_keys:
            hidden = torch.arange(first, num_keys, device=keys.device) > positions[:, None]
            logits[..., first:].masked_fill_(hidden, -torch.inf)
        if window is not None:
            logits.masked_fill_(torch.arange(num_keys, device=keys.device) <= positions[:, None] - window, -torch.inf)
        return torch.softmax(logits, dim=-1)

    def _attend_fused(self, queries: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
        """Attention of queries [Hq, n, D] at positions start.. (relative to k) without storing probabilities. [Hq, n, D]"""
        n, num_keys = queries.shape[1], k.shape[1]
        positions = start + torch.arange(n, device=k.device)[:, None]
        columns = torch.arange(num_keys, device=k.device)
        visible = columns <= positions
        if window is not None:
            visible &= columns > positions - window
        out = F.scaled_dot_product_attention(
            queries[None], k[None], v[None], attn_mask=visible, scale=self.scale, enable_gqa=True
        )
        return out[0]

    def _run_sparse(self, plan: ReferencePlan, rows: SparseRows, layer: int, q: Tensor, out: Tensor) -> None:
        places = rows.places[layer]  # [R, M]
        num_rows, width = places.shape
        keys, values = self.pool.read(layer, places.flatten(), q.dtype)
        kv_heads, _, dim = keys.shape
        k, v = (t.view(kv_heads, num_rows, width, dim) for t in (keys, values))
        queries = (
            (q[rows.tokens] * self.scale)
            .view(num_rows, -1, kv_heads, self.num_heads // kv_heads, dim)
            .permute(2, 0, 3, 1, 4)
        )  # [KV, R, group, N, D]
        group, n = queries.shape[2:4]
        logits = (queries.reshape(kv_heads, num_rows, group * n, dim) @ k.transpose(2, 3)).float()
        logits = logits.view(kv_heads, num_rows, group, n, width)
        logits.masked_fill_(~rows.visible[layer][None, :, None], -torch.inf)
        p = torch.softmax(logits, dim=-1).to(v.dtype).view(kv_heads, num_rows, group * n, width)
        attended = (p @ v).view(kv_heads, num_rows, group, n, dim).permute(1, 3, 0, 2, 4).flatten(2, 3)  # [R, N, Hq, D]
        out[rows.tokens[rows.real]] = attended[rows.real]
        for i, reads in zip(rows.indices, rows.reads[layer], strict=True):
            plan.reads[i] += reads


def runs_from(runs: Runs, low: int) -> list[tuple[int, int]]:
    """The runs of the positions from `low` on."""
    kept = []
    for first, size in runs:
        skipped = min(low, size)
        if skipped < size:
            kept.append((first + skipped, size - skipped))
        low -= skipped
    return kept


def weighted_sum(p: Tensor, values: Tensor, runs: Runs) -> Tensor:
    """p [KV heads, rows, keys] times the values of `runs`: [KV heads, rows, D]."""
    if len(runs) == 1:
        return torch.bmm(p, values.narrow(1, *runs[0]))
    parts = p.split([size for _, size in runs], dim=2)  # type: ignore[no-untyped-call]
    total = torch.bmm(parts[0], values.narrow(1, *runs[0]))
    for part, run in zip(parts[1:], runs[1:], strict=True):
        total += torch.bmm(part, values.narrow(1, *run))
    return total


def flat_places(page_table: Tensor, slots: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Places in the pool of `positions` of the requests in `slots` (broadcast together), int64."""
    pages = page_table[slots, positions // page_size].long()
    return pages * page_size + positions % page_size
