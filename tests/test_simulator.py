"""Traces and the simulator: what is read, what is conserved, what must be ordered."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.errors import UserError
from aspire_llm.policy.base import Action, CycleOutcome, RequestView, StepLoad
from aspire_llm.policy.cost import ReadModel
from aspire_llm.policy.factory import make_policy
from aspire_llm.policy.simulator import (
    Replay,
    SimulatedCost,
    Simulation,
    best_fixed_length,
    bootstrap_interval,
    format_report,
    read_cost,
    run_policy,
    simulate,
)
from aspire_llm.policy.trace import Draft, Trace, read_traces, shipped_traces, write_traces

POLICIES = ["autoregressive", "lockstep:6", "staggered:6", "fsm", "ema", "confidence", "hindsight"]
COST = SimulatedCost()


def random_trace(seed: int = 0, requests: int = 6, starts: int = 30, longest: int = 12, stride: int = 1) -> Trace:
    """Rates differ between requests; a wrong draft is mostly unsure."""
    rng = np.random.default_rng(seed)
    rows = []
    for rate in rng.uniform(0.6, 0.98, requests):
        row = []
        for _ in range(starts):
            right = rng.random(longest) < rate
            accepted = int(np.cumprod(right).sum())
            confidences = np.where(right, rng.beta(8, 1, longest), rng.beta(2, 3, longest))
            row.append(Draft(accepted, tuple(confidences.tolist())))
        rows.append(tuple(row))
    return Trace("random", "made", 8, stride, tuple(rows))


class Checked:
    """Passes everything on and keeps the books."""

    def __init__(self, policy: object) -> None:
        self.policy = policy
        self.cycles: dict[int, list[tuple[int, int]]] = {}
        self.forgotten: list[int] = []
        self.seconds = 0.0

    def decide(self, requests: list[RequestView], prefill: StepLoad) -> list[Action]:
        for view in requests:
            assert len(view.confidences) <= view.pending
            assert view.pending <= view.max_draft
            assert view.key not in self.forgotten
        return self.policy.decide(requests, prefill)  # type: ignore[attr-defined, no-any-return]

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        assert outcome.key not in self.forgotten
        assert len(outcome.confidences) == outcome.drafted
        self.cycles.setdefault(outcome.key, []).append((outcome.drafted, outcome.accepted))
        self.policy.observe_cycle(outcome)  # type: ignore[attr-defined]

    def observe_step(self, load: StepLoad) -> None:
        self.seconds += load.seconds
        self.policy.observe_step(load)  # type: ignore[attr-defined]

    def forget(self, key: int) -> None:
        self.forgotten.append(key)
        self.policy.forget(key)  # type: ignore[attr-defined]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    spec=st.sampled_from(POLICIES),
    late=st.booleans(),
    rate=st.sampled_from([None, 0.3, 5.0]),
    batch=st.integers(1, 9),
    tokens=st.integers(1, 60),
)
def test_every_token_is_emitted_exactly_once(
    seed: int, spec: str, late: bool, rate: float | None, batch: int, tokens: int
) -> None:
    trace = random_trace(seed)
    replay = Replay(batch_size=batch, arrival_rate=rate, late=late, tokens=tokens, repeats=2, seed=seed)
    simulation = Simulation(trace, COST, replay)
    name, _, length = spec.partition(":")
    policy = Checked(
        make_policy(
            name,
            COST.model(),
            COST.reads,
            draft_length=int(length) if length else None,
            truth=simulation if name == "hindsight" else None,
        )
    )
    run = simulation.run(policy)
    assert run.tokens == (2 * tokens,) * trace.num_requests
    for key in policy.forgotten:
        cycles = policy.cycles[key]
        assert sum(accepted + 1 for _, accepted in cycles) == tokens  # drafts never reach past the last token
        assert all(drafted < tokens or drafted == 0 for drafted, _ in cycles)
    assert len(set(policy.forgotten)) == len(policy.forgotten)


def test_requests_times_add_up_to_the_clock() -> None:
    trace = random_trace()
    replay = Replay(batch_size=6, tokens=50, repeats=1)
    cost = replace(COST, per_token=0.01, free_tokens=8)
    simulation = Simulation(trace, cost, replay)
    policy = Checked(make_policy("lockstep", cost.model(), cost.reads, draft_length=4))
    run = simulation.run(policy)
    # Requests that came after the counted ones ran beside them: theirs is the rest.
    assert sum(run.seconds) <= policy.seconds
    alone = Simulation(trace, cost, replace(replay, batch_size=1))
    policy = Checked(make_policy("lockstep", cost.model(), cost.reads, draft_length=4))
    assert sum(alone.run(policy).seconds) == pytest.approx(policy.seconds)


def test_fixed_length_on_a_constant_trace_is_the_formula() -> None:
    """Drafts that are always right: g + 1 tokens for g drafts and a verification."""
    trace = Trace("right", "made", 0, 1, ((Draft(16, (0.99,) * 16),) * 8,) * 4)
    cost = replace(COST, reads=ReadModel(0, 2, 0), context_length=10**9, per_kv=0.35 / 10**9)
    replay = Replay(batch_size=16, tokens=9 * 60, repeats=4)
    plain = run_policy(trace, "autoregressive", cost, replay)
    run = run_policy(trace, "lockstep:8", cost, replay)
    share = 1 / 16
    assert plain.tokens_per_s == pytest.approx(1 / (share + 0.35), rel=1e-4)
    assert run.tokens_per_s == pytest.approx(9 / (9 * share + 0.35), rel=1e-3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("walk", ["positions", "starts"])
def test_hindsight_is_never_beaten(seed: int, walk: str) -> None:
    trace, replay = random_trace(seed), Replay(batch_size=8, tokens=200, repeats=2, walk=walk)  # type: ignore[arg-type]
    best = run_policy(trace, "hindsight", COST, replay).tokens_per_s
    for spec in [*POLICIES, "staggered:2", "staggered:12"]:
        assert run_policy(trace, spec, COST, replay).tokens_per_s <= best * 1.005


@pytest.mark.parametrize("name", ["fsm", "ema", "confidence", "hindsight"])
@pytest.mark.parametrize(
    "cost",
    [
        replace(COST, context_length=200),  # short contexts: the KV is nothing
        replace(COST, per_token=0.05, free_tokens=128.0, context_length=1000),  # a huge batch, past the hinge
    ],
    ids=["short", "huge"],
)
@pytest.mark.parametrize("late", [False, True])
def test_never_slower_than_plain_by_more_than_two_percent(name: str, cost: SimulatedCost, late: bool) -> None:
    replay = Replay(batch_size=96, tokens=120, repeats=16, late=late)
    trace = random_trace()
    plain = run_policy(trace, "autoregressive", cost, replay)
    run = run_policy(trace, name, cost, replay)
    assert run.tokens_per_s >= 0.98 * plain.tokens_per_s


def test_hopeless_drafts_fall_back_to_plain_decoding() -> None:
    trace = Trace("wrong", "made", 0, 1, ((Draft(0, (0.7,) * 16),) * 32,) * 4)
    replay = Replay(batch_size=8, tokens=1000, repeats=2)
    plain = run_policy(trace, "autoregressive", COST, replay)
    for name in ("ema", "confidence"):
        assert run_policy(trace, name, COST, replay).tokens_per_s >= 0.98 * plain.tokens_per_s


def test_verify_tokens_stay_under_the_bound() -> None:
    replay = Replay(batch_size=64, tokens=80, repeats=11)
    for name in ("staggered:6", "ema", "confidence"):
        assert run_policy(random_trace(), name, COST, replay, max_verify_tokens=64).most_verify_tokens <= 64


def test_same_seed_same_run_and_another_seed_another() -> None:
    trace, replay = random_trace(), Replay(batch_size=4, tokens=60, repeats=2)
    assert run_policy(trace, "confidence", COST, replay) == run_policy(trace, "confidence", COST, replay)
    assert run_policy(trace, "confidence", COST, replay) != run_policy(
        trace, "confidence", COST, replace(replay, seed=1)
    )


def test_poisson_arrivals_leave_the_batch_smaller_and_the_latency_lower() -> None:
    trace = random_trace()
    full = run_policy(trace, "confidence", COST, Replay(batch_size=16, tokens=60, repeats=4))
    thin = run_policy(trace, "confidence", COST, Replay(batch_size=16, tokens=60, repeats=4, arrival_rate=0.01))
    assert thin.latency < full.latency
    assert thin.tokens_per_s < full.tokens_per_s  # each pays more of the fixed part


# --- the shipped traces


def test_shipped_traces_are_those_of_three_models_with_the_projects_own_context() -> None:
    traces = shipped_traces()
    assert {t.method for t in traces.values()} == {
        "refreshed_16",
        "refreshed_19",
        "refreshed_23",
        "refreshed_penultimate",
    }
    assert len(traces) >= 9
    code = traces["qwen2.5-coder-0.5b_28k_code"]
    assert (code.num_requests, code.max_draft, code.stride, code.first_start) == (8, 24, 4, 8)
    assert np.mean([d.accepted for row in code.drafts for d in row]) == pytest.approx(15.7, abs=0.05)
    assert code.draft_at(0, 7) is code.drafts[0][1]
    every = traces["smollm2-135m_5k_demo"]
    assert (every.num_requests, every.max_draft, every.stride, every.first_start, every.span) == (4, 16, 1, 4, 96)
    assert set(shipped_traces("window")) == set(traces) - {"smollm2-135m_5k_demo"}
    with pytest.raises(UserError, match="no shipped trace"):
        shipped_traces("nothing")


def test_fixed_lengths_over_all_starts_match_a_direct_computation() -> None:
    """With every start alike the simulator must agree with the closed sum over starts."""
    trace = shipped_traces("refreshed_penultimate")["qwen2.5-coder-0.5b_28k_news"]
    replay = Replay(walk="starts", tokens=2000, repeats=2)
    plain = run_policy(trace, "autoregressive", COST, replay)
    for g in (4, 12):
        accepted = np.array([[d.accepted for d in row] for row in trace.drafts])
        # by request, since each makes the same tokens
        per_token = (g * 0.0825 + 0.4125) / (1 + np.minimum(accepted, g).mean(axis=1))
        direct = 0.4125 / per_token.mean()
        run = run_policy(trace, f"staggered:{g}", COST, replay)
        assert run.tokens_per_s / plain.tokens_per_s == pytest.approx(direct, rel=0.03)


def test_simulate_has_the_shape_of_the_command_and_its_intervals_hold_the_estimates() -> None:
    traces = {k: v for k, v in shipped_traces().items() if k == "smollm2-135m_7k_code"}
    replay = Replay(tokens=200, repeats=1)
    report = simulate(traces, COST, ["autoregressive", "ema", "confidence", "hindsight"], replay)
    assert json.loads(json.dumps(report)) == report
    rows = report["traces"]["smollm2-135m_7k_code"]["policies"]
    for row in rows.values():
        assert set(row) == {"tokens_per_s", "speedup", "of_hindsight", "interval"}
        assert row["interval"][0] <= row["of_hindsight"] <= row["interval"][1]
    assert rows["autoregressive"]["speedup"] == 1.0
    assert rows["hindsight"]["of_hindsight"] == 1.0
    assert rows["hindsight"]["interval"] == [1.0, 1.0]
    assert 1.0 < rows["ema"]["speedup"] < rows["confidence"]["speedup"] < rows["hindsight"]["speedup"]
    assert "confidence" in format_report(report)


def test_confidence_leads_and_a_late_result_costs_little_on_real_traces() -> None:
    """Deterministic replays; the bounds are far from the measured 11 % and 1 %."""
    lead, loss = [], []
    for name in ("qwen2.5-coder-0.5b_28k_news", "smollm2-135m_7k_code"):
        trace, replay = shipped_traces()[name], Replay(repeats=2)
        ema = run_policy(trace, "ema", COST, replay).tokens_per_s
        now = run_policy(trace, "confidence", COST, replay).tokens_per_s
        late = run_policy(trace, "confidence", COST, replace(replay, late=True)).tokens_per_s
        lead.append(now / ema)
        loss.append(1.0 - late / now)
    assert np.mean(lead) >= 1.05
    assert np.mean(loss) <= 0.03


def test_best_fixed_length_is_the_best() -> None:
    trace, replay = random_trace(longest=6), Replay(batch_size=4, tokens=80, repeats=2)
    length, run = best_fixed_length(trace, COST, replay)
    assert run.tokens_per_s == max(run_policy(trace, f"staggered:{g}", COST, replay).tokens_per_s for g in range(1, 7))
    assert 1 <= length <= 6


def test_bootstrap_resamples_requests_together() -> None:
    trace, replay = random_trace(), Replay(batch_size=4, tokens=80, repeats=2)
    run = run_policy(trace, "ema", COST, replay)
    assert bootstrap_interval(run, run) == [1.0, 1.0]
    twice = replace(run, seconds=tuple(2 * s for s in run.seconds))
    assert bootstrap_interval(twice, run) == pytest.approx([0.5, 0.5])


# --- files


def test_a_written_trace_reads_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    match = rng.random((3, 10, 12)) < 0.8
    accepted = np.cumprod(match, axis=-1).sum(axis=-1)
    confidence = rng.random((3, 10, 12))
    path = str(tmp_path / "mine.npz")
    write_traces(path, 5, 1, {"verified": accepted}, {"verified": confidence}, {"verified": match})
    trace = read_traces(path)["verified"]
    assert (trace.name, trace.first_start, trace.stride, trace.span) == ("mine", 5, 1, 10)
    assert [[d.accepted for d in row] for row in trace.drafts] == accepted.tolist()
    assert (
        np.abs(np.array([[d.confidences for d in row] for row in trace.drafts]) - confidence).max() <= 0.5 / 255 + 1e-9
    )


@pytest.mark.parametrize("fault", ["missing", "not npz", "no shape", "no methods", "wrong shape", "disagree"])
def test_bad_traces_are_refused(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "bad.npz"
    match = np.ones((2, 3, 1), np.uint8) * 255
    arrays = {
        "shape": np.array([2, 3, 8]),
        "first_start": np.int64(0),
        "stride": np.int64(1),
        "m/accepted": np.full((2, 3), 8, np.int8),
        "m/confidence": np.zeros((2, 3, 8), np.uint8),
        "m/match": match,
    }
    if fault == "no shape":
        del arrays["shape"]
    elif fault == "no methods":
        del arrays["m/accepted"]
    elif fault == "wrong shape":
        arrays["m/confidence"] = np.zeros((2, 3, 7), np.uint8)
    elif fault == "disagree":
        arrays["m/accepted"] = np.full((2, 3), 5, np.int8)
    if fault == "not npz":
        path.write_text("hello")
    elif fault != "missing":
        np.savez(path, allow_pickle=False, **arrays)
    with pytest.raises(UserError, match="trace "):
        read_traces(str(path))


def test_cost_files(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(
        json.dumps({"fixed": 2.0, "context_length": 8000, "budget": 256, "num_layers": 30, "num_refresh_layers": 1})
    )
    assert read_cost(str(path)) == SimulatedCost(fixed=2.0, context_length=8000, reads=ReadModel(256, 30, 1))
    for bad in (
        '{"fixd": 1}',
        '{"fixed": "1"}',
        '{"fixed": -1}',
        '{"budget": 5}',
        '{"context_length": 1.5}',
        "[]",
        "nonsense",
    ):
        path.write_text(bad)
        with pytest.raises(UserError, match="cost "):
            read_cost(str(path))


def test_bad_replays_are_refused() -> None:
    for bad in ({"batch_size": 0}, {"tokens": 0}, {"repeats": 0}, {"arrival_rate": 0.0}, {"walk": "random"}):
        with pytest.raises(UserError, match=next(iter(bad))):
            Replay(**bad)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="draft length"):
        run_policy(random_trace(), "staggered:x", COST, Replay())
    with pytest.raises(UserError, match="known are"):
        simulate({"t": random_trace()}, COST, ["magic"], Replay(tokens=5, repeats=1))
