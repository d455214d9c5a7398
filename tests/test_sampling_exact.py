"""What does not depend on drafts, batch or slot; acceptance; confidence; log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from aspire_llm.errors import UserError
from aspire_llm.request import RowKind, SamplingParams
from aspire_llm.sampling.batch import SampleBatch
from aspire_llm.sampling.logprobs import token_logprobs
from aspire_llm.sampling.sampler import Sampler
from sampling_chain import Chain

V = 16
N = 64
TOKENS = 24

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.4, top_k=6, min_p=0.02),
    SamplingParams(temperature=0.9, presence_penalty=0.7, logit_bias={3: 2.0}),
    SamplingParams(temperature=1.0, bad_words_token_ids=[[1, 2], [5]], min_tokens=4, stop_token_ids=[0]),
    SamplingParams(temperature=1.0, draft=False),
]


def generate(
    mode: str, drafter: str, lengths: np.ndarray, *, shuffle: int | None = None, only: list[int] | None = None
):
    """Output tokens of the requests, by request, and the chain."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(V, V, generator=generator) * 1.5
    noise = torch.randn(V, V, generator=generator)
    draft = {"same": target, "good": target + 0.5 * noise, "random": 3 * noise, "adversarial": -2 * target}[drafter]
    requests = list(range(N)) if only is None else only
    order = None if shuffle is None else np.random.default_rng(shuffle)
    slots = np.arange(N)[: len(requests)] if order is None else order.permutation(N)[: len(requests)]
    sampler = Sampler(N, V, "cpu", mode, max_draft_tokens=8)
    prompts = [[request % V, request % 5, 1][: 1 + request % 3] for request in requests]
    for slot, request, prompt in zip(slots.tolist(), requests, prompts, strict=True):
        sampler.admit(slot, KINDS[request % len(KINDS)], 77 * request, prompt, [0])

    def script(chain: Chain, some: torch.Tensor, positions: torch.Tensor) -> None:
        if drafter == "adversarial":  # also tokens that the sampler would never draft
            chain.history[some, positions] = (positions * 7 + some) % V

    chain = Chain(
        sampler, target, draft, prompts, num_tokens=TOKENS, draft_lengths=lengths[requests], block=10**9,
        script=script if mode != "rejection" else None, slots=slots, order=order,
    )  # fmt: skip
    return chain.run(), chain


NO_DRAFTS = np.zeros(N, dtype=np.int64)
RAGGED = np.arange(N) % 9


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize("drafter", ["same", "good", "random", "adversarial"])
def test_tokens_are_those_of_plain_decoding(mode: str, drafter: str) -> None:
    plain, alone = generate(mode, drafter, NO_DRAFTS)
    assert alone.drafted == 0
    drafted, chain = generate(mode, drafter, RAGGED, shuffle=1)
    assert torch.equal(plain, drafted)
    assert 0 < chain.accepted <= chain.drafted
    assert (chain.accepted < chain.drafted) == (drafter != "same" or mode == "greedy")
    other_lengths, _ = generate(mode, drafter, np.roll(RAGGED, 3))
    assert torch.equal(plain, other_lengths)


def test_both_modes_are_the_same_plain_decoding() -> None:
    plain = generate("greedy", "good", NO_DRAFTS)[0]
    assert torch.equal(plain, generate("coupled", "good", NO_DRAFTS)[0])
    assert torch.equal(plain, generate("rejection", "good", NO_DRAFTS)[0])
    assert len({tuple(row) for row in plain.tolist()}) > N // 2  # seeds and prompts matter


def test_greedy_requests_are_plain_in_rejection_mode_too() -> None:
    plain, drafted = generate("rejection", "good", NO_DRAFTS)[0], generate("rejection", "good", RAGGED)[0]
    greedy = [request for request in range(N) if KINDS[request % len(KINDS)].greedy]
    assert torch.equal(plain[greedy], drafted[greedy])


@pytest.mark.parametrize("mode", ["rejection", "greedy", "coupled"])
def test_batch_order_and_slots_do_not_matter(mode: str) -> None:
    tokens, chain = generate(mode, "good", RAGGED)
    shuffled, other = generate(mode, "good", RAGGED, shuffle=5)
    assert torch.equal(tokens, shuffled)
    assert chain.accepted == other.accepted
    some = [3, 10, 44, 45, 61]
    assert torch.equal(tokens[some], generate(mode, "good", RAGGED, only=some)[0])
    assert torch.equal(tokens[44:45], generate(mode, "good", RAGGED, only=[44])[0])


@pytest.mark.parametrize("mode", ["rejection", "greedy", "coupled"])
def test_acceptance_rates_are_those_of_theory(mode: str) -> None:
    """One draft a cycle: rejection accepts with 1 - d_TV, greedy with p(draft), coupled with at least (1 - d)/(1 + d)."""
    generator = torch.Generator().manual_seed(0)
    p_logits = torch.randn(V, generator=generator) * 1.5
    q_logits = p_logits + 0.5 * torch.randn(V, generator=generator)
    p, q = torch.softmax(p_logits, 0), torch.softmax(q_logits, 0)
    n = 20_000
    sampler = Sampler(n, V, "cpu", mode)
    for slot in range(n):
        sampler.admit(slot, SamplingParams(), slot, [1])
    target, draft = p_logits.expand(V, V).contiguous(), q_logits.expand(V, V).contiguous()
    chain = Chain(sampler, target, draft, [[1]] * n, num_tokens=3, draft_lengths=np.full(n, 1))
    chain.run()
    rate, distance = chain.accepted / chain.drafted, float((p - q).abs().sum() / 2)
    noise = 4 / (4 * chain.drafted) ** 0.5
    if mode == "rejection":
        assert abs(rate - (1 - distance)) < noise
    elif mode == "greedy":
        assert abs(rate - float(p[q.argmax()])) < noise
    else:
        assert (1 - distance) / (1 + distance) - noise < rate < 1 - distance + noise


@pytest.mark.parametrize("mode", ["rejection", "greedy", "coupled"])
def test_confidence_is_the_top_probability_of_the_draft_distribution(mode: str) -> None:
    sampler = Sampler(3, V, "cpu", mode)
    sampler.admit(0, SamplingParams(temperature=0, logit_bias={2: 1.0}), 0, [1])
    sampler.admit(1, SamplingParams(temperature=0.5, top_k=3), 0, [1])
    sampler.admit(2, SamplingParams(temperature=0.5), 0, [1])
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(1))
    history = torch.ones(3, 4, dtype=torch.int64)
    kinds = (RowKind.DRAFT, RowKind.DRAFT, RowKind.VERIFY)
    out = sampler.run(SampleBatch(kinds, (0, 1, 2), (1, 1, 1), logits, torch.zeros(3, dtype=torch.int64), history))
    biased = logits[0].clone()
    biased[2] += 1
    assert abs(out.confidence[0] - torch.softmax(biased, 0).max()) < 1e-6
    assert out.confidence[2] == 0
    q = torch.softmax(logits[1].topk(3).values / 0.5, 0)
    if mode == "coupled":  # the winner's share once the noise is in
        assert 1 / 3 <= out.confidence[1] <= 1
        assert abs(out.confidence[1] - q[0]) > 1e-3
    else:
        assert abs(out.confidence[1] - q[0]) < 1e-6


def test_confidence_predicts_acceptance_in_coupled_mode() -> None:
    """Of the same pair of distributions, so that their top probability says nothing."""
    n = 4000
    generator = torch.Generator().manual_seed(0)
    p_logits = torch.randn(V, generator=generator)
    q_logits = p_logits + 0.4 * torch.randn(V, generator=generator)
    sampler = Sampler(n, V, "cpu", "coupled")
    for slot in range(n):
        sampler.admit(slot, SamplingParams(), slot, [1])
    history = torch.ones(n, 4, dtype=torch.int64)
    slots, zeros = tuple(range(n)), torch.zeros(n, dtype=torch.int64)
    draft = sampler.run(SampleBatch((RowKind.DRAFT,) * n, slots, (1,) * n, q_logits.expand(n, V), zeros, history))
    history[:, 1] = draft.tokens[:, 0]
    both = torch.arange(2).repeat(n)
    logits = p_logits.expand(2 * n, V)
    verify = sampler.run(SampleBatch((RowKind.VERIFY,) * n, slots, (2,) * n, logits, both, history))
    accepted = verify.num_emitted == 2
    order = draft.confidence.argsort()
    assert accepted[order[: n // 4]].float().mean() < 0.7 < 0.99 < accepted[order[-n // 4 :]].float().mean()


def test_drafts_of_unknown_origin_are_refused_in_rejection_mode() -> None:
    sampler = Sampler(1, V, "cpu", "rejection", max_draft_tokens=2)
    sampler.admit(0, SamplingParams(), 0, [1])
    history = torch.ones(1, 8, dtype=torch.int64)

    def verify(n: int) -> None:
        sampler.run(SampleBatch((RowKind.VERIFY,), (0,), (n,), torch.zeros(n, V), torch.arange(n), history))

    with pytest.raises(ValueError, match="neither drawn here nor given"):
        verify(2)
    sampler.set_draft_distribution(0, 1, torch.eye(V)[1])
    verify(2)
    with pytest.raises(ValueError, match="3 drafts"):
        verify(4)
    with pytest.raises(UserError, match="draft_sampling = 'best'"):
        Sampler(1, V, "cpu", "best")


def test_logprobs_are_of_the_models_own_distribution_for_emitted_tokens_only() -> None:
    params = SamplingParams(temperature=0.3, top_k=2, presence_penalty=1.5, logit_bias={4: 5.0}, logprobs=3)
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(V, V, generator=generator)
    sampler = Sampler(40, V, "cpu", "coupled")
    for slot in range(40):
        sampler.admit(slot, params if slot % 2 else SamplingParams(temperature=0.3), slot, [1])
    assert [sampler.needs_host(slot) for slot in (0, 1)] == [False, True]
    draft = target + torch.randn(V, V, generator=generator)
    chain = Chain(
        sampler, target, draft, [[1]] * 40, num_tokens=10, draft_lengths=np.full(40, 3), block=10**9,
        order=np.random.default_rng(0),
    )  # fmt: skip
    tokens = chain.run()
    assert 0 < chain.accepted < chain.drafted
    assert sorted(chain.logprobs) == list(range(1, 40, 2))
    for request, found in chain.logprobs.items():
        text = chain.history[request, 1 : chain.known[request]].tolist()
        assert [entry.token_id for entry in found] == text  # one for every emitted token
        assert text[:10] == tokens[request].tolist()
        wanted = torch.log_softmax(target.double(), 1)
        for before, entry in zip([0, *text], found, strict=False):
            row = wanted[before]
            assert abs(entry.logprob - float(row[entry.token_id])) < 1e-5
            assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
            assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


def test_prompt_logprobs_helper() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0], [2.0, 0.0, 0.0, 0.0]])
    first, second = token_logprobs(logits, torch.tensor([2, 3]), -1)
    assert (first.rank, second.rank) == (1, 2)
    assert [token for token, _ in first.top] == [1, 2, 0, 3]
    assert abs(sum(np.exp(value) for _, value in second.top) - 1) < 1e-6
    assert token_logprobs(logits, torch.tensor([2, 3]), 0)[0].top == ()
    assert token_logprobs(logits[:0], torch.zeros(0, dtype=torch.int64), 5) == []


@pytest.mark.parametrize("mode", ["rejection", "greedy", "coupled"])
def test_the_host_never_waits_in_the_common_path(mode: str) -> None:
    """On tensors without data every read of a value raises."""
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, top_k=4, top_p=0.9, min_p=0.01),
        SamplingParams(repetition_penalty=1.2, logit_bias={1: 2}, min_tokens=2, bad_words_token_ids=[[1, 2]]),
        SamplingParams(allowed_token_ids=[1, 2, 3]),
    ]
    with FakeTensorMode():
        sampler = Sampler(8, V, "cpu", mode)
        for slot, one in enumerate(params):
            sampler.admit(slot, one, slot, [1], [0])
            assert not sampler.needs_host(slot)
        history = torch.ones(8, 20, dtype=torch.int64)

        def run(kind: RowKind, n: int) -> None:
            positions = torch.arange(4 * n) % n
            sampler.run(SampleBatch((kind,) * 4, (0, 1, 2, 3), (n,) * 4, torch.randn(4 * n, V), positions, history))

        run(RowKind.PREFILL, 1)
        run(RowKind.DRAFT, 1)
        run(RowKind.VERIFY, 3)
        sampler.admit(0, SamplingParams(logprobs=1), 0, [1], [0])
        with pytest.raises(DataDependentOutputException):
            run(RowKind.VERIFY, 1)
