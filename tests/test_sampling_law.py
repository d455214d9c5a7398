"""The law of the first three output tokens, jointly, whatever drafts: chi-squared of 100,000 draws on a vocabulary of 8."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from aspire_llm.request import SamplingParams
from aspire_llm.sampling.sampler import Sampler
from sampling_chain import Chain, DraftScript, plain_distribution

V = 8
DRAWS = 100_000
REQUESTS = 10_000  # at once
PROMPT = [3, 1]
STOP = 5

CASES = {
    "temperature": {"temperature": 0.7},
    "hot, top-k": {"temperature": 1.5, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p, top-k, top-p": {"temperature": 1.2, "min_p": 0.05, "top_k": 6, "top_p": 0.9},
    "penalties": {
        "temperature": 0.9,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.8,
        "repetition_penalty": 1.4,
        "top_p": 0.95,
    },
    "edits": {
        "temperature": 1.0,
        "logit_bias": {2: 1.5, 6: -3.0},
        "bad_words_token_ids": [[0, 2], [7]],
        "allowed_token_ids": [0, 2, 3, 4, 5, 7],
        "min_tokens": 2,
        "stop_token_ids": [STOP],
    },
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


def admitted(params: SamplingParams, mode: str) -> Sampler:
    sampler = Sampler(REQUESTS, V, "cpu", mode, max_draft_tokens=4)
    for slot in range(REQUESTS):
        sampler.admit(slot, params, slot, PROMPT)
    return sampler


def draw(sampler: Sampler, drafter: str, one_block: bool = False, script: DraftScript | None = None) -> torch.Tensor:
    """[DRAWS, 3] output tokens."""
    target, draft = tables(drafter)
    lengths = np.arange(REQUESTS) % 5  # no drafts at all, too
    rounds = DRAWS // REQUESTS if one_block else 1
    blocks = DRAWS // REQUESTS // rounds
    outputs, accepted, drafted = [], 0, 0
    for i in range(rounds):
        # Admitting anew would do the same, slowly.
        sampler._seeds.copy_(torch.arange(REQUESTS) * 1_000_003 + i)
        prompts = [PROMPT] * REQUESTS
        chain = Chain(sampler, target, draft, prompts, num_tokens=3 * blocks, draft_lengths=lengths, script=script)
        outputs.append(chain.run().reshape(-1, 3))
        accepted, drafted = accepted + chain.accepted, drafted + chain.drafted
    assert accepted < drafted
    assert accepted > 0 or drafter == "adversarial"
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("mode", "drafter"),
    # In the other modes the drafts cannot change a token (test_sampling_exact.py), so one drafter is enough there.
    [*(("rejection", drafter) for drafter in DRAFTERS), ("greedy", "good"), ("coupled", "random")],
)
@pytest.mark.parametrize("case", CASES)
def test_first_three_tokens_follow_the_target(case: str, mode: str, drafter: str) -> None:
    params = SamplingParams(**CASES[case])
    outputs = draw(admitted(params, mode), drafter, case in ONE_BLOCK)
    assert p_value(outputs, exact(params)) > 1e-4


def test_scripted_drafts_with_their_distribution_keep_the_law() -> None:
    """A fixed draft, given as one-hot, is accepted with probability p(draft) and replaced rightly."""
    params = SamplingParams(**CASES["min-p, top-k, top-p"])
    sampler = admitted(params, "rejection")

    def script(chain: Chain, slots: torch.Tensor, positions: torch.Tensor) -> None:
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            if slot % 50 == 4:
                token = (slot + position) % V
                chain.history[slot, position] = token
                sampler.set_draft_distribution(slot, position, torch.eye(V)[token])

    assert p_value(draw(sampler, "good", script=script), exact(params)) > 1e-4


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_wrong_proposal_fails_the_same_test(drafter: str) -> None:
    """q of another temperature: the test must see it."""
    params = SamplingParams(temperature=0.7)
    sampler = admitted(params, "rejection")
    draft = tables(drafter)[1]

    def script(chain: Chain, slots: torch.Tensor, positions: torch.Tensor) -> None:
        fed = chain.history[slots, positions - 1]
        outputs = positions - torch.from_numpy(chain.prompt_lengths)[slots]
        wrong = torch.softmax(draft[torch.where(outputs % 3 == 0, 0, fed)] / 1.0, dim=1)
        sampler._proposals.put(slots.numpy(), positions, wrong)

    assert p_value(draw(sampler, drafter, script=script), exact(params)) < 1e-4
