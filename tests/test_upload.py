"""A step's arrays through one buffer of bytes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from aspire_llm.engine.upload import ALIGNMENT, TYPES, layout, pack, unpack


@given(st.lists(st.tuples(st.sampled_from(sorted(TYPES, key=str)), st.integers(0, 70)), min_size=1, max_size=12))
def test_arrays_come_out_as_they_went_in(shape: list[tuple[np.dtype[np.generic], int]]) -> None:
    arrays = [(np.arange(n) * 7 - i).astype(dtype) for i, (dtype, n) in enumerate(shape)]
    places, size = layout(arrays)
    buffer = torch.full((size + 64,), 255, dtype=torch.uint8)  # kept between steps, and larger than this one
    pack(arrays, places, buffer)
    there = buffer[:size].clone()
    tensors = unpack(arrays, places, there)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.dtype == TYPES[array.dtype]
        assert np.array_equal(tensor.numpy(), array)
        assert (tensor.data_ptr() - there.data_ptr()) % ALIGNMENT == 0 or not len(array)
    assert (buffer[size:] == 255).all()
