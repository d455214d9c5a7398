"""Choosing positions by score. Tensor operations of fixed shape, so that nothing waits for the device.

On a GPU the work is done by kernels (attention/triton/top_k.py), which tests hold to what is written here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aspire_llm.attention.backend import StoredScores
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
        return _top_k(scores, lengths, budget, sinks, recent, forced=True)
    positions = torch.arange(scores.shape[-1], device=scores.device)
    lengths = lengths[..., None]
    forced = (positions < sinks) | (positions >= lengths - recent)
    ranked = scores.masked_fill(forced, torch.inf).masked_fill(positions >= lengths, -1.0)
    best = ranked.topk(min(budget, scores.shape[-1]), dim=-1).indices
    return best, lengths[..., 0].clamp(min=0, max=best.shape[-1])


def best_unforced(scores: Tensor, lengths: Tensor, count: int, *, sinks: int, recent: int) -> tuple[Tensor, Tensor]:
    """As `top_positions`, but sinks and recent positions are left out: somebody else has them already. Fewer than `count` are
    real where too few others are left."""
    if scores.is_cuda:
        return _top_k(scores, lengths, count, sinks, recent, forced=False)
    positions = torch.arange(scores.shape[-1], device=scores.device)
    forced = (positions < sinks) | (positions >= lengths[..., None] - recent)
    ranked = scores.masked_fill(forced, -1.0)
    best = ranked.topk(min(count, scores.shape[-1]), dim=-1).indices
    return best, (lengths - sinks - recent).clamp(min=0, max=best.shape[-1])


def choose_into(
    sets: Tensor,
    set_lengths: Tensor,
    set_layers: Tensor,
    scores: Callable[[tuple[int, ...]], Tensor],
    layers: tuple[int, ...],
    slots: Tensor,
    lengths: Tensor,
    count: int,
    *,
    sinks: int,
    recent: int,
    forced: bool,
    tail_starts: Tensor | None = None,
) -> None:
    """The `count` best positions of each of `layers`, as `top_positions` (if `forced`) or `best_unforced`, put in their place.

    sets: int32 [L', S, ≥ count]; set_lengths: int32 [L', S]; set_layers: int64 [len(layers)], where in them each layer's are.
    slots: int64 [R]; lengths: int64 [R]; scores: as `Selector.renew` has them. tail_starts: int32 [S], becomes `lengths`.
    Where a backend's kernels left the scores, they are read in place, and nothing is copied.
    """
    store = scores.plan.score_store(layers) if isinstance(scores, StoredScores) else None
    if isinstance(scores, StoredScores) and store is not None:
        from aspire_llm.attention.triton.top_k import top_k_stored

        top_k_stored(
            *store, scores.rows, scores.longest, lengths, count, n_sinks=sinks, n_recent=recent, forced=forced,
            out=sets, counts=set_lengths, out_layers=set_layers, slots=slots, tails=tail_starts,
        )  # fmt: skip
        return
    stacked = scores(layers)
    choose = top_positions if forced else best_unforced
    best, counts = choose(stacked, lengths.expand(stacked.shape[:2]), count, sinks=sinks, recent=recent)
    sets[set_layers[:, None], slots[None, :], : best.shape[2]] = best.int()
    set_lengths[set_layers[:, None], slots[None, :]] = counts.int()
    if tail_starts is not None:
        tail_starts[slots] = lengths.to(torch.int32)


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
    if slots.is_cuda:
        from aspire_llm.attention.triton.top_k import merge_sets

        limits, out, out_lengths = state.tail_starts, state.sets, state.set_lengths
        merge_sets(*first, *second, source, slots, limits, layers=layers, out=out, out_lengths=out_lengths)
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


def _top_k(
    scores: Tensor, lengths: Tensor, count: int, sinks: int, recent: int, *, forced: bool
) -> tuple[Tensor, Tensor]:
    from aspire_llm.attention.triton.top_k import top_k

    shape, longest = scores.shape[:-1], scores.shape[-1]
    rows = scores.reshape(-1, longest)
    out = torch.empty(rows.shape[0], count, dtype=torch.int32, device=scores.device)
    counts = torch.empty(rows.shape[0], dtype=torch.int32, device=scores.device)
    flat_lengths = lengths.expand(shape).reshape(-1)
    top_k(rows, flat_lengths, count, n_sinks=sinks, n_recent=recent, forced=forced, out=out, counts=counts)
    return out.view(*shape, count), counts.view(shape)
