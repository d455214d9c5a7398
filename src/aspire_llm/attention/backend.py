"""The protocol of attention backends: plan once a step, run once a layer.

A backend knows pages, positions and index lists. It knows no selectors, policies or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from aspire_llm.models.decoder import Attend
from aspire_llm.request import RowKind


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Every row's view of the KV cache in one step. R rows, T tokens, S slots, L layers, B the widest context set.

    A row with `sparse` false reads every position up to each of its tokens (within the layer's sliding window, if any).
    A row with `sparse` true reads `sets[layer, slot]` and every position from `tail_starts[slot]` up to each of its
    tokens, except at refresh layers and at sliding-window layers, where it reads as the others do. A sparse row may have
    more than one token.
    """

    kinds: tuple[RowKind, ...]  # [R], on the host
    num_tokens: tuple[int, ...]  # [R], on the host: tokens of each row, in order
    row_offsets: Tensor  # int32 [R + 1]: where each row's tokens begin
    slots: Tensor  # int32 [R]
    starts: Tensor  # int32 [R]: position of each row's first token
    positions: Tensor  # int64 [T]
    page_table: Tensor  # int32 [S, max pages]: permanent, indexed by slot
    sparse: Tensor  # bool [R]
    sets: Tensor  # int32 [L, S, B]: permanent; distinct positions, all below tail_starts[slot]
    set_lengths: Tensor  # int32 [L, S]: valid entries of each set
    tail_starts: Tensor  # int32 [S]: permanent
    score_weights: (
        Tensor  # float32 [T]: weight of each token's attention probabilities in its row's score; 0: not scored
    )
    scored_rows: tuple[int, ...]  # [≤ R], on the host: rows with any weight
    num_scored_tokens: int  # on the host: tokens with any weight


class AttentionPlan(Protocol):
    """What a backend made of a batch; holds the scores once layers have run."""

    def scores_of(self, layers: tuple[int, ...], rows: Tensor, longest: int) -> Tensor:
        """float32 [len(layers), len(rows), longest]: for each layer and position, the sum over the row's tokens of weight ×
        the mean over query heads of the attention probability. Zero, or nothing that matters, past the row's end.

        rows: int64, on the device: scored rows of the batch. longest: no row has tokens at or past this position. Dense rows
        are scored at the backend's score layers, sparse rows at its refresh layers; other combinations hold anything.
        """
        ...

    def score_store(self, layers: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
        """Where `scores_of` reads, for kernels that read there too: float32 [N, ≥ R, ≥ longest], valid until the next plan, and
        int64 [len(layers)], which of the N each layer is. None: not kept like this."""
        ...

    @property
    def row_reads(self) -> Tensor:
        """int64 [R], on the device: KV tokens that each row read, summed over the layers run so far."""
        ...


@dataclass(frozen=True, slots=True)
class StoredScores:
    """Scores of some rows of a step, as a selector is given them. Called, it copies those of `layers`."""

    plan: AttentionPlan
    rows: Tensor  # int64 [R], on the device: scored rows of the batch
    longest: int  # no row has tokens at or past this position

    def __call__(self, layers: tuple[int, ...]) -> Tensor:
        """float32 [len(layers), R, longest], see `AttentionPlan.scores_of`."""
        return self.plan.scores_of(layers, self.rows, self.longest)


P = TypeVar("P", bound=AttentionPlan)


class Backend(Protocol[P]):
    def plan(self, batch: AttentionBatch) -> P: ...

    def run(self, plan: P, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v at the rows' positions, then attend.

        q: [T, query heads, D]; k, v: [T, KV heads, D], rope applied. Returns [T, query heads, D].
        Query head h reads KV head h // (query heads / KV heads).
        """
        ...

    def attention(self, plan: P) -> Attend:
        """`run` of one step, as a decoder takes it."""
        ...
