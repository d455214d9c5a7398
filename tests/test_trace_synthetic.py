"""Traces made from accepted lengths: they have the lengths, one fate a position, and confidences as recorded ones."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.errors import UserError
from aspire_llm.policy.simulator import Replay, SimulatedCost, run_policy
from aspire_llm.policy.trace import Draft, Trace, shipped_traces
from aspire_llm.policy.trace_synthetic import (
    LAW_TRACE,
    ConfidenceLaw,
    request_means,
    right_probability,
    synthetic_trace,
)

LAW = ConfidenceLaw.of(shipped_traces()[LAW_TRACE])


def accepted_length(trace: Trace, request: int) -> float:
    return 1.0 + mean(draft.accepted for draft in trace.drafts[request])


def test_requests_have_the_mean_and_keep_the_bounds() -> None:
    trace = synthetic_trace(11.5, 2.56, 20.0, requests=12, positions=4000, seed=1, law=LAW)
    lengths = [accepted_length(trace, r) for r in range(12)]
    wanted = request_means(11.5, 2.56, 20.0, 12, 1)
    assert lengths == pytest.approx(wanted, rel=0.12)
    assert mean(lengths) == pytest.approx(11.5, rel=0.06)
    assert min(lengths) < 5.0
    assert max(lengths) > 17.0


@settings(max_examples=50, deadline=None)
@given(st.floats(1.0, 30.0), st.floats(0.01, 2.9), st.floats(0.02, 0.98), st.integers(1, 70), st.integers(0, 2**20))
def test_means_of_any_request_count(low: float, spread: float, share: float, requests: int, seed: int) -> None:
    high = low + spread
    wanted = low + spread * share
    means = request_means(wanted, low, high, requests, seed)
    assert len(means) == requests
    assert all(low - 1e-9 <= m <= high + 1e-9 for m in means)
    # one of each stratum: at most a stratum's width from the true mean
    assert abs(mean(means) - wanted) <= spread / requests + 1e-6
    if requests > 1:
        assert request_means(wanted, low, high, requests, seed) == means


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 1000), st.floats(0.0, 1.0))
def test_a_position_has_one_fate(positions: int, draft_tokens: int, seed: int, share: float) -> None:
    """Every draft that reaches a position on track finds it right or wrong alike, with the same confidence."""
    length = 1.0 + (draft_tokens - 0.01) * share
    trace = synthetic_trace(length, length, length, 2, positions, seed, draft_tokens, LAW)
    assert (trace.num_requests, trace.span, trace.max_draft) == (2, positions, draft_tokens)
    for drafts in trace.drafts:
        fates: dict[int, tuple[bool, float]] = {}
        for start, draft in enumerate(drafts):
            assert 0 <= draft.accepted <= draft_tokens
            for depth, confidence in enumerate(draft.confidences[: draft.accepted + 1]):
                fate = (depth < draft.accepted, confidence)
                assert fates.setdefault((start + depth) % positions, fate) == fate


def test_seeded_and_the_same_however_many_positions() -> None:
    def fates(positions: int, seed: int) -> list[int]:
        trace = synthetic_trace(5.0, 5.0, 5.0, 1, positions, seed, 4 + 4, LAW)
        return [draft.accepted for draft in trace.drafts[0][:40]]

    assert fates(60, 3) == fates(60, 3) == fates(90, 3)
    assert fates(60, 3) != fates(60, 4)


def test_confidence_predicts_acceptance_as_in_the_recorded_trace() -> None:
    assert LAW.auc == pytest.approx(0.916, abs=0.005)
    trace = synthetic_trace(8.0, 2.0, 16.0, requests=10, positions=1500, seed=0)
    made = ConfidenceLaw.of(trace)
    assert made.auc == pytest.approx(LAW.auc, abs=0.01)
    for ours, theirs in ((made.right, LAW.right), (made.wrong, LAW.wrong), (made.astray, LAW.astray)):
        assert ours.mean() == pytest.approx(theirs.mean(), abs=0.02)


def test_auc_of_a_law() -> None:
    def law(*drafts: Draft) -> ConfidenceLaw:
        return ConfidenceLaw.of(Trace("t", "m", 0, 1, (drafts,)))

    assert law(Draft(1, (0.9, 0.1, 0.5))).auc == 1.0
    assert law(Draft(1, (0.1, 0.9, 0.5))).auc == 0.0
    assert law(Draft(2, (0.5, 0.1, 0.5, 0.2))).auc == 0.25
    with pytest.raises(UserError, match="right and wrong"):
        law(Draft(2, (0.5, 0.5)))


def test_the_simulator_takes_it() -> None:
    trace = synthetic_trace(8.0, 3.0, 14.0, requests=6, positions=300, seed=2, law=LAW)
    replay = Replay(batch_size=6, tokens=200, repeats=1)
    speeds = {
        p: run_policy(trace, p, SimulatedCost(), replay).tokens_per_s
        for p in ("autoregressive", "confidence", "hindsight")
    }
    assert speeds["autoregressive"] < speeds["confidence"] < speeds["hindsight"]


@pytest.mark.parametrize(
    ("lengths", "changes", "words"),
    [
        ((5.0, 6.0, 7.0), {}, "5,6,7"),
        ((5.0, 0.5, 7.0), {}, "0.5"),
        ((5.0, 2.0, 33.0), {}, "< 33"),
        ((5.0, 5.0, 7.0), {}, "between"),
        ((float("nan"), 2.0, 7.0), {}, "nan"),
        ((5.0, 2.0, 7.0), {"requests": 0}, "requests 0"),
        ((5.0, 2.0, 7.0), {"positions": 0}, "positions 0"),
        ((5.0, 2.0, 7.0), {"seed": -1}, "seed -1"),
        ((5.0, 2.0, 7.0), {"draft_tokens": 0}, "draft_tokens 0"),
    ],
)
def test_bad_numbers(lengths: tuple[float, float, float], changes: dict[str, int], words: str) -> None:
    settings = {"requests": 2, "positions": 10, "seed": 0, **changes}
    with pytest.raises(UserError, match=words):
        synthetic_trace(*lengths, **settings, law=LAW)


def test_probability_of_a_length() -> None:
    assert right_probability(1.0, 8) == pytest.approx(0.0, abs=1e-6)
    p = right_probability(6.0, 8)
    assert sum(p**k for k in range(9)) == pytest.approx(6.0)
