"""How the logits of a batch belong to rows and slots: on the host as numpy, on the device in one copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aspire_llm.request import RowKind
from aspire_llm.sampling.batch import SampleBatch

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows of N tokens with logits. A token here is a place in the batch: its logits choose the token one position on."""

    kinds: Ints  # [R]
    slots: Ints  # [R]
    counts: Ints  # [R]: tokens of each row
    offsets: Ints  # [R]: each row's first token
    token_rows: Ints  # [N]
    token_slots: Ints  # [N]

    @classmethod
    def of(cls, batch: SampleBatch) -> Rows:
        counts = np.asarray(batch.num_tokens, dtype=np.int64)
        slots = np.asarray(batch.slots, dtype=np.int64)
        return cls(
            kinds=np.asarray(batch.kinds, dtype=np.int64),
            slots=slots,
            counts=counts,
            offsets=np.cumsum(counts) - counts,
            token_rows=np.repeat(np.arange(len(counts)), counts),
            token_slots=np.repeat(slots, counts),
        )

    @property
    def token_drafts(self) -> Bools:
        """[N]: tokens of DRAFT rows."""
        drafts: Bools = (self.kinds == RowKind.DRAFT)[self.token_rows]
        return drafts

    def select(self, chosen: Bools) -> Rows:
        """The rows where chosen [R], their tokens renumbered from 0."""
        counts = self.counts[chosen]
        slots = self.slots[chosen]
        return Rows(
            kinds=self.kinds[chosen],
            slots=slots,
            counts=counts,
            offsets=np.cumsum(counts) - counts,
            token_rows=np.repeat(np.arange(len(counts)), counts),
            token_slots=np.repeat(slots, counts),
        )


def send(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on the device, copied without the host waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class LastSent:
    """Sends arrays of one kind to the device, but not one that is the same as the last: steps repeat themselves. What is given
    out must not be written."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._array = np.empty(0, dtype=np.int32)
        self._there = torch.empty(0, dtype=torch.int32, device=device)

    def send(self, array: NDArray[np.int32]) -> Tensor:
        """int32 [n]. The array is kept: it must not change either."""
        if not np.array_equal(array, self._array):
            self._array, self._there = array, send(self._device, torch.from_numpy(array))
        return self._there


def upload(device: torch.device, *arrays: Ints) -> tuple[Tensor, ...]:
    """int64 tensors of one-dimensional arrays, in one copy."""
    packed = torch.from_numpy(np.concatenate([np.asarray(array, dtype=np.int64) for array in arrays]))
    return torch.split(send(device, packed), [len(array) for array in arrays])


class SlotTable:
    """A list for each slot, padded to the longest so far: [slots, width, …] on the device, gathered by slot."""

    def __init__(
        self, max_slots: int, device: torch.device, pad: float, dtype: torch.dtype, tail: int | None = None
    ) -> None:
        self._pad = pad
        self._device = device
        shape = (max_slots, 1) if tail is None else (max_slots, 1, tail)
        self.values = torch.full(shape, pad, dtype=dtype, device=device)

    def set(self, slot: int, values: Tensor) -> None:
        """values: [n] or [n, tail]; grows the table where needed."""
        needed = [max(have, need) for have, need in zip(self.values.shape[1:], values.shape, strict=True)]
        if needed != list(self.values.shape[1:]):
            needed[0] = 1 << (needed[0] - 1).bit_length()
            grown = self.values.new_full((self.values.shape[0], *needed), self._pad)
            old = self.values.shape
            if len(old) == 2:
                grown[:, : old[1]] = self.values
            else:  # the tail is aligned to the right
                grown[:, : old[1], needed[1] - old[2] :] = self.values
            self.values = grown
        values = send(self._device, values.to(self.values.dtype))
        self.values[slot] = self._pad
        if values.dim() == 1:
            self.values[slot, : len(values)] = values
        else:
            self.values[slot, : len(values), self.values.shape[2] - values.shape[1] :] = values
