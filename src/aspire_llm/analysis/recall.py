"""How much of the true attention a drafting context would see, from plain decoding alone: no draft is made.

Plain decoding gives every layer's attention probabilities (mean over heads) at every output position. From them follow the
context sets that any choice of refresh layers, budget and split would have used, by the same functions as the engine's
selectors, and the share of the true attention that falls on them: the *recall*. All layers are tried in one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aspire_llm.context.ranking import best_unforced, forced_counts, top_positions
from aspire_llm.context.selectors import Scores
from aspire_llm.context.state import ContextState
from aspire_llm.request import RowKind

Observer = Callable[[int, Tensor], None]
"""(request, attention probabilities float32 [layers, n] of its newest position, which is n - 1, mean over heads)"""


class ScoreRecorder:
    """A `Selector` that chooses nothing: it shows an observer the attention of plain decoding at the given layers."""

    refresh_layers: tuple[int, ...] = ()
    prompt_queries = 1

    def __init__(self, layers: Sequence[int], observer: Observer) -> None:
        self.score_layers = tuple(layers)
        self._observer = observer

    def query_weights(self, kind: RowKind, num_tokens: int) -> list[float]:
        return [0.0] * (num_tokens - 1) + [1.0]

    def renew(
        self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores, prompt_ended: Sequence[bool]
    ) -> None:
        probabilities = scores(self.score_layers)
        for i, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            self._observer(slot, probabilities[:, i, :length])

    def refresh(self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Split:
    """A budget and how much of it comes from the last verification. A share of 1: all of it, nothing is refreshed."""

    budget: int
    verified_share: float

    @property
    def num_verified(self) -> int:  # as RefreshedSelector splits it
        return min(self.budget, max(1, round(self.budget * self.verified_share)))


class RecallTable:
    """An observer that sums up, for every split, refresh layer and layer, the attention that draft rows would have seen.

    Output positions are taken in cycles: one verified position, then `cycle` draft positions. A draft row sees the sinks,
    the recent positions and the verified part of its layer, chosen at the cycle's verification; what the refresh layer
    found at the position before; and everything since the verification.
    """

    def __init__(self, layers: Sequence[int], splits: Sequence[Split], cycle: int) -> None:
        self.layers = tuple(layers)
        self.splits = tuple(splits)
        self._cycle = cycle
        # covered[split][i, j]: attention of layers[j] on the sets that layers[i] refreshes, summed over draft positions
        self._covered = [torch.zeros(len(layers), len(layers), dtype=torch.float64) for _ in splits]
        self._count = 0
        self._cycles: dict[int, _Cycle] = {}  # by request

    def __call__(self, request: int, probabilities: Tensor) -> None:
        cycle = self._cycles.get(request)
        if cycle is None or cycle.steps == self._cycle:
            cycle = _Cycle(probabilities.shape[1], [verified_mask(probabilities, split) for split in self.splits])
            self._cycles[request] = cycle
        else:
            self._count += 1
            cycle.steps += 1
            old = probabilities[:, : cycle.length]
            tail = probabilities[:, cycle.length :].sum(1)
            for covered, split, verified in zip(self._covered, self.splits, cycle.verified, strict=True):
                refreshed = refreshed_mask(cycle.previous, split)
                seen = tail + (old * verified).sum(1)  # [layers]
                more = refreshed.to(old.dtype) @ (old * ~verified).T  # [refresh layers, layers]
                covered += (seen + more).double().cpu()
        cycle.previous = probabilities[:, : cycle.length]

    def covered(self) -> list[list[list[float]]]:
        """[splits][refresh layers][layers], in the order of `layers`: mean share of the layer's attention that is seen."""
        return [(sums / max(1, self._count)).tolist() for sums in self._covered]


@dataclass(slots=True)
class _Cycle:
    length: int  # exact positions when it was verified
    verified: list[Tensor]  # for each split, bool [layers, length]
    steps: int = 0  # draft positions so far
    previous: Tensor = field(default_factory=lambda: torch.empty(0))  # float32 [layers, length], of the position before


def verified_mask(probabilities: Tensor, split: Split) -> Tensor:
    """bool [layers, n]: sinks, recent positions, and each layer's best by probabilities [layers, n]."""
    sinks, recent = forced_counts(split.num_verified)
    lengths = torch.full(probabilities.shape[:1], probabilities.shape[1], device=probabilities.device)
    return _mask(probabilities, *top_positions(probabilities, lengths, split.num_verified, sinks=sinks, recent=recent))


def refreshed_mask(probabilities: Tensor, split: Split) -> Tensor:
    """bool [layers, n]: what each layer would refresh the set with."""
    sinks, recent = forced_counts(split.num_verified)
    lengths = torch.full(probabilities.shape[:1], probabilities.shape[1], device=probabilities.device)
    count = split.budget - split.num_verified
    return _mask(probabilities, *best_unforced(probabilities, lengths, count, sinks=sinks, recent=recent))


def _mask(probabilities: Tensor, positions: Tensor, counts: Tensor) -> Tensor:
    real = torch.arange(positions.shape[1], device=positions.device) < counts[:, None]
    mask = torch.zeros(probabilities.shape, dtype=torch.bool, device=probabilities.device)
    return mask.scatter_(1, positions, real)


def recall_of(covered: Sequence[Sequence[float]], layers: Sequence[int], refresh_layers: Sequence[int]) -> float:
    """Mean over `layers` of the attention that falls on their sets: `covered` (of one split) for the nearest refresh layer,
    the later one on a tie as in RefreshedSelector.

    A refresh layer counts with its set too, although it reads everything: else the layer whose attention is most spread
    (often the first), and which therefore gains most by being one, would look best while it serves the others badly.
    """
    place = {layer: i for i, layer in enumerate(layers)}
    nearest = [min(refresh_layers, key=lambda r: (abs(r - layer), -r)) for layer in layers]
    return sum(covered[place[r]][j] for j, r in enumerate(nearest)) / len(layers)


class ReuseTable:
    """An observer that compares each layer's top-k positions with those of other layers at the same position, and with its
    own at later positions.

    Sinks and recent positions are in every set and left out of the comparison. Recall is the share of the later set (or of
    the other layer's) that the first holds; the two have the same size, so it is symmetric between layers.
    """

    def __init__(self, layers: Sequence[int], k: int, lags: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.lags = tuple(lags)
        self._k = k
        self._across = torch.zeros(len(layers), len(layers), dtype=torch.float64)
        self._num_across = 0
        self._over_time = {lag: torch.zeros(len(layers), dtype=torch.float64) for lag in lags}
        self._num_over_time = dict.fromkeys(lags, 0)
        self._sets: dict[int, list[Tensor]] = {}  # by request: its last sets, bool [layers, n]

    def __call__(self, request: int, probabilities: Tensor) -> None:
        split = Split(self._k, 0.0)
        sinks, recent = forced_counts(self._k)
        lengths = torch.full(probabilities.shape[:1], probabilities.shape[1], device=probabilities.device)
        k = min(split.budget, max(1, probabilities.shape[1] - sinks - recent))
        now = _mask(probabilities, *best_unforced(probabilities, lengths, k, sinks=sinks, recent=recent))
        size = int(now[0].sum())
        shown = now.float()
        self._across += (shown @ shown.T / size).double().cpu()
        self._num_across += 1
        past = self._sets.setdefault(request, [])
        for lag in self.lags:
            if lag <= len(past):
                earlier = past[-lag]
                n = earlier.shape[1]
                # of the set that is wanted now, positions that existed then and were no recent ones
                wanted = now[:, : n - recent]
                held = (wanted & earlier[:, : n - recent]).sum(1) / wanted.sum(1).clamp(min=1)
                self._over_time[lag] += held.double().cpu()
                self._num_over_time[lag] += 1
        past.append(now)
        del past[: -max(self.lags)]

    def across_layers(self) -> list[list[float]]:
        """[layers][layers]."""
        return (self._across / max(1, self._num_across)).tolist()

    def over_time(self) -> dict[int, list[float]]:
        """lag -> [layers]."""
        return {lag: (sums / max(1, self._num_over_time[lag])).tolist() for lag, sums in self._over_time.items()}

    def by_distance(self) -> list[float]:
        """Recall across layers by their distance, from 1 on."""
        across = torch.tensor(self.across_layers())
        return [float(across.diagonal(distance).mean()) for distance in range(1, len(self.layers))]
