"""The distributions that pending drafts were drawn from, kept until they are verified (rejection sampling only)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aspire_llm.sampling.rows import Ints, upload


class Proposals:
    """A ring of `max_draft_tokens` distributions for each slot that drafts with a temperature, indexed by position.

    Pending drafts stand at consecutive positions, at most `max_draft_tokens` of them, so position modulo the ring's size
    is unique, and the host need not know where a verification began.
    """

    def __init__(self, max_slots: int, vocab_size: int, max_draft_tokens: int, device: torch.device) -> None:
        self._device = device
        self.pool = torch.empty(0, max(1, max_draft_tokens), vocab_size, device=device)  # [blocks, ring, vocabulary]
        self._blocks: dict[int, int] = {}  # slot -> block
        self._free: list[int] = []
        self._max_blocks = max_slots

    @property
    def ring(self) -> int:
        return self.pool.shape[1]

    def release(self, slot: int) -> None:
        if slot in self._blocks:
            self._free.append(self._blocks.pop(slot))

    def reserve(self, slots: Ints) -> None:
        """Have a block for each slot."""
        for slot in slots.tolist():
            if slot not in self._blocks:
                self._blocks[slot] = self._new_block()

    def blocks(self, slots: Ints) -> Ints:
        """The block of each slot [n]; of slots that never drafted an arbitrary one."""
        return np.array([self._blocks.get(slot, 0) for slot in slots.tolist()], dtype=np.int64)

    def put(self, slots: Ints, positions: Tensor, q: Tensor) -> None:
        """Keep q float32 [n, vocabulary] for the drafts at positions [n] of slots [n]."""
        self.reserve(slots)
        self.pool[self._block_index(slots), positions % self.ring] = q

    def probability(self, slots: Ints, positions: Tensor, tokens: Tensor) -> Tensor:
        """q(token) [n]."""
        return self.pool[self._block_index(slots), positions % self.ring, tokens]

    def distribution(self, slots: Ints, positions: Tensor) -> Tensor:
        """q [n, vocabulary]. Slots that never drafted get an arbitrary one."""
        return self.pool[self._block_index(slots), positions % self.ring]

    def _block_index(self, slots: Ints) -> Tensor:
        (index,) = upload(self._device, self.blocks(slots))
        return index

    def require(self, slots: Ints) -> None:
        """ValueError where a slot has drafts of unknown origin."""
        if unknown := sorted(set(slots.tolist()) - self._blocks.keys()):
            raise ValueError(f"slots {unknown} have drafts that were neither drawn here nor given a distribution")

    def _new_block(self) -> int:
        if not self._free:
            have = len(self.pool)
            grown = self.pool.new_zeros(min(self._max_blocks, max(4, 2 * have)), *self.pool.shape[1:])
            grown[:have] = self.pool
            self._free = list(range(have, len(grown)))[::-1]
            self.pool = grown
        return self._free.pop()
