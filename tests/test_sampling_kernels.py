"""The sampler's kernels against its torch operations: under the interpreter, or on a GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from aspire_llm.request import RowKind, SamplingParams
from aspire_llm.sampling.batch import SampleBatch, SampleOutput
from aspire_llm.sampling.filters import top_probability
from aspire_llm.sampling.random import Purpose, exponential, keys, uniform
from aspire_llm.sampling.rows import LastSent
from aspire_llm.sampling.sampler import Sampler
from tiny import always_draft_to, prompts_of, requests_for, run, tiny_engine, tiny_model

pytest.importorskip("triton")

import triton
import triton.language as tl

from aspire_llm.sampling import kernels

pytestmark = pytest.mark.kernel
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MODES = ("rejection", "greedy", "coupled")
SLOTS, DRAFTS, LONGEST = 8, 6, 40

PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, top_p=0.5),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.3, top_k=3),
    SamplingParams(temperature=0.9, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=0.8, logit_bias={0: 2.0}, frequency_penalty=0.5),
    SamplingParams(temperature=0, presence_penalty=0.5),
)


def pair(
    mode: str, params: list[SamplingParams], vocab_size: int, drafts: int = DRAFTS, slots: int = SLOTS
) -> tuple[Sampler, Sampler]:
    """One that runs on kernels, one that does not."""
    samplers = []
    for on_kernels in (True, False):
        sampler = Sampler(slots, vocab_size, DEVICE, mode, max_draft_tokens=drafts)
        sampler.on_kernels = on_kernels
        for slot, one in enumerate(params):
            sampler.admit(slot, one, 1000 * slot - 3, [0])
        samplers.append(sampler)
    return samplers[0], samplers[1]


def same(ours: SampleOutput, theirs: SampleOutput) -> None:
    for field in ("tokens", "num_emitted", "confidence"):
        assert getattr(ours, field).dtype == getattr(theirs, field).dtype
    assert torch.equal(ours.num_emitted, theirs.num_emitted)
    assert torch.equal(ours.tokens, theirs.tokens)
    torch.testing.assert_close(ours.confidence, theirs.confidence, rtol=1e-5, atol=1e-6)


def batch_of(
    kinds: list[RowKind],
    slots: list[int],
    counts: list[int],
    firsts: list[int],
    logits: torch.Tensor,
    history: torch.Tensor,
) -> SampleBatch:
    positions = torch.cat([torch.arange(first, first + n) for first, n in zip(firsts, counts, strict=True)])
    return SampleBatch(tuple(kinds), tuple(slots), tuple(counts), logits, positions.to(DEVICE), history)


def draw(samplers: tuple[Sampler, Sampler], *batch: object) -> SampleOutput:
    """The kernels' output, after the torch operations gave the same from logits in float32."""
    found = samplers[0].run(batch_of(*batch))
    *others, logits, history = batch
    same(found, samplers[1].run(batch_of(*others, logits.float(), history)))
    return found


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(MODES),
    st.lists(st.sampled_from(PARAMS), min_size=SLOTS, max_size=SLOTS),
    st.sampled_from((1, 2, 7, 64, 100, 130)),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
)
def test_steps_of_random_batches(
    mode: str, params: list[SamplingParams], vocab_size: int, dtype: torch.dtype, seed: int
) -> None:
    """Draft steps and verifications of ragged batches, tied and impossible logits among them: the same tokens."""
    samplers = pair(mode, params, vocab_size)
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    # few values, so that many are tied; the drafter's are often the target's
    target = (torch.randint(-8, 9, (SLOTS, LONGEST, vocab_size), generator=generator) / 2).to(dtype)
    target[torch.rand(target.shape, generator=generator) < 0.2] = -torch.inf
    target[..., random.integers(vocab_size)] = 1.0
    draft = torch.where(torch.rand(target.shape, generator=generator) < 0.7, target, target.flip(0))
    history = torch.zeros(SLOTS, LONGEST, dtype=torch.int64)
    known, pending = np.ones(SLOTS, dtype=int), np.zeros(SLOTS, dtype=int)
    for step in range(5):
        slots = random.permutation(SLOTS)[: random.integers(1, SLOTS + 1)].tolist()
        kinds, counts, firsts, rows = [], [], [], []
        for slot in slots:
            drafts = step > 0 and pending[slot] < DRAFTS and random.random() < 0.6
            kind = RowKind.DRAFT if drafts else RowKind.VERIFY if step else RowKind.PREFILL
            count = 1 + int(pending[slot]) if kind is RowKind.VERIFY else 1
            first = int(known[slot] - 1 + (pending[slot] if drafts else 0))
            kinds.append(kind)
            counts.append(count)
            firsts.append(first)
            rows.append((draft if drafts else target)[slot, first : first + count])
        found = draw(samplers, kinds, slots, counts, firsts, torch.cat(rows).to(DEVICE), history.to(DEVICE))
        for row, slot in enumerate(slots):
            n, at = int(found.num_emitted[row]), firsts[row] + 1
            history[slot, at : at + n] = found.tokens[row, :n].cpu()
            drafted = kinds[row] is RowKind.DRAFT
            known[slot] += 0 if drafted else n
            pending[slot] = pending[slot] + 1 if drafted else 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vocab_size", [kernels.SPLIT, kernels.SPLIT + 1, 2 * kernels.SPLIT + 77])
def test_vocabularies_of_several_parts(vocab_size: int, mode: str) -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.9),
    ]
    samplers = pair(mode, params, vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(3, 3, vocab_size, generator=generator) * 3).to(DTYPES[-1]).to(DEVICE)
    logits[0, :, vocab_size // 2 :: 50] = 15.0  # the best of a greedy row, many times over
    history = torch.zeros(SLOTS, LONGEST, dtype=torch.int64, device=DEVICE)
    for drafts in range(2):
        found = draw(samplers, [RowKind.DRAFT] * 3, [0, 1, 2], [1] * 3, [drafts] * 3, logits[:, drafts], history)
        history[:3, drafts + 1] = found.tokens[:, 0]
        assert int(found.tokens[0]) == vocab_size // 2
    accepted = draw(samplers, [RowKind.VERIFY] * 3, [0, 1, 2], [3] * 3, [0] * 3, logits.flatten(0, 1), history)
    if mode != "greedy":  # the target's logits were the drafter's
        assert accepted.num_emitted.tolist() == [3, 3, 3]
    other = logits.flip(2).flatten(0, 1)
    rejected = draw(samplers, [RowKind.VERIFY] * 3, [0, 1, 2], [3] * 3, [0] * 3, other, history)
    assert rejected.num_emitted.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 2049, kernels.SPLIT + 5])
def test_likeliest_tokens(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(10, vocab_size, generator=generator).mul(3).to(dtype).to(DEVICE)[::2]  # rows of a wider matrix
    logits[0] = 0.5  # all alike
    logits[1, vocab_size // 2 + 1 :] = -torch.inf
    logits[2, :-1] = -torch.inf  # one is left, in the last part
    logits[3, torch.randint(vocab_size, (9,), generator=generator)] = 20.0  # ties of the best, anywhere
    samplers = pair("coupled", [SamplingParams(temperature=0)] * 5, vocab_size)
    history = torch.zeros(SLOTS, LONGEST, dtype=torch.int64, device=DEVICE)
    found = draw(samplers, [RowKind.DRAFT] * 5, [4, 3, 2, 1, 0], [1] * 5, [0] * 5, logits, history)
    wide = logits.float()
    assert found.tokens[:, 0].tolist() == [int((row == row.max()).nonzero()[0]) for row in wide]
    torch.testing.assert_close(found.confidence, top_probability(wide), rtol=1e-5, atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, DRAFTS), st.integers(0, DRAFTS)), min_size=1, max_size=SLOTS), st.booleans())
def test_rows_emit_what_is_right_and_one_more(rows: list[tuple[int, int]], repeats: bool) -> None:
    """rows: drafts, and how many of them are what the greedy target says. repeats: later drafts are right, too."""
    vocab_size = 11
    sampler = pair("coupled", [SamplingParams(temperature=0)] * SLOTS, vocab_size)[0]
    history = torch.zeros(SLOTS, LONGEST, dtype=torch.int64)
    said, counts = [], []
    for slot, (drafts, right) in enumerate(rows):
        tokens = [(slot + 3 * j) % vocab_size for j in range(drafts + 1)]
        given_drafts = [
            token if j != right and (j < right or repeats) else token + 1 for j, token in enumerate(tokens[:-1])
        ]
        history[slot, 1 : 1 + drafts] = torch.tensor(given_drafts, dtype=torch.int64) % vocab_size
        said += tokens
        counts.append(drafts + 1)
    n = len(rows)
    logits = torch.eye(vocab_size)[said].to(DEVICE)
    found = sampler.run(batch_of([RowKind.VERIFY] * n, list(range(n)), counts, [0] * n, logits, history.to(DEVICE)))
    at = 0
    for row, (drafts, right) in enumerate(rows):
        emitted = min(drafts, right) + 1
        assert found.num_emitted[row] == emitted
        padding = found.tokens.shape[1] - emitted
        assert found.tokens[row].tolist() == said[at : at + emitted] + [0] * padding
        at += drafts + 1
    assert not found.confidence.any()


@pytest.mark.parametrize("mode", MODES)
def test_drafts_of_another_distribution(mode: str) -> None:
    """Two drafts each from a q far from p, then the verification: rejected at either place or at none."""
    n, vocab_size = 24, 30
    samplers = pair(mode, [SamplingParams(temperature=0.5 + slot % 3) for slot in range(n)], vocab_size, slots=n)
    generator = torch.Generator().manual_seed(2)
    p = (2 * torch.randn(n, 3, vocab_size, generator=generator)).to(DEVICE)
    q = p + torch.randn(p.shape, generator=generator).to(DEVICE)
    history = torch.zeros(n, LONGEST, dtype=torch.int64, device=DEVICE)
    slots = list(range(n))
    for drafts in range(2):
        found = draw(samplers, [RowKind.DRAFT] * n, slots, [1] * n, [drafts] * n, q[:, drafts], history)
        history[:, drafts + 1] = found.tokens[:, 0]
    found = draw(samplers, [RowKind.VERIFY] * n, slots, [3] * n, [0] * n, p.flatten(0, 1), history)
    assert set(found.num_emitted.tolist()) == {1, 2, 3}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
def test_ties_and_rows_without_a_number() -> None:
    """Of equal logits the lowest token, as argmax says on a CPU; a token of the vocabulary whatever the logits are."""
    vocab_size = kernels.SPLIT + 10
    sampler = pair("coupled", [SamplingParams(temperature=0)] * 3 + [SamplingParams()], vocab_size)[0]
    logits = torch.full((4, vocab_size), -torch.inf, device=DEVICE)
    logits[1, [5, 9, kernels.SPLIT + 3]] = -40000.0
    logits[2:] = torch.nan
    history = torch.zeros(SLOTS, LONGEST, dtype=torch.int64, device=DEVICE)
    found = sampler.run(batch_of([RowKind.DRAFT] * 4, [0, 1, 2, 3], [1] * 4, [0] * 4, logits, history))
    assert found.tokens[:2, 0].tolist() == [0, 5]
    assert float(found.confidence[1]) == pytest.approx(1 / 3)
    assert ((found.tokens >= 0) & (found.tokens < vocab_size)).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_row_has_the_same_bits_in_any_batch(mode: str) -> None:
    params = [PARAMS[i] for i in (0, 2, 3, 4, 2)]
    sampler = pair(mode, params, 5000)[0]
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    history = torch.zeros(SLOTS, LONGEST, dtype=torch.int64, device=DEVICE)
    together = sampler.run(batch_of([RowKind.DRAFT] * 5, list(range(5)), [1] * 5, [3, 1, 4, 1, 5], logits, history))
    for slot, first in ((0, 3), (2, 4), (3, 1), (4, 5)):
        alone = sampler.run(batch_of([RowKind.DRAFT], [slot], [1], [first], logits[slot : slot + 1], history))
        assert torch.equal(alone.tokens[0], together.tokens[slot])
        assert torch.equal(alone.confidence[0], together.confidence[slot])


@triton.jit
def numbers_kernel(seeds, places, bits, uniforms, logs, n, purpose: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    key = kernels.key_of(tl.load(seeds + i, mask=i < n, other=0), tl.load(places + i, mask=i < n, other=0), purpose)
    first = kernels.mix(key + kernels.STEP)
    tl.store(bits + i, key, mask=i < n)
    tl.store(uniforms + i, kernels.unit(first), mask=i < n)
    tl.store(logs + i, kernels.log_exponential(key, i), mask=i < n)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_random_numbers_are_those_of_torch_to_the_bit(purpose: Purpose) -> None:
    n = 500
    seeds = torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(purpose)).to(DEVICE)
    places = torch.arange(n, device=DEVICE) * 977
    bits, uniforms = torch.empty_like(seeds), torch.empty(n, dtype=torch.float64, device=DEVICE)
    logs = torch.empty_like(uniforms)
    step = {
        Purpose.TARGET: kernels.FOR_TARGET,
        Purpose.DRAFT: kernels.FOR_DRAFT,
        Purpose.ACCEPT: kernels.FOR_ACCEPT,
        Purpose.RESIDUAL: kernels.FOR_RESIDUAL,
    }[purpose]
    numbers_kernel[(1,)](seeds, places, bits, uniforms, logs, n, purpose=step.value, BLOCK=512)
    key = keys(seeds, places, purpose)
    assert torch.equal(bits, key)
    assert torch.equal(uniforms, uniform(key))
    expected = exponential(key, n).log().diagonal()
    torch.testing.assert_close(logs, expected, rtol=1e-14, atol=1e-14)  # a logarithm's last place is free


def law(n: int, q_told: float) -> tuple[float, int]:
    """p-value of first tokens after one draft from q, of n requests, when the sampler is told of q ** q_told; acceptances."""
    vocab_size = 5
    p, q = torch.tensor([1.2, 0.3, -0.5, 0.9, -torch.inf]), torch.tensor([-0.6, 0.8, 0.4, 0.9, 0.5])
    sampler = pair("rejection", [SamplingParams(temperature=0.8)] * n, vocab_size, drafts=1, slots=n)[0]
    history = torch.zeros(n, 4, dtype=torch.int64, device=DEVICE)
    slots = list(range(n))
    drafts = sampler.run(batch_of([RowKind.DRAFT] * n, slots, [1] * n, [0] * n, q.expand(n, 5).to(DEVICE), history))
    history[:, 1] = drafts.tokens[:, 0]
    drawn = np.bincount(history[:, 1].cpu().numpy(), minlength=vocab_size)
    assert chisquare(drawn, n * torch.softmax(q.double() / 0.8, 0).numpy()).pvalue > 1e-3
    if q_told != 1:
        sampler._proposals.pool.copy_(torch.softmax(q_told * q / 0.8, 0))
    found = sampler.run(batch_of([RowKind.VERIFY] * n, slots, [2] * n, [0] * n, p.expand(2 * n, 5).to(DEVICE), history))
    expected = n * torch.softmax(p.double() / 0.8, 0).numpy()[:4]
    observed = np.bincount(found.tokens[:, 0].cpu().numpy(), minlength=vocab_size)
    assert observed[4] == 0  # an impossible token, which the drafter likes
    return float(chisquare(observed[:4], expected).pvalue), int((found.num_emitted == 2).sum())


def test_rejection_sampling_keeps_the_law_of_the_target() -> None:
    p_value, accepted = law(150, 1.0)
    assert p_value > 1e-3
    assert 30 < accepted < 130


def test_a_wrong_proposal_breaks_the_law() -> None:
    assert law(100, -6.0)[0] < 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines on a GPU run on the kernels anyway")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_engine_on_the_kernels_gives_the_same_tokens(temperature: float) -> None:
    model = tiny_model()
    params = SamplingParams(temperature=temperature, max_tokens=7, ignore_eos=True, seed=5)
    prompts = prompts_of([5, 37])
    plain = run(tiny_engine(model, method="plain", max_num_seqs=2), requests_for(model, prompts, params))
    engine = tiny_engine(model, method="aspire", policy=always_draft_to(3), max_num_seqs=2)
    engine.runner.sampler.on_kernels = True
    requests = requests_for(model, prompts, params)
    assert run(engine, requests) == plain
    assert sum(r.stats.num_accepted_tokens for r in requests) > 0


def test_what_was_sent_last_is_not_sent_again() -> None:
    sender = LastSent(torch.device(DEVICE))
    first, same, other, longer = (np.array(a, dtype=np.int32) for a in ([1, 2], [1, 2], [1, 3], [1, 3, 3]))
    there = sender.send(first)
    assert there.tolist() == [1, 2]
    assert sender.send(same) is there
    for array in (other, longer, same):
        assert sender.send(array).tolist() == array.tolist()
