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
TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


class Uploader:
    """Sends arrays of a step together. On a GPU through pinned buffers that rotate: none is rewritten before its copy is done."""

    def __init__(self, device: torch.device, num_buffers: int = 3) -> None:
        self._device = device
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * num_buffers
        self._copied: list[torch.cuda.Event | None] = [None] * num_buffers  # None: not used yet
        self._turn = 0

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Tensors of the arrays, in order, of their dtypes; one dimension each."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        places, size = layout(arrays)
        buffer = self._next_buffer(size)
        pack(arrays, places, buffer)
        there = buffer[:size].to(self._device, non_blocking=True)
        self._mark_copied()
        return unpack(arrays, places, there)

    def _next_buffer(self, size: int) -> Tensor:
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = torch.empty(max(size, 1 << 16), dtype=torch.uint8, pin_memory=True)
        return self._buffers[self._turn]

    def _mark_copied(self) -> None:
        event = self._copied[self._turn]
        if event is None:
            event = self._copied[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._turn = (self._turn + 1) % len(self._buffers)


def layout(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array begins in a buffer of bytes, and the buffer's size."""
    places, size = [], 0
    for array in arrays:
        places.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return places, max(size, ALIGNMENT)


def pack(arrays: Sequence[Array], places: Sequence[int], buffer: Tensor) -> None:
    """The arrays into a buffer of bytes on the host."""
    view = buffer.numpy()
    for array, place in zip(arrays, places, strict=True):
        view[place : place + array.nbytes].view(array.dtype)[:] = array


def unpack(arrays: Sequence[Array], places: Sequence[int], buffer: Tensor) -> list[Tensor]:
    """Tensors in a copy of that buffer, of the size that `layout` gives. One slice each: this is done every step."""
    typed = {dtype: buffer.view(TYPES[dtype]) for dtype in {array.dtype for array in arrays}}
    return [
        typed[array.dtype][place // array.itemsize : place // array.itemsize + len(array)]
        for array, place in zip(arrays, places, strict=True)
    ]
