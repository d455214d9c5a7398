"""Random paged caches and mixed batches, and attention over them in float64, one query token at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_llm.attention.backend import AttentionBatch
from aspire_llm.cache.pool import KVPool
from aspire_llm.request import RowKind


@dataclass
class RowSpec:
    kind: RowKind
    start: int  # position of the first token
    num_tokens: int
    tail_start: int = 0
    set_positions: tuple[int, ...] = ()
    weights: tuple[float, ...] | None = None  # of the row's tokens; None: not scored


@dataclass
class Scene:
    pool: KVPool
    batch: AttentionBatch
    specs: list[RowSpec]
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


def make_scene(
    specs: list[RowSpec],
    *,
    num_heads: int,
    kv_heads: int,
    dim: int,
    page_size: int = 16,
    num_layers: int = 1,
    set_width: int = 64,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Scene:
    """Pages are handed out shuffled; pages and positions that no row owns hold NaN; `padding` tokens follow the last row."""
    gen = torch.Generator().manual_seed(seed)
    num_rows = len(specs)
    ends = [spec.start + spec.num_tokens for spec in specs]
    max_pages = max(-(-end // page_size) for end in ends) + 1
    num_pages = num_rows * max_pages + 1
    order = torch.randperm(num_pages, generator=gen, dtype=torch.int64)
    slots = torch.randperm(num_rows + 2, generator=gen)[:num_rows].tolist()
    table = torch.zeros(num_rows + 2, max_pages, dtype=torch.int32)
    scales = {"key_scales": [key_scale] * num_layers, "value_scales": [value_scale] * num_layers}
    pool = KVPool(num_layers, kv_heads, dim, num_pages, page_size, dtype, torch.device(device), **scales)
    for tensor in (*pool.k, *pool.v):
        tensor.view(torch.uint8).fill_(0x7F) if dtype == torch.float8_e4m3fn else tensor.fill_(float("nan"))
    sets = torch.zeros(num_layers, num_rows + 2, set_width, dtype=torch.int32)
    set_lengths = torch.zeros(num_layers, num_rows + 2, dtype=torch.int32)
    tail_starts = torch.zeros(num_rows + 2, dtype=torch.int32)
    for i, (spec, slot, end) in enumerate(zip(specs, slots, ends, strict=True)):
        table[slot] = order[i * max_pages : (i + 1) * max_pages].int()
        pos = torch.arange(end)
        places = (table[slot, pos // page_size].long() * page_size + pos % page_size).to(device)
        for tensor in (*pool.k, *pool.v):
            drawn = torch.randn(kv_heads, end, dim, generator=gen).to(device).to(dtype)
            if dtype == torch.float8_e4m3fn:  # torch indexes no float8 tensors
                tensor.view(torch.uint8)[:, places] = drawn.view(torch.uint8)
            else:
                tensor[:, places] = drawn
        sets[:, slot, : len(spec.set_positions)] = torch.tensor(spec.set_positions, dtype=torch.int32)
        set_lengths[:, slot] = len(spec.set_positions)
        tail_starts[slot] = spec.tail_start
    num_tokens = [spec.num_tokens for spec in specs]
    total = sum(num_tokens)
    positions = torch.zeros(total + padding, dtype=torch.int64)
    weights = torch.zeros(total + padding)
    offset = 0
    for spec in specs:
        positions[offset : offset + spec.num_tokens] = spec.start + torch.arange(spec.num_tokens)
        if spec.weights is not None:
            weights[offset : offset + spec.num_tokens] = torch.tensor(spec.weights)
        offset += spec.num_tokens
    batch = AttentionBatch(
        kinds=tuple(spec.kind for spec in specs),
        num_tokens=tuple(num_tokens),
        row_offsets=torch.tensor([0, *torch.tensor(num_tokens).cumsum(0).tolist()], dtype=torch.int32, device=device),
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
        starts=torch.tensor([spec.start for spec in specs], dtype=torch.int32, device=device),
        positions=positions.to(device),
        page_table=table.to(device),
        sparse=torch.tensor([spec.kind == RowKind.DRAFT for spec in specs], device=device),
        sets=sets.to(device),
        set_lengths=set_lengths.to(device),
        tail_starts=tail_starts.to(device),
        score_weights=weights.to(device),
        scored_rows=tuple(i for i, spec in enumerate(specs) if spec.weights is not None),
        num_scored_tokens=int(weights.count_nonzero()),
    )

    def draw(heads: int) -> Tensor:
        out = torch.randn(total + padding, heads, dim, generator=gen).to(device)
        return out if dtype == torch.float8_e4m3fn else out.to(dtype)

    return Scene(pool, batch, specs, draw(num_heads), draw(kv_heads), draw(kv_heads), dim**-0.5)


def attend(
    scene: Scene,
    layer: int,
    *,
    window: int | None = None,
    dense: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of every token in float64, K and V of the step being in the cache already: output [T, heads, D], and mean
    probability over heads times weight summed over each row's tokens [R, longest]. dense: sparse rows read everything."""
    batch, pool = scene.batch, scene.pool
    num_heads, kv_heads = scene.q.shape[1], scene.k.shape[1]
    total = sum(batch.num_tokens)
    out = torch.zeros(total, num_heads, scene.q.shape[2], dtype=torch.float64)
    longest = max(spec.start + spec.num_tokens for spec in scene.specs)
    scores = torch.zeros(len(scene.specs), longest, dtype=torch.float64)
    token = 0
    for i, spec in enumerate(scene.specs):
        slot = int(batch.slots[i])
        for j in range(spec.num_tokens):
            position = spec.start + j
            if spec.kind == RowKind.DRAFT and not dense and window is None:
                seen = torch.tensor([*spec.set_positions, *range(spec.tail_start, position + 1)])
            else:
                seen = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
            table = batch.page_table[slot].cpu()
            places = table[seen // pool.page_size].long() * pool.page_size + seen % pool.page_size
            k, v = (
                cache[layer].cpu().float()[:, places].double().repeat_interleave(num_heads // kv_heads, 0)
                * scales[layer]
                for cache, scales in ((pool.k, pool.key_scales), (pool.v, pool.value_scales))
            )
            logits = torch.einsum("hd,hnd->hn", scene.q[token].cpu().double(), k) * scene.scale
            p = logits.softmax(-1)
            out[token] = torch.einsum("hn,hnd->hd", p, v)
            if spec.weights is not None:
                scores[i, seen] += spec.weights[j] * p.mean(0)
            token += 1
    return out, scores
