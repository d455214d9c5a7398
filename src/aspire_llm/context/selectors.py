"""Selectors: what a DRAFT row may read. One protocol, four choices (see `make_selector`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire_llm.context.ranking import choose_into, forced_counts, top_positions, union_into
from aspire_llm.context.state import ContextState
from aspire_llm.errors import UserError
from aspire_llm.request import RowKind

Scores = Callable[[tuple[int, ...]], Tensor]
"""layers -> float32 [len(layers), R, positions]: mean attention probabilities of R requests, as the backend left them.
An engine gives a `StoredScores`, by which `choose_into` can read them without a copy."""


class Selector(Protocol):
    """Renews the context sets of requests from attention scores.

    The runner calls `renew` for requests that were just verified (or whose prompt just ended), and then `refresh` for these and
    for those that just drafted. Positions at or past `lengths` (the exact ones) never enter a set: the tail covers them.
    """

    @property
    def score_layers(self) -> tuple[int, ...]:
        """Layers where dense rows are scored."""
        ...

    @property
    def refresh_layers(self) -> tuple[int, ...]:
        """Layers where DRAFT rows read everything; all rows are scored there."""
        ...

    @property
    def prompt_queries(self) -> int:
        """How many of the prompt's last queries are scored."""
        ...

    def query_weights(self, kind: RowKind, num_tokens: int) -> list[float]:
        """Score weight of each token of a row; all 0 for a row that needs no scores."""
        ...

    def renew(
        self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores, prompt_ended: Sequence[bool]
    ) -> None:
        """slots int64 [R]; lengths int64 [R]: exact positions now; prompt_ended [R], on the host: the prompt just ended."""
        ...

    def refresh(self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores) -> None:
        """As `renew`, of requests that were renewed just now or drafted one token. scores: of refresh layers."""
        ...


def scored_layers(selector: Selector | None) -> tuple[int, ...]:
    """Layers where rows that read everything are scored, in order."""
    return () if selector is None else tuple(sorted({*selector.score_layers, *selector.refresh_layers}))


@dataclass(frozen=True, slots=True)
class SelectorSetting:
    """What an engine tells the maker of a selector."""

    windows: tuple[int | None, ...]  # [layers]: sliding window of each; None: full attention
    num_slots: int  # rows of the ContextState
    budget: int  # most positions of a set
    device: torch.device

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers whose DRAFT rows read a context set; the others read their sliding window."""
        return tuple(layer for layer, window in enumerate(self.windows) if window is None)


SelectorFactory = Callable[[SelectorSetting], Selector]
"""Makes the selector of an engine: `LLM(selector_factory=…)`. A class whose `__init__` takes a SelectorSetting is one."""


class WindowSelector:
    """Sinks and the most recent positions (StreamingLLM; MagicDec's first variant). Needs no scores."""

    score_layers: tuple[int, ...] = ()
    refresh_layers: tuple[int, ...] = ()
    prompt_queries = 0

    def query_weights(self, kind: RowKind, num_tokens: int) -> list[float]:
        return [0.0] * num_tokens

    def renew(
        self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores, prompt_ended: Sequence[bool]
    ) -> None:
        sinks, _ = forced_counts(state.budget)
        places = torch.arange(state.budget, device=slots.device)
        gap = (lengths - state.budget).clamp(min=0)  # positions left out between sinks and window
        sets = places + gap[:, None] * (places >= sinks)
        state.store(slots, sets[None], lengths.clamp(max=state.budget)[None])
        state.tail_starts[slots] = lengths.to(torch.int32)

    def refresh(self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores) -> None:
        pass


class SnapKVSelector:
    """Chosen once, when the prompt ends, from its last 32 queries: probabilities summed over queries, average-pooled over 5
    positions, top-k (SnapKV, https://arxiv.org/abs/2404.14469; MagicDec's second variant). One list for all heads. Tokens
    generated since are all in the tail."""

    refresh_layers: tuple[int, ...] = ()
    prompt_queries = 32
    pooling = 5

    def __init__(self, score_layers: Sequence[int]) -> None:
        self.score_layers = tuple(score_layers)

    def query_weights(self, kind: RowKind, num_tokens: int) -> list[float]:
        observed = min(self.prompt_queries, num_tokens) if kind is RowKind.PREFILL else 0
        return [0.0] * (num_tokens - observed) + [1.0] * observed

    def renew(
        self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores, prompt_ended: Sequence[bool]
    ) -> None:
        if not any(prompt_ended):
            return
        ended = torch.tensor([i for i, did in enumerate(prompt_ended) if did], device=slots.device)
        slots, lengths = slots[ended], lengths[ended]
        sinks, recent = forced_counts(state.budget)
        pooled = F.avg_pool1d(scores(self.score_layers)[:, ended], self.pooling, stride=1, padding=self.pooling // 2)
        sets, counts = top_positions(pooled, lengths.expand(pooled.shape[:2]), state.budget, sinks=sinks, recent=recent)
        store_by_layer(state, slots, self.score_layers, sets, counts)
        state.tail_starts[slots] = lengths.to(torch.int32)

    def refresh(self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores) -> None:
        pass


class VerifiedSelector:
    """Per layer, the top-k of the attention probabilities of the last verification, mean over heads and over its first and
    last query rows (Vegas). When the prompt ends, of its last query."""

    refresh_layers: tuple[int, ...] = ()
    prompt_queries = 1

    def __init__(self, score_layers: Sequence[int], device: torch.device) -> None:
        self.score_layers = tuple(score_layers)
        self._layers = torch.tensor(self.score_layers, device=device)

    def query_weights(self, kind: RowKind, num_tokens: int) -> list[float]:
        weights = [0.0] * num_tokens
        if kind is RowKind.PREFILL or (kind is RowKind.VERIFY and num_tokens == 1):
            weights[-1] = 1.0
        elif kind is RowKind.VERIFY:
            weights[0] = weights[-1] = 0.5
        return weights

    def renew(
        self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores, prompt_ended: Sequence[bool]
    ) -> None:
        sinks, recent = forced_counts(state.budget)
        choose_into(
            state.sets, state.set_lengths, self._layers, scores, self.score_layers, slots, lengths, state.budget,
            sinks=sinks, recent=recent, forced=True, tail_starts=state.tail_starts,
        )  # fmt: skip

    def refresh(self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores) -> None:
        pass


class RefreshedSelector(VerifiedSelector):
    """Part of the budget per layer from the last verification, as `VerifiedSelector`; the rest renewed at every draft step
    by the refresh layers: top-k of the draft token's own attention there, used by every layer (by the nearest refresh layer
    where there are several). A position in both parts counts once.

    A verification re-derives both parts from itself, since it is refreshed too: drafts after a rejected one looked elsewhere.
    """

    def __init__(
        self,
        score_layers: Sequence[int],
        refresh_layers: Sequence[int],
        num_layers: int,
        num_slots: int,
        budget: int,
        verified_share: float,
        device: torch.device,
    ) -> None:
        super().__init__(score_layers, device)
        self.refresh_layers = tuple(refresh_layers)
        self.num_verified = min(budget, max(1, round(budget * verified_share)))
        self.num_refreshed = budget - self.num_verified
        # which refresh layer serves each score layer; the later one on a tie, since it has seen more
        nearest = [
            min(range(len(refresh_layers)), key=lambda i: (abs(refresh_layers[i] - layer), -i))
            for layer in score_layers
        ]
        self._served_by = torch.tensor(nearest, dtype=torch.int32, device=device)
        self._all_layers = self.score_layers == tuple(range(num_layers))
        self._lists = torch.arange(max(len(score_layers), len(refresh_layers)), device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._verified = ints(len(score_layers), num_slots, self.num_verified)
        self._verified_counts = ints(len(score_layers), num_slots)
        self._refreshed = ints(len(refresh_layers), num_slots, self.num_refreshed)
        self._refreshed_counts = ints(len(refresh_layers), num_slots)

    def query_weights(self, kind: RowKind, num_tokens: int) -> list[float]:
        if kind is RowKind.DRAFT:
            return [0.0] * (num_tokens - 1) + [1.0]
        return super().query_weights(kind, num_tokens)

    def renew(
        self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores, prompt_ended: Sequence[bool]
    ) -> None:
        sinks, recent = forced_counts(self.num_verified)
        choose_into(
            self._verified, self._verified_counts, self._lists[: len(self.score_layers)], scores, self.score_layers,
            slots, lengths, self.num_verified, sinks=sinks, recent=recent, forced=True, tail_starts=state.tail_starts,
        )  # fmt: skip

    def refresh(self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores) -> None:
        if self.num_refreshed:
            sinks, recent = forced_counts(self.num_verified)  # already in the verified part
            choose_into(
                self._refreshed, self._refreshed_counts, self._lists[: len(self.refresh_layers)], scores, self.refresh_layers,
                slots, lengths, self.num_refreshed, sinks=sinks, recent=recent, forced=False,
            )  # fmt: skip
        union_into(
            (self._verified, self._verified_counts),
            (self._refreshed, self._refreshed_counts),
            self._served_by,
            slots,
            None if self._all_layers else self._layers,
            state,
        )


def store_by_layer(state: ContextState, slots: Tensor, layers: Sequence[int], sets: Tensor, lengths: Tensor) -> None:
    """sets [len(layers), R, ≤ budget] into the rows of `layers`; the other layers read a sliding window and need none."""
    if len(layers) == state.sets.shape[0]:
        state.store(slots, sets, lengths)
        return
    state.store_layers(torch.tensor(layers, device=slots.device), slots, sets, lengths)


def make_selector(
    name: str,
    *,
    windows: Sequence[int | None],
    refresh_layers: Sequence[int] | None,
    num_slots: int,
    budget: int,
    verified_share: float,
    device: torch.device,
) -> Selector:
    """windows: the model's sliding window by layer. refresh_layers: None for the penultimate full-attention layer."""
    full = [layer for layer, window in enumerate(windows) if window is None]
    if name == "window" or not full:  # with sliding windows everywhere nothing can be sparsified
        return WindowSelector()
    if name == "snapkv":
        return SnapKVSelector(full)
    if name == "verified":
        return VerifiedSelector(full, device)
    if name == "refreshed":
        if refresh_layers is None:
            refresh_layers = [full[max(0, len(full) - 2)]]
        for layer in refresh_layers:
            if layer not in full:
                raise UserError(
                    f"refresh layer {layer} is not a full-attention layer; the model has {len(windows)} layers, numbered from 0",
                    "refresh_layers",
                )
        return RefreshedSelector(
            full, sorted(set(refresh_layers)), len(windows), num_slots, budget, verified_share, device
        )
    raise UserError(f"context {name!r} is unknown; known: window, snapkv, verified, refreshed", "context")
