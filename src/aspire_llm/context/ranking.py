"""Choosing positions by score. Tensor operations of fixed shape, so that nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_SINKS = 4  # the first positions, which every model attends to (StreamingLLM)
NUM_RECENT = 32  # the newest verified positions


def forced_counts(budget: int) -> tuple[int, int]:
    """Sinks and recent positions that a set of `budget` always holds: never more than half of it."""
    return min(NUM_SINKS, budget // 4), min(NUM_RECENT, budget // 4)


def top_positions(scores: Tensor, lengths: Tensor, budget: int, *, sinks: int, recent: int) -> tuple[Tensor, Tensor]:
    """The `budget` best positions of each row: sinks and recent ones first, then by score.

    scores: float32 [..., P], not negative. lengths: int [...]: only positions below it are taken.
    Returns positions int64 [..., min(budget, P)] and int64 [...], how many of them (from the front) are real.
    """
    positions = torch.arange(scores.shape[-1], device=scores.device)
    lengths = lengths[..., None]
    forced = (positions < sinks) | (positions >= lengths - recent)
    ranked = scores.masked_fill(forced, torch.inf).masked_fill(positions >= lengths, -1.0)
    best = ranked.topk(min(budget, scores.shape[-1]), dim=-1).indices
    return best, lengths[..., 0].clamp(min=0, max=best.shape[-1]).long()


def best_unforced(scores: Tensor, lengths: Tensor, count: int, *, sinks: int, recent: int) -> tuple[Tensor, Tensor]:
    """As `top_positions`, but sinks and recent positions are left out: somebody else has them already."""
    positions = torch.arange(scores.shape[-1], device=scores.device)
    lengths = lengths[..., None]
    forced = (positions < sinks) | (positions >= lengths - recent)
    best = scores.masked_fill(forced, -1.0).topk(min(count, scores.shape[-1]), dim=-1).indices
    return best, (lengths[..., 0] - sinks - recent).clamp(min=0, max=best.shape[-1]).long()


def union(first: Tensor, first_count: Tensor, second: Tensor, second_count: Tensor) -> tuple[Tensor, Tensor]:
    """Two lists of positions [..., A] and [..., B] as one ascending list [..., A + B] without repeats, and its length.

    Only the first `*_count` entries of each list are real; places past the length hold 0.
    """
    both = torch.cat([first, second], dim=-1)
    place = torch.arange(both.shape[-1], device=both.device)
    width_first = first.shape[-1]
    real = torch.where(place < width_first, place < first_count[..., None], place - width_first < second_count[..., None])
    nowhere = torch.iinfo(torch.int32).max
    ordered = both.to(torch.int32).masked_fill(~real, nowhere).sort(dim=-1).values
    repeated = torch.zeros_like(real)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    ordered = ordered.masked_fill(repeated, nowhere).sort(dim=-1).values
    count = (ordered != nowhere).sum(-1)
    return ordered.masked_fill(ordered == nowhere, 0), count
