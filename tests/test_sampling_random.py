"""The keyed random numbers: uniform, independent across seeds, positions, purposes and tokens, and without state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare, kstest

from aspire_llm.sampling.random import Purpose, exponential, keys, uniform

N = 200_000


def numbers(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose = Purpose.ACCEPT) -> np.ndarray:
    return uniform(keys(seeds, positions, purpose)).numpy()


def test_splitmix64_reference_values() -> None:
    """The first outputs of SplitMix64 from state 1234567, as published with the algorithm."""
    from aspire_llm.sampling.random import GAMMA, _mix

    state = torch.tensor([1234567])
    outputs = [int(_mix(state + GAMMA * i)) % 2**64 for i in torch.arange(1, 4)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("along", ["seeds", "positions"])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniform_and_independent_of_neighbours(along: str, purpose: Purpose) -> None:
    line, still = torch.arange(-5, N - 5), torch.full((N,), 42)
    u = numbers(line, still, purpose) if along == "seeds" else numbers(still, line, purpose)
    assert 0 < u.min() < u.max() < 1
    assert chisquare(np.bincount((u * 64).astype(int), minlength=64)).pvalue > 1e-4
    pairs = np.zeros((16, 16))
    np.add.at(pairs, ((u[:-1] * 16).astype(int), (u[1:] * 16).astype(int)), 1)
    assert chi2_contingency(pairs).pvalue > 1e-4


def test_purposes_and_swapped_arguments_are_independent() -> None:
    a, b = torch.arange(N), torch.full((N,), 9)
    columns = [numbers(a, b, purpose) for purpose in Purpose] + [numbers(b, a, Purpose.TARGET)]
    correlation = np.corrcoef(columns)
    assert np.abs(correlation - np.eye(len(columns))).max() < 0.012  # 5 standard deviations


def test_exponentials_over_tokens() -> None:
    e = exponential(keys(torch.arange(400), torch.arange(400) * 3, Purpose.TARGET), 500).numpy()
    assert kstest(e.ravel(), "expon").pvalue > 1e-4
    u = np.exp(-e)
    pairs = np.zeros((16, 16))
    np.add.at(pairs, ((u[:, :-1] * 16).astype(int).ravel(), (u[:, 1:] * 16).astype(int).ravel()), 1)
    assert chi2_contingency(pairs).pvalue > 1e-4


def test_no_state_and_no_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = numbers(torch.arange(10), torch.arange(10))
    assert (first == numbers(torch.arange(10), torch.arange(10))).all()
    assert torch.equal(before, torch.random.get_rng_state())
    one = numbers(torch.tensor([7]), torch.tensor([7]))
    assert one[0] == first[7]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_numbers_on_the_gpu() -> None:
    a, b = torch.arange(1000) - 500, torch.arange(1000) * 977
    host = uniform(keys(a, b, Purpose.DRAFT))
    assert torch.equal(host, uniform(keys(a.cuda(), b.cuda(), Purpose.DRAFT)).cpu())
