"""Edits and filters of logits at every verified position, against a slow oracle that looks at one position at a time."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.errors import UserError
from aspire_llm.request import RowKind, SamplingParams
from aspire_llm.sampling.bad_words import bad_words_token_ids
from aspire_llm.sampling.batch import SampleBatch
from aspire_llm.sampling.filters import Filters
from aspire_llm.sampling.logits import LogitsEdits
from aspire_llm.sampling.rows import Rows
from aspire_llm.sampling.sampler import Sampler
from sampling_chain import plain_distribution, plain_logits

V = 12
STOPS = (3, 9)
CPU = torch.device("cpu")
TOKEN = st.integers(0, V - 1)

PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "presence_penalty": st.sampled_from([-0.5, 0.9]),
        "frequency_penalty": st.sampled_from([-0.4, 0.6]),
        "logit_bias": st.dictionaries(TOKEN, st.sampled_from([-100.0, -2.0, 3.5]), max_size=4),
        "bad_words_token_ids": st.lists(st.lists(TOKEN, min_size=1, max_size=4), max_size=5),
        "allowed_token_ids": st.lists(TOKEN, min_size=6, max_size=11, unique=True),
        "min_tokens": st.integers(0, 6),
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_k": st.integers(-1, V + 3),
        "top_p": st.sampled_from([0.1, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    },
)
# (parameters, prompt, output, pending drafts, row kind)
ROW = st.tuples(
    PARAMS,
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=8),
    st.lists(st.integers(0, 5), max_size=5),
    st.sampled_from(list(RowKind)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6), st.integers(0, 2**31))
def test_every_position_by_its_own_prefix(requests: list, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(len(requests) + 2, generator=generator)[: len(requests)].tolist()
    edits, filters = LogitsEdits(len(requests) + 2, V, CPU), Filters(len(requests) + 2, V, CPU)
    # What lies beyond a request's tokens is arbitrary.
    history = torch.randint(-5, 3 * V, (len(requests) + 2, 24), generator=generator)
    kinds, counts, positions, prefixes, params = [], [], [], [], []
    for slot, (values, prompt, output, drafts, kind) in zip(slots, requests, strict=True):
        given_params = SamplingParams(**values, max_tokens=99)
        edits.admit(slot, given_params, prompt, STOPS, None)
        filters.admit(slot, given_params)
        known = prompt + output
        history[slot, : len(known + drafts)] = torch.tensor(known + drafts)
        first = len(known) - 1 if kind == RowKind.VERIFY else len(known + drafts) - 1
        number = 1 + len(drafts) if kind == RowKind.VERIFY else 1
        kinds.append(kind)
        counts.append(number)
        for i in range(number):
            positions.append(first + i)
            prefixes.append((prompt, (known + drafts)[len(prompt) : first + i + 1]))
            params.append(given_params)
    logits = torch.randn(len(positions), V, generator=generator) * 3
    batch = SampleBatch(tuple(kinds), tuple(slots), tuple(counts), logits.clone(), torch.tensor(positions), history)
    rows = Rows.of(batch)
    edited, failures = edits.apply(batch.logits, rows, batch.positions, history)
    assert torch.equal(batch.logits, logits)
    filtered = torch.softmax(filters.apply(edited, rows.token_slots), dim=1)
    for i, ((prompt, output), p) in enumerate(zip(prefixes, params, strict=True)):
        wanted = plain_logits(logits[i].numpy(), p, prompt, output, STOPS)
        if np.isinf(wanted).all():
            assert i in failures
            continue
        assert i not in failures
        np.testing.assert_allclose(edited[i].numpy(), wanted, rtol=1e-5, atol=1e-5)
        if not p.greedy:
            np.testing.assert_allclose(
                filtered[i].numpy(), plain_distribution(logits[i].numpy(), p, prompt, output, STOPS), atol=1e-5
            )


def test_ties_at_a_threshold_all_stay() -> None:
    filters = Filters(2, 6, CPU)
    filters.admit(0, SamplingParams(top_k=2))
    filters.admit(1, SamplingParams(top_p=0.3))
    kept = filters.apply(torch.tensor([[1.0, 3, 2, 2, 2, 0], [2.0, 2, 2, 2, 0, 0]]), np.array([0, 1])) > -torch.inf
    assert kept.tolist() == [[False, True, True, True, True, False], [True] * 4 + [False] * 2]


def run_one(sampler: Sampler, tokens: list[int], drafts: list[int], logits: torch.Tensor, kind: RowKind):
    history = torch.tensor([tokens + drafts + [0, 0]])
    first = len(tokens) - 1 if kind == RowKind.VERIFY else len(tokens + drafts) - 1
    positions = torch.arange(first, len(tokens + drafts))
    return sampler.run(SampleBatch((kind,), (0,), (len(positions),), logits, positions, history))


def test_a_banned_draft_never_comes() -> None:
    """Bias and bad words reach every verified row, not only the last."""
    sampler = Sampler(1, V)
    sampler.admit(0, SamplingParams(temperature=0, logit_bias={4: -100}, bad_words_token_ids=[[2, 6]]), 0, [1])
    logits = torch.zeros(4, V)
    logits[0, 2], logits[1, 6], logits[1, 7], logits[2, 4] = 9, 9, 8, 9  # the model itself would say 2, 6, 4
    out = run_one(sampler, [1], [2, 6, 4], logits, RowKind.VERIFY)
    assert out.tokens[0, : out.num_emitted[0]].tolist() == [2, 7]
    logits[1, 7] = 10
    logits[2, 5] = 1
    out = run_one(sampler, [1], [2, 7, 4], logits, RowKind.VERIFY)
    assert out.tokens[0, : out.num_emitted[0]].tolist() == [2, 7, 5]


def test_processors_see_the_prefix_of_each_position() -> None:
    seen: list[tuple[list[int], ...]] = []

    def with_prompt(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt, output))
        return logits

    def ban_repeats(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[output] = -torch.inf
        return logits

    sampler = Sampler(1, V)
    params = SamplingParams(temperature=0, logits_processors=[with_prompt, ban_repeats])
    sampler.admit(0, params, 0, [1, 0])
    assert sampler.needs_host(0)
    out = run_one(sampler, [1, 0, 5], [7, 7], torch.eye(V)[[7, 7, 7]] * 5 + torch.eye(V)[[0, 2, 0]], RowKind.VERIFY)
    assert seen == [([1, 0], [5]), ([1, 0], [5, 7]), ([1, 0], [5, 7, 7])]
    assert out.tokens[0, : out.num_emitted[0]].tolist() == [7, 2]


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda output, logits: 1 / 0, "ZeroDivisionError"),
        (lambda output, logits: None, "must return a tensor"),
        (lambda output, logits: logits[:3], r"not shape \(3,\)"),
        (lambda output, logits: logits * float("nan"), "NaN"),
        (lambda output, logits: logits - float("inf"), "no token is allowed"),
    ],
)
def test_a_failing_processor_fails_its_request_alone(processor, message: str) -> None:
    sampler = Sampler(2, V)
    sampler.admit(0, SamplingParams(temperature=0, logits_processors=[processor]), 0, [1])
    sampler.admit(1, SamplingParams(temperature=0), 0, [1])
    logits = torch.eye(V)[[4, 5]]
    history = torch.tensor([[1, 0, 0], [1, 0, 0]])
    batch = SampleBatch((RowKind.VERIFY,) * 2, (0, 1), (1, 1), logits, torch.zeros(2, dtype=torch.int64), history)
    out = sampler.run(batch)
    assert list(out.errors) == [0]
    assert out.tokens[1, 0] == 5
    assert re.search(message, out.errors[0])


def test_failures_count_only_where_plain_decoding_would_meet_them() -> None:
    """A processor that raises after a rejected draft has seen a text that never was."""

    def touchy(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if 7 in output:
            raise RuntimeError("seven")
        return logits

    sampler = Sampler(1, V)
    sampler.admit(0, SamplingParams(temperature=0, logits_processors=[touchy]), 0, [1])
    logits = torch.eye(V)[[4, 5, 6]]
    out = run_one(sampler, [1], [7, 5], logits, RowKind.VERIFY)
    assert (out.errors, out.tokens[0, 0].item(), out.num_emitted.tolist()) == ({}, 4, [1])
    assert run_one(sampler, [1], [7], logits[:1], RowKind.DRAFT).errors == {}
    assert "seven" in run_one(sampler, [1, 7], [5], logits[:2], RowKind.VERIFY).errors[0]


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words_token_ids"])
def test_token_ids_outside_the_vocabulary(name: str) -> None:
    value = {"logit_bias": {V: 1.0}, "bad_words_token_ids": [[1, V]]}.get(name, [V])
    with pytest.raises(UserError, match=rf"{name}.*{V}.*\[0, {V - 1}\]"):
        Sampler(1, V).validate(SamplingParams(**{name: value}))


def test_a_slot_forgets_its_last_tenant() -> None:
    sampler = Sampler(1, V)
    everything = {
        "logit_bias": {4: -100.0}, "allowed_token_ids": [1, 2], "bad_words_token_ids": [[4]], "min_tokens": 3,
        "presence_penalty": 2.0, "top_k": 1, "min_p": 0.9, "logprobs": 2, "logits_processors": [lambda o, z: z * 0],
    }  # fmt: skip
    sampler.admit(0, SamplingParams(**everything), 0, [1], [4])
    sampler.admit(0, SamplingParams(temperature=0), 0, [1], [4])
    assert not sampler.needs_host(0)
    out = run_one(sampler, [1], [], torch.eye(V)[[4]], RowKind.VERIFY)
    assert (out.tokens.tolist(), out.logprobs, out.errors) == ([[4]], {}, {})


def test_bad_words_as_token_sequences() -> None:
    """Also after a blank where that is another spelling of the same length (vLLM's rule)."""
    spellings = {
        "cat": [5],
        " cat": [6],
        "new york": [1, 2],
        " new york": [3, 2],
        "日": [7, 8],
        " 日": [4, 7, 8],
        "": [],
    }
    words = ["cat", "  new york", "日", "cat"]
    assert bad_words_token_ids(words, spellings.__getitem__) == ((5,), (6,), (1, 2), (3, 2), (7, 8))
    with pytest.raises(UserError, match="bad_words"):
        bad_words_token_ids(["  "], {"": [], " ": [4]}.__getitem__)
