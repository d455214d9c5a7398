"""The sampler's Triton kernels against its torch operations, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.request import RowKind
from aspire_llm.sampling.acceptance import emitted
from aspire_llm.sampling.filters import top_probability
from aspire_llm.sampling.kernels import SPLIT, best_tokens, emit

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of -inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 7, 2049, SPLIT + 5])
def test_best_tokens(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator).mul(3).to(dtype)
    logits[0] = 0.5  # all alike: the first is taken
    logits[1, vocab_size // 2 + 1 :] = float("-inf")
    logits[2, :-1] = float("-inf")  # one is left, in the last part
    logits[3, torch.randint(vocab_size, (9,), generator=generator)] = 20.0  # ties of the best, anywhere
    tokens, probability = best_tokens(logits)
    wide = logits.float()
    assert torch.equal(tokens, wide.argmax(1))
    assert torch.equal(tokens, torch.tensor([int((row == row.max()).nonzero()[0]) for row in wide]))
    torch.testing.assert_close(probability, top_probability(wide), rtol=1e-5, atol=1e-7)


def test_best_tokens_of_strided_and_of_no_rows() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    tokens, _ = best_tokens(logits[::2])
    assert torch.equal(tokens, logits[::2].argmax(1))
    assert [len(part) for part in best_tokens(logits[:0])] == [0, 0]


def test_a_row_is_the_same_in_any_batch() -> None:
    logits = torch.randn(9, 2500, generator=torch.Generator().manual_seed(1))
    _, alone = best_tokens(logits[7:8])
    _, together = best_tokens(logits)
    assert torch.equal(alone[0], together[7])


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_emit(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(list(RowKind)), min_size=1, max_size=9))
    counts = torch.tensor([data.draw(st.integers(1, 33)) if kind is RowKind.VERIFY else 1 for kind in kinds])
    total = int(counts.sum())
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    given_ = (
        torch.randint(1, 1000, (total,), generator=generator),
        torch.rand(total, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])),
        torch.randint(1, 1000, (total,), generator=generator),
        torch.rand(total, generator=generator),
        counts.cumsum(0) - counts,
        counts,
        torch.tensor([int(kind) for kind in kinds]),
    )
    for found, expected in zip(emit(*given_, int(counts.max())), emitted(*given_, int(counts.max())), strict=True):
        assert torch.equal(found, expected)
