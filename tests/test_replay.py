"""Replayed acceptance: the engine works as ever, and accepts exactly what the trace says."""

from __future__ import annotations

import torch

from aspire_llm.bench.hindsight import TraceContinuations
from aspire_llm.bench.replay import ReplaySampler
from aspire_llm.policy.base import Action
from aspire_llm.policy.trace import shipped_traces
from aspire_llm.request import SamplingParams
from tiny import ScriptedPolicy, prompts_of, requests_for, run, tiny_engine, tiny_model


def test_accepts_what_the_trace_says() -> None:
    trace = shipped_traces("refreshed_16")["qwen2.5-coder-0.5b_28k_code"]
    for late in (False, True):
        seen: list[tuple[int, int, int, tuple[float, ...]]] = []
        policy = ScriptedPolicy(lambda view, _: Action.DRAFT if view.pending < 3 + view.length % 5 else Action.VERIFY)
        engine = tiny_engine(tiny_model(), method="aspire", late=late, policy=policy, max_num_seqs=3)
        engine.runner.sampler = ReplaySampler(trace, 3, torch.device("cpu"))  # type: ignore[assignment]
        params = [
            SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, seed=seed) for seed in (5, 0, 10)
        ]  # a request's seed says which of the trace's 8 it is
        requests = requests_for(tiny_model(), prompts_of([20, 30, 41]), params)
        outputs = run(engine, requests)
        assert [len(o) for o in outputs] == [120] * 3
        made = {
            request.key: 0 for request in requests
        }  # tokens before the cycle, less the first one of the prompt's end
        places = {request.key: place for request, place in zip(requests, ((5, 0), (0, 0), (2, 5)), strict=True)}
        for outcome in policy.outcomes:
            source, first = places[outcome.key]
            draft = trace.drafts[source][(first + made[outcome.key] // trace.stride) % len(trace.drafts[0])]
            assert outcome.accepted == min(outcome.drafted, draft.accepted)
            expected = draft.confidences[: outcome.drafted]
            assert [round(c, 5) for c in outcome.confidences] == [round(c, 5) for c in expected]
            made[outcome.key] += outcome.accepted + 1
            seen.append((outcome.key, outcome.drafted, outcome.accepted, expected))
        assert sum(accepted for _, _, accepted, _ in seen) > 100
        assert any(accepted < drafted for _, drafted, accepted, _ in seen)


def test_hindsight_is_told_what_the_sampler_does() -> None:
    trace = shipped_traces("refreshed_16")["qwen2.5-coder-0.5b_28k_code"]
    truth = TraceContinuations()
    # verifies when told that a draft is wrong, as hindsight does
    policy = ScriptedPolicy(
        lambda view, _: Action.DRAFT if truth.all_right(view.key, view.pending) and view.pending < 12 else Action.VERIFY
    )
    engine = tiny_engine(tiny_model(), method="aspire", policy=policy, max_num_seqs=2)
    engine.runner.sampler = ReplaySampler(trace, 2, torch.device("cpu"))  # type: ignore[assignment]
    params = [SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, seed=seed) for seed in (3, 12, 17)]
    requests = requests_for(tiny_model(), prompts_of([20, 30, 41]), params)
    truth.begin(requests, trace)
    run(engine, requests)
    emitted = {request.key: 1 for request in requests}  # by the prompt's last row
    for outcome in policy.outcomes:
        most = min(12, 80 - emitted[outcome.key] - 1)
        assert outcome.accepted == outcome.drafted - 1 or outcome.accepted == outcome.drafted == most
        emitted[outcome.key] += outcome.accepted + 1
    assert any(outcome.accepted == outcome.drafted - 1 > 0 for outcome in policy.outcomes)
