"""Faults that other engines had (the rows of the project's list of traps that the engine as a whole must be free of)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.engine.outputs import request_metrics
from aspire_llm.policy.base import Action
from aspire_llm.request import Request, SamplingParams
from byte_tokenizer import EOS, byte_tokenizer
from byte_tokenizer import VOCAB as BYTES
from dense_attention import dense_attention
from tiny import KEYS, ScriptedPolicy, always_draft_to, requests_for, run, script_drafts, tiny_engine, tiny_model

MODEL = tiny_model(vocab_size=BYTES)
METHODS = ["plain", "aspire", "vegas", "magicdec-window", "sparsespec"]


def texts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(97, 123, (n,), generator=generator).tolist() for n in lengths]


def with_text(
    prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], eos: Sequence[int] = ()
) -> list[Request]:
    """Requests that have text: every token is one byte of it."""
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    inputs = InputProcessor(byte_tokenizer(), BYTES, frozenset(eos), 0, keys=KEYS)
    return [r for prompt, p in zip(prompts, each, strict=True) for r in inputs.requests(list(prompt), p)]


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **changes})


def perfect_drafts(engine: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
    """The drafter proposes exactly what plain decoding says, so that whole runs are accepted at once."""

    def script(before: list[int], own: int) -> int:
        prompt, output = next((p, o) for p, o in zip(prompts, outputs, strict=True) if before[: len(p)] == p)
        made = len(before) - len(prompt)
        return output[made] if made < len(output) else own

    script_drafts(engine, script)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["eos", "stop token", "length"])
def test_a_stop_within_an_accepted_run_cuts_it(kind: str, late: bool) -> None:
    """sglang#23802, transformers#47912, ik_llama.cpp#2358: for every place in the run, nothing comes after the stop."""
    prompts = texts_of([12, 30])
    plain = run(tiny_engine(MODEL, method="plain"), requests_for(MODEL, prompts, greedy()))
    for cut in range(1, 12):
        changes: dict[str, Any] = {"max_tokens": cut} if kind == "length" else {"min_tokens": cut - 1}
        stops = [output[cut - 1] for output in plain]
        eos: Sequence[int] = stops if kind == "eos" else ()
        if kind == "stop token":
            changes["stop_token_ids"] = stops
        requests = with_text(prompts, greedy(ignore_eos=False, logprobs=0, **changes), eos)
        # min_tokens bans stops before it, which may change the text: the reference is plain decoding with the same parameters
        expected = run(tiny_engine(MODEL, method="plain"), with_text(prompts, greedy(ignore_eos=False, **changes), eos))
        engine = tiny_engine(MODEL, method="aspire", policy=always_draft_to(7), late=late)
        perfect_drafts(engine, prompts, expected)
        assert run(engine, requests) == expected
        for request in requests:
            n = len(request.output_token_ids)
            ended_early = kind != "length" and request.output_token_ids[-1] in stops
            assert request.finish_reason == ("stop" if ended_early else "length")
            assert request.stop_reason == (
                request.output_token_ids[-1] if ended_early and kind == "stop token" else None
            )
            assert len(request.logprobs) == n
            assert [entry.token_id for entry in request.logprobs] == request.output_token_ids
            shown = request.output_token_ids[:-1] if ended_early else request.output_token_ids
            assert request.stream is not None
            assert request.stream.text == bytes(t for t in shown if t < 256).decode(errors="replace")
            if kind != "length":
                assert not set(request.output_token_ids[:-1]) & set(stops)
            stats = request.stats
            assert stats.num_accepted_tokens <= n <= 1 + stats.num_cycles + stats.num_accepted_tokens
    assert any(r.stats.num_accepted_tokens for r in requests)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("method", ["plain", "aspire"])
def test_stop_strings_cut_text_and_tokens_alike(method: str, include: bool) -> None:
    prompts = texts_of([15, 25, 35], seed=1)
    free = with_text(prompts, greedy(logit_bias={t: -100.0 for t in range(BYTES) if not 97 <= t < 123}))
    run(tiny_engine(MODEL, method="plain"), free)
    bias = free[0].params.logit_bias
    for first, width in itertools.product(range(2, 20, 3), (1, 2, 3)):
        params = []
        for request in free:
            assert request.stream is not None
            params.append(
                greedy(
                    logit_bias=bias, stop=request.stream.text[first : first + width], include_stop_str_in_output=include
                )
            )
        requests = with_text(prompts, params)
        engine = tiny_engine(MODEL, method=method, policy=None if method == "plain" else always_draft_to(7))
        perfect_drafts(engine, prompts, [r.output_token_ids for r in free])
        run(engine, requests)
        for request, whole in zip(requests, free, strict=True):
            (stop,) = request.params.stop
            assert whole.stream is not None
            assert request.stream is not None
            begin = whole.stream.text.index(stop)
            assert request.stream.text == whole.stream.text[: begin + len(stop) * include]
            assert request.output_token_ids == whole.output_token_ids[: begin + len(stop)]
            assert (request.finish_reason, request.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("mode", ["coupled", "greedy", "rejection"])
def test_a_banned_token_never_comes_though_it_is_drafted(mode: str) -> None:
    """vllm#42744: a bias reaches every verified row, not only the last."""
    prompts = texts_of([10, 20, 30])
    for temperature in (0.0, 1.0):
        engine = tiny_engine(MODEL, method="aspire", policy=always_draft_to(6), draft_sampling=mode)
        script_drafts(engine, lambda before, own: 110)
        for params in (
            {"logit_bias": {110: -100.0}},
            {"allowed_token_ids": [108, 109, 111]},
            {"bad_words_token_ids": [[110]]},
        ):
            requests = requests_for(MODEL, prompts, greedy(temperature=temperature, seed=5, **params))
            for output in run(engine, requests):
                assert 110 not in output
            assert sum(r.stats.num_draft_tokens for r in requests) > 0
            if mode != "rejection":
                assert sum(r.stats.num_accepted_tokens for r in requests) == 0


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"frequency_penalty": -1.0, "repetition_penalty": 0.8},
        {"min_tokens": 20, "ignore_eos": False},
        {"bad_words_token_ids": [[97], [98, 99], [101, 102, 103]]},
        {"temperature": 0.8, "top_k": 20, "presence_penalty": 1.0, "seed": 3},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.02, "seed": 4},
    ],
    ids=lambda p: "+".join(p),
)
@pytest.mark.parametrize("mode", ["coupled", "greedy"])
def test_parameters_hold_at_every_verified_position(params: dict[str, Any], mode: str) -> None:
    """vllm#18902, TensorRT-LLM#17701: penalties see the drafts before them. The tokens are plain decoding's."""
    prompts = texts_of([9, 21, 33, 50])
    expected = run(tiny_engine(MODEL, method="plain"), with_text(prompts, greedy(**params), [EOS]))
    for method, late in (("aspire", False), ("vegas", True)):
        engine = tiny_engine(MODEL, method=method, late=late, policy=always_draft_to(5), draft_sampling=mode)
        requests = with_text(prompts, greedy(**params), [EOS])
        assert run(engine, requests) == expected
        assert sum(r.stats.num_draft_tokens for r in requests) > 0


@pytest.mark.parametrize("mode", ["coupled", "greedy"])
def test_seeds_fix_tokens_whatever_else_runs(mode: str) -> None:
    """vllm#6038, #9441: the same seed gives the same tokens alone, in a batch, in any order, preempted, with any method."""
    prompts = texts_of([8, 8, 17, 26, 40, 44])
    params = [SamplingParams(temperature=0.9, seed=seed, max_tokens=20, ignore_eos=True) for seed in (1, 2, 1, 7, 7, 9)]
    alone = [
        run(tiny_engine(MODEL, method="plain"), requests_for(MODEL, [p], s))[0]
        for p, s in zip(prompts, params, strict=True)
    ]
    for seed, method in enumerate(METHODS):
        order = list(range(len(prompts)))
        random.Random(seed).shuffle(order)
        requests = requests_for(MODEL, [prompts[i] for i in order], [params[i] for i in order])
        small = {"max_model_len": 96, "kv_cache_memory": 4 * 256 * 30}  # 30 pages of 4: preemptions
        engine = tiny_engine(MODEL, method=method, draft_sampling=mode, **small)
        assert run(engine, requests) == [alone[i] for i in order]
        assert sum(r.stats.num_preemptions for r in requests) > 0


def test_rejection_sampling_is_reproducible_with_the_same_drafts() -> None:
    """Tokens depend on the seed and on where cycles end; with one policy alone they repeat, in any batch."""
    prompts = texts_of([8, 17, 26, 40])
    params = [SamplingParams(temperature=0.9, seed=seed, max_tokens=20, ignore_eos=True) for seed in (1, 2, 7, 9)]

    def outputs(order: Sequence[int]) -> list[list[int]]:
        engine = tiny_engine(
            MODEL, method="aspire", draft_sampling="rejection", policy=always_draft_to(4), enable_prefix_caching=False
        )
        return run(engine, requests_for(MODEL, [prompts[i] for i in order], [params[i] for i in order]))

    together = outputs([0, 1, 2, 3])
    assert outputs([3, 1, 0, 2]) == [together[i] for i in (3, 1, 0, 2)]
    assert [outputs([i])[0] for i in range(4)] == together


def rescored(tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [n, vocabulary] of a whole text in one pass."""
    hidden = MODEL.decoder(
        torch.tensor(tokens), torch.arange(len(tokens)), dense_attention(MODEL.config, [len(tokens)])
    )
    return torch.log_softmax(MODEL.decoder.logits(hidden), dim=-1)


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_the_targets(method: str) -> None:
    """vllm#34497: they equal a rescoring of the whole text, drafts or not, temperature or not."""
    prompts = texts_of([11, 29, 47])
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=25, ignore_eos=True, logprobs=4, prompt_logprobs=2)
    requests = requests_for(MODEL, prompts, params)
    engine = tiny_engine(MODEL, method=method)
    run(engine, requests)
    for request in requests:
        tokens, start = request.token_ids, len(request.prompt_token_ids)
        reference = rescored(tokens)
        assert len(request.logprobs) == len(request.output_token_ids)
        assert len(request.prompt_logprobs) == start - 1
        for i, entry in enumerate([*request.prompt_logprobs, *request.logprobs], start=1):
            row = reference[i - 1]
            assert entry.token_id == tokens[i]
            assert entry.logprob == pytest.approx(float(row[tokens[i]]), abs=1e-5)
            assert entry.rank == 1 + int((row > row[tokens[i]] + 1e-6).sum())
            top = row.topk(len(entry.top))
            assert len(entry.top) == (2 if i < start else 4)
            assert [p for _, p in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    if method != "plain":
        assert sum(r.stats.num_accepted_tokens for r in requests) > 0


def test_prompt_logprobs_survive_preemption_and_cached_prefixes() -> None:
    prompts = texts_of([60, 60, 60], seed=2)
    prompts[1] = prompts[0]
    engine = tiny_engine(MODEL, method="aspire", max_model_len=96, kv_cache_memory=4 * 256 * 48)
    requests = requests_for(MODEL, prompts, greedy(prompt_logprobs=0, max_tokens=30))
    run(engine, requests)
    assert sum(r.stats.num_preemptions for r in requests) > 0
    for request in requests:
        assert [entry.token_id for entry in request.prompt_logprobs] == request.prompt_token_ids[1:]


def test_drafting_can_be_switched_off_for_one_request() -> None:
    """vllm#6993: off means no draft rows and no longer verifications, for that request alone."""
    prompts = texts_of([20, 30])
    off, on = requests_for(MODEL, prompts, [greedy(draft=False), greedy()])
    run(tiny_engine(MODEL, method="aspire"), [off, on])
    assert (off.stats.num_draft_tokens, off.stats.steps["draft"]) == (0, 0)
    assert off.stats.steps["verify"] == len(off.output_token_ids) - 1
    assert on.stats.num_draft_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_in_a_logits_processor_fails_that_request_alone(method: str) -> None:
    def explode(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) >= 9:
            raise ZeroDivisionError("from the user's code")
        return logits

    prompts = texts_of([20, 30, 25])
    engine = tiny_engine(MODEL, method=method)
    params = [greedy(), greedy(logits_processors=[explode]), greedy()]
    requests = requests_for(MODEL, prompts, params)
    expected = run(tiny_engine(MODEL, method="plain"), requests_for(MODEL, prompts, greedy()))
    outputs = run(engine, requests)
    assert [outputs[0], outputs[2]] == [expected[0], expected[2]]
    assert requests[1].finish_reason == "error"
    assert "ZeroDivisionError" in (requests[1].error or "")
    assert outputs[1] == expected[1][: len(outputs[1])]
    engine.check()


def test_counts_agree() -> None:
    """ik_llama.cpp#2358, sglang#39826: one count for each emitted token; rows of every kind are told."""
    prompts = texts_of([20, 30, 41])
    requests = requests_for(MODEL, prompts, greedy())
    engine = tiny_engine(MODEL, method="aspire")
    run(engine, requests)
    for request in requests:
        stats = request.stats
        metrics = request_metrics([request])
        assert len(request.output_token_ids) == 40
        assert 1 + stats.num_cycles + stats.num_accepted_tokens >= 40
        assert stats.steps["verify"] == stats.num_cycles
        assert stats.steps["draft"] >= stats.num_draft_tokens
        assert sum(stats.drafted_per_position) == stats.num_draft_tokens
        assert all(a <= d for a, d in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True))
        shown = metrics.speculative_decoding
        assert shown["mean_acceptance_length"] == 1 + shown["num_accepted_draft_tokens"] / shown["num_spec_steps"]


def test_continuations_of_one_prompt_differ_and_repeat() -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    first = run(tiny_engine(MODEL, method="aspire"), requests_for(MODEL, texts_of([20]), params))
    again = run(tiny_engine(MODEL, method="vegas"), requests_for(MODEL, texts_of([20]), params))
    assert len(first) == 4
    assert first == again
    assert len({tuple(o) for o in first}) == 4


@pytest.mark.parametrize("seed", range(4))
def test_mixed_parameters_in_one_batch(seed: int) -> None:
    """Every request keeps its own parameters, whoever shares its step."""
    chance = random.Random(seed)
    prompts = texts_of([chance.randint(2, 60) for _ in range(9)], seed)
    choices = [
        greedy(),
        greedy(repetition_penalty=1.3),
        greedy(temperature=1.0, seed=seed),
        greedy(temperature=0.5, top_k=5, seed=3),
        greedy(max_tokens=3),
        greedy(temperature=1.3, min_p=0.1, seed=8),
        greedy(draft=False),
        greedy(logprobs=3),
        greedy(stop_token_ids=[100, 105], ignore_eos=False),
    ]
    params = [chance.choice(choices) for _ in prompts]
    expected = [
        run(tiny_engine(MODEL, method="plain"), requests_for(MODEL, [p], s))[0]
        for p, s in zip(prompts, params, strict=True)
    ]
    actions = [Action.DRAFT] * 5 + [Action.VERIFY] * 2
    policy = ScriptedPolicy(lambda view, asked: chance.choice(actions))
    engine = tiny_engine(MODEL, method="aspire", late=seed % 2 == 1, policy=policy)
    assert run(engine, requests_for(MODEL, prompts, params)) == expected


def test_model_len_ends_a_request() -> None:
    prompts = texts_of([40, 62, 63])
    expected = [64 - 40, 2, 1]
    for method in METHODS:
        requests = requests_for(MODEL, prompts, greedy(max_tokens=50))
        outputs = run(tiny_engine(MODEL, method=method, max_model_len=64), requests)
        assert [len(o) for o in outputs] == expected
        assert {r.finish_reason for r in requests} == {"length"}


def test_eos_ends_a_request_unless_ignored() -> None:
    prompts = texts_of([18])
    (plain,) = run(tiny_engine(MODEL, method="plain"), requests_for(MODEL, prompts, greedy()))
    model = replace(MODEL, eos_token_ids=frozenset({plain[6]}))
    first = plain.index(plain[6])
    for method in METHODS:
        stopped, ignoring = requests_for(model, prompts * 2, [greedy(ignore_eos=False), greedy()])
        run(tiny_engine(model, method=method), [stopped, ignoring])
        assert (stopped.output_token_ids, stopped.finish_reason, stopped.stop_reason) == (
            plain[: first + 1],
            "stop",
            None,
        )
        assert (ignoring.output_token_ids, ignoring.finish_reason) == (plain, "length")
