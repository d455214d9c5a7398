"""The way back from the device: what the host wants of a step in one copy that it does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """Tensors end to end in one buffer of bytes."""

    buffer: Tensor  # uint8
    layout: tuple[tuple[torch.dtype, torch.Size], ...]

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Packed:
        """Give those with the largest items first: then each begins where its type may."""
        buffer = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        return Packed(buffer, tuple((tensor.dtype, tensor.shape) for tensor in tensors))

    def fetch(self) -> list[Tensor]:
        """The tensors on the host; on a GPU their copy is only queued, to a pinned buffer of its own."""
        there = self.buffer
        if there.is_cuda:
            there = torch.empty(there.shape, dtype=there.dtype, pin_memory=True).copy_(there, non_blocking=True)
        found, at = [], 0
        for dtype, shape in self.layout:
            size = shape.numel() * dtype.itemsize
            found.append(there[at : at + size].view(dtype).view(shape))
            at += size
        return found
