"""The law of the first three output tokens, jointly, whatever drafts: chi-squared of 100,000 draws on a vocabulary of 8."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_chain import Chain, plain_distribution
from scipy.stats import chisquare

from aspire_llm.request import SamplingParams
from aspire_llm.sampling.sampler import Sampler

V = 8
DRAWS = 100_000
PROMPT = [3, 1]
STOP = 5

CASES = {
    "temperature": dict(temperature=0.7),
    "hot, top-k": dict(temperature=1.5, top_k=5),
    "top-p": dict(temperature=1.0, top_p=0.8),
    "min-p, top-k, top-p": dict(temperature=1.2, min_p=0.05, top_k=6, top_p=0.9),
    "penalties": dict(temperature=0.9, presence_penalty=0.6, frequency_penalty=0.8, repetition_penalty=1.4, top_p=0.95),
    "edits": dict(
        temperature=1.0,
        logit_bias={2: 1.5, 6: -3.0},
        bad_words_token_ids=[[0, 2], [7]],
        allowed_token_ids=[0, 2, 3, 4, 5, 7],
        min_tokens=2,
        stop_token_ids=[STOP],
    ),
}
ONE_BLOCK = {"penalties", "edits"}  # these look at the whole output, so a request gives one block only
DRAFTERS = ("good", "random", "adversarial")


def tables(drafter: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    target = torch.randn(V, V, generator=generator) * 1.5
    noise = torch.randn(V, V, generator=generator)
    draft = {"good": target + 0.4 * noise, "random": 2 * noise, "adversarial": -1.5 * target}[drafter]
    return target, draft


def exact(params: SamplingParams) -> np.ndarray:
    """Joint distribution [V, V, V]."""
    target = tables("good")[0].double().numpy()
    joint = np.zeros((V, V, V))
    first = plain_distribution(target[0], params, PROMPT, [], [STOP])
    for a in np.flatnonzero(first):
        second = plain_distribution(target[a], params, PROMPT, [a], [STOP])
        for b in np.flatnonzero(second):
            joint[a, b] = first[a] * second[b] * plain_distribution(target[b], params, PROMPT, [a, b], [STOP])
    return joint


def p_value(outputs: torch.Tensor, expected: np.ndarray) -> float:
    """outputs [n, 3]; rare cells are pooled, impossible ones must be empty."""
    cells = (outputs[:, 0] * V * V + outputs[:, 1] * V + outputs[:, 2]).numpy()
    observed = np.bincount(cells, minlength=V**3).astype(np.float64)
    expected = expected.ravel() * len(outputs)
    assert observed[expected == 0].sum() == 0, "an impossible token came"
    rare = (expected > 0) & (expected < 5)
    observed, expected = (np.append(x[expected >= 5], x[rare].sum()) for x in (observed, expected))
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
        expected = expected * observed.sum() / expected.sum()
    return float(chisquare(observed, expected).pvalue)


def admitted(params: SamplingParams, mode: str, requests: int) -> Sampler:
    sampler = Sampler(requests, V, "cpu", mode, max_draft_tokens=4)
    for slot in range(requests):
        sampler.admit(slot, params, 10_007 * slot + 1, PROMPT)
    return sampler


def draw(sampler: Sampler, requests: int, drafter: str, script=None) -> torch.Tensor:
    blocks = DRAWS // requests
    target, draft = tables(drafter)
    lengths = np.arange(requests) % 5  # no drafts at all, too
    chain = Chain(
        sampler, target, draft, [PROMPT] * requests, num_tokens=3 * blocks, draft_lengths=lengths, script=script
    )
    outputs = chain.run()
    assert 0 < chain.accepted < chain.drafted
    return outputs.reshape(-1, 3)


@pytest.mark.parametrize("mode", ["rejection", "greedy", "coupled"])
@pytest.mark.parametrize("case", CASES)
def test_first_three_tokens_follow_the_target(case: str, mode: str) -> None:
    params = SamplingParams(**CASES[case])
    requests = DRAWS if case in ONE_BLOCK else DRAWS // 10
    sampler = admitted(params, mode, requests)
    expected = exact(params)
    found = {drafter: p_value(draw(sampler, requests, drafter), expected) for drafter in DRAFTERS}
    assert min(found.values()) > 1e-4, found


def test_scripted_drafts_with_their_distribution_keep_the_law() -> None:
    """A fixed draft, given as one-hot, is accepted with probability p(draft) and replaced rightly."""
    params = SamplingParams(**CASES["min-p, top-k, top-p"])
    requests = DRAWS // 10
    sampler = admitted(params, "rejection", requests)

    def script(chain: Chain, slots: torch.Tensor, positions: torch.Tensor) -> None:
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            if slot % 10 == 4:
                token = (slot + position) % V
                chain.history[slot, position] = token
                sampler.set_draft_distribution(slot, position, torch.eye(V)[token])

    assert p_value(draw(sampler, requests, "good", script), exact(params)) > 1e-4


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_wrong_proposal_fails_the_same_test(drafter: str) -> None:
    """q of another temperature: the test must see it."""
    params = SamplingParams(temperature=0.7)
    requests = DRAWS // 10
    sampler = admitted(params, "rejection", requests)
    draft = tables(drafter)[1]

    def script(chain: Chain, slots: torch.Tensor, positions: torch.Tensor) -> None:
        fed = chain.history[slots, positions - 1]
        outputs = positions - torch.from_numpy(chain.prompt_lengths)[slots]
        wrong = torch.softmax(draft[torch.where(outputs % 3 == 0, 0, fed)] / 1.0, dim=1)
        sampler._proposals.put(slots.numpy(), positions, wrong)

    assert p_value(draw(sampler, requests, drafter, script), exact(params)) < 1e-4
