"""Replayed acceptance: the engine works as ever, and accepts exactly what the trace says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.bench.hindsight import TraceContinuations
from aspire_llm.bench.replay import ReplaySampler
from aspire_llm.bench.replay_decide import TraceState, decide_by_kernel, decide_in_torch
from aspire_llm.policy.base import Action
from aspire_llm.policy.trace import shipped_traces
from aspire_llm.request import RowKind, SamplingParams
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


@pytest.mark.kernel
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(RowKind), st.integers(1, 34)), min_size=1, max_size=9),
    st.integers(1, 20),
    st.integers(0, 2**31),
)
def test_the_kernel_decides_as_torch_does(shape: list[tuple[RowKind, int]], stride: int, seed: int) -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(seed)

    def ints(high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, generator=generator).to(device)

    kinds = torch.tensor([int(kind) for kind, _ in shape], device=device)
    counts = torch.tensor([n if kind is RowKind.VERIFY else 1 for kind, n in shape], device=device)
    offsets = counts.cumsum(0) - counts
    slots = torch.randperm(12, generator=generator)[: len(shape)].to(device)
    total = int(counts.sum())
    first = ints(90, len(shape))
    positions = torch.cat([torch.arange(n, device=device) + f for f, n in zip(first, counts.tolist(), strict=True)])
    confidence = torch.rand(3, 4, 16, generator=generator).to(device)
    trace = TraceState(stride, ints(17, 3, 4), confidence, ints(3, 12), ints(60, 12) - 20, ints(90, 12))
    other = replace(trace, cycles=trace.cycles.clone())
    batch = (counts, offsets, slots, kinds, ints(500, total), positions, ints(500, 12, 110), int(counts.max()))
    for ours, theirs in zip(decide_by_kernel(trace, *batch), decide_in_torch(other, *batch), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert torch.equal(trace.cycles, other.cycles)
