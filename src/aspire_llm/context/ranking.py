"""Choosing positions by score. Tensor operations of fixed shape, so that nothing waits for the device.

On a GPU the work is done by kernels (attention/triton/top_k.py), which tests hold to what is written here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aspire_llm.context.state import ContextState

NUM_SINKS = 4  # the first positions, which every model attends to (StreamingLLM)
NUM_RECENT = 32  # the newest verified positions


def forced_counts(budget: int) -> tuple[int, int]:
    """Sinks and recent positions that a set of `budget` always holds: never more than half of it."""
    return min(NUM_SINKS, budget // 4), min(NUM_RECENT, budget // 4)


def top_positions(scores: Tensor, lengths: Tensor, budget: int, *, sinks: int, recent: int) -> tuple[Tensor, Tensor]:
    """The `budget` best positions of each row: sinks and recent ones always, the rest by score.

    scores: float32 [..., P], not negative. lengths: int [...]: only positions below it are taken.
    Returns int [..., min(budget, P)] and int [...], how many of them (from the front) are real.
    """
    if scores.is_cuda:
        return _top_k(scores, lengths, budget, sinks, recent)
    positions = torch.arange(scores.shape[-1], device=scores.device)
    lengths = lengths[..., None]
    forced = (positions < sinks) | (positions >= lengths - recent)
    ranked = scores.masked_fill(forced, torch.inf).masked_fill(positions >= lengths, -1.0)
    best = ranked.topk(min(budget, scores.shape[-1]), dim=-1).indices
    return best, lengths[..., 0].clamp(min=0, max=best.shape[-1])


def best_unforced(scores: Tensor, lengths: Tensor, count: int, *, sinks: int, recent: int) -> tuple[Tensor, Tensor]:
    """As `top_positions`, but sinks and recent positions are not sought: somebody else has them already.

    Where too few others are left, some of them may come all the same; `union_into` counts them once.
    """
    positions = torch.arange(scores.shape[-1], device=scores.device)
    forced = (positions < sinks) | (positions >= lengths[..., None] - recent)
    ranked = scores.masked_fill(forced, -1.0)
    if scores.is_cuda:
        return _top_k(ranked, lengths, count, 0, 0)
    best = ranked.topk(min(count, scores.shape[-1]), dim=-1).indices
    return best, (lengths - sinks - recent).clamp(min=0, max=best.shape[-1])


def union_into(
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    source: Tensor,
    slots: Tensor,
    layers: Tensor | None,
    state: ContextState,
) -> None:
    """Context sets of `slots` int64 [R]: for each layer the union of its own list and of the list that serves it.

    first: lists int32 [L, S, A] and their lengths [L, S]; second: [N, S, B] and [N, S]; source: int32 [L], which of the N
    serves a layer. layers: int64 [L], whose sets these are; None: all of the state's, in order. Positions at or past the
    tail, and repeats, are left out.
    """
    if slots.is_cuda and layers is None:
        from aspire_llm.attention.triton.top_k import merge_sets

        merge_sets(
            *first, *second, source, slots.int(), state.tail_starts, out=state.sets, out_lengths=state.set_lengths
        )
        return
    both = torch.cat([first[0][:, slots], second[0][:, slots][source]], dim=-1)  # [L, R, A + B]
    counts = first[1][:, slots], second[1][:, slots][source]
    place = torch.arange(both.shape[-1], device=both.device)
    width = first[0].shape[-1]
    real = torch.where(place < width, place < counts[0][..., None], place - width < counts[1][..., None])
    nowhere = torch.iinfo(torch.int32).max
    ordered = both.masked_fill(~real | (both >= state.tail_starts[slots][:, None]), nowhere).sort(dim=-1).values
    repeated = torch.zeros_like(real)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    ordered = ordered.masked_fill(repeated, nowhere).sort(dim=-1).values
    lengths = (ordered != nowhere).sum(-1)
    ordered = ordered.masked_fill(ordered == nowhere, 0)
    if layers is None:
        state.store(slots, ordered, lengths)
    else:
        state.store_layers(layers, slots, ordered, lengths)


def _top_k(scores: Tensor, lengths: Tensor, count: int, sinks: int, recent: int) -> tuple[Tensor, Tensor]:
    from aspire_llm.attention.triton.top_k import top_k

    shape, longest = scores.shape[:-1], scores.shape[-1]
    rows = scores.reshape(-1, longest)
    out = torch.empty(rows.shape[0], count, dtype=torch.int32, device=scores.device)
    counts = torch.empty(rows.shape[0], dtype=torch.int32, device=scores.device)
    flat_lengths = lengths.expand(shape).reshape(-1).int().clamp(max=longest)
    top_k(rows, flat_lengths, count, n_sinks=sinks, n_recent=recent, out=out, counts=counts)
    return out.view(*shape, count), counts.view(shape)
