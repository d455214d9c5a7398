"""The way to the device: a step's small arrays in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

ALIGNMENT = 16  # bytes between arrays


class Uploader:
    """Sends arrays of a step together. On a GPU through pinned buffers that rotate: none is rewritten before its copy is done."""

    def __init__(self, device: torch.device, num_buffers: int = 3) -> None:
        self._device = device
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * num_buffers
        self._copied: list[torch.cuda.Event | None] = [None] * num_buffers
        self._turn = 0

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Tensors of the arrays, in order, of their dtypes and shapes."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        places, size = layout(arrays)
        buffer = self._next_buffer(size)
        view = buffer.numpy()
        for array, place in zip(arrays, places, strict=True):
            view[place : place + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        there = buffer[:size].to(self._device, non_blocking=True)
        event = self._copied[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._turn = (self._turn + 1) % len(self._buffers)
        return [
            there[place : place + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for array, place in zip(arrays, places, strict=True)
        ]

    def _next_buffer(self, size: int) -> Tensor:
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = torch.empty(max(size, 1 << 16), dtype=torch.uint8, pin_memory=True)
        return self._buffers[self._turn]


def layout(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array begins in a buffer of bytes, and the buffer's size."""
    places, size = [], 0
    for array in arrays:
        places.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return places, max(size, ALIGNMENT)
