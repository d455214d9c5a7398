"""Where every request's drafting context lives: permanent tensors, indexed by layer and slot."""

from __future__ import annotations

import torch
from torch import Tensor


class ContextState:
    """sets: int32 [layers, slots, budget], distinct positions below the tail; set_lengths: int32 [layers, slots];
    tail_starts: int32 [slots], from where on a DRAFT row reads every position."""

    def __init__(self, num_layers: int, num_slots: int, budget: int, device: torch.device) -> None:
        self.budget = budget
        self.sets = torch.zeros(num_layers, num_slots, budget, dtype=torch.int32, device=device)
        self.set_lengths = torch.zeros(num_layers, num_slots, dtype=torch.int32, device=device)
        self.tail_starts = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def store(self, slots: Tensor, sets: Tensor, lengths: Tensor) -> None:
        """sets [layers or 1, R, ≤ budget], lengths [layers or 1, R] become the sets of `slots` int64 [R]."""
        layers, width = self.sets.shape[0], sets.shape[2]
        self.sets[:, slots, :width] = sets.to(torch.int32).expand(layers, -1, -1)
        self.set_lengths[:, slots] = lengths.to(torch.int32).expand(layers, -1)

    def store_layers(self, layers: Tensor, slots: Tensor, sets: Tensor, lengths: Tensor) -> None:
        """As `store`, into the rows of `layers` int64 [n] alone; sets [n, R, ≤ budget]."""
        self.sets[layers[:, None], slots[None, :], : sets.shape[2]] = sets.to(torch.int32)
        self.set_lengths[layers[:, None], slots[None, :]] = lengths.to(torch.int32)
