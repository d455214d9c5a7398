"""What the host wants of a step arrives as it was, whatever its types and shapes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from aspire_llm.engine.download import Packed


@given(st.integers(0, 9), st.integers(0, 5), st.integers(1, 18), st.integers(0, 2**31))
def test_tensors_come_back_as_they_were(reads: int, rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sent = [
        torch.randint(-(2**62), 2**62, (reads,), generator=generator),
        torch.randint(-(2**62), 2**62, (width, rows), generator=generator).t(),  # not contiguous
        torch.rand(rows, generator=generator),
    ]
    fetched = Packed.of(sent).fetch()
    assert [t.dtype for t in fetched] == [t.dtype for t in sent]
    assert all(torch.equal(there, here) for there, here in zip(fetched, sent, strict=True))


def test_what_was_packed_does_not_change_with_its_tensors() -> None:
    tensor = torch.arange(4)
    packed = Packed.of([tensor])
    tensor.zero_()
    assert packed.fetch()[0].tolist() == [0, 1, 2, 3]
