"""The kernel that measures how fast a device reads: it does read everything."""

from __future__ import annotations

import pytest
import torch

from aspire_llm.attention.triton.read import SPAN, read

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("spans", [1, 2, 7, 20])
def test_every_number_is_read_once(spans: int) -> None:
    numbers = torch.randint(-(2**20), 2**20, (spans * SPAN,), dtype=torch.int32, device=DEVICE)
    assert int(read(numbers).sum(dtype=torch.int64)) == int(numbers.sum(dtype=torch.int64))


def test_any_type_in_any_shape() -> None:
    keys = torch.randn(2, SPAN, 4, device=DEVICE).to(torch.bfloat16)
    found, expected = read(keys).sum(dtype=torch.int64), keys.view(-1).view(torch.int32).sum(dtype=torch.int64)
    assert int(found - expected) % 2**32 == 0  # sums wrap around


def test_a_last_part_of_less_than_a_span_is_left_out() -> None:
    numbers = torch.ones(2 * SPAN + 100, dtype=torch.int32, device=DEVICE)
    assert int(read(numbers).sum()) == 2 * SPAN
