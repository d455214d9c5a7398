"""Replayed acceptance: the engine works as ever, and accepts exactly what the trace says."""

from __future__ import annotations

import torch

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
        requests = requests_for(
            tiny_model(), prompts_of([20, 30, 41]), SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
        )
        outputs = run(engine, requests)
        assert [len(o) for o in outputs] == [120] * 3
        made = {
            request.key: 0 for request in requests
        }  # tokens before the cycle, less the first one of the prompt's end
        slots = {request.key: i for i, request in enumerate(requests)}
        for outcome in policy.outcomes:
            draft = trace.drafts[slots[outcome.key]][made[outcome.key] // trace.stride % len(trace.drafts[0])]
            assert outcome.accepted == min(outcome.drafted, draft.accepted)
            expected = draft.confidences[: outcome.drafted]
            assert [round(c, 5) for c in outcome.confidences] == [round(c, 5) for c in expected]
            made[outcome.key] += outcome.accepted + 1
            seen.append((outcome.key, outcome.drafted, outcome.accepted, expected))
        assert sum(accepted for _, _, accepted, _ in seen) > 100
        assert any(accepted < drafted for _, drafted, accepted, _ in seen)
