"""What policy `confidence` learns, and when: each request's own map from confidence to acceptance."""

import random
from statistics import mean

import numpy as np
import pytest

from aspire_llm.policy.base import CycleOutcome, RequestView
from aspire_llm.policy.calibration import (
    BATCH_WEIGHT,
    NUM_BINS,
    PRIOR_REJECTION,
    REQUEST_KEEP,
    REQUEST_WEIGHT,
    TREND_CAP,
    TREND_KEEP,
    TREND_WEIGHT,
    Calibration,
    bins_of,
)
from aspire_llm.policy.confidence import Confidence
from aspire_llm.policy.rows import Ints, RowCosts
from policy_driver import LENGTH, NO_LOAD, READS, long_context


def bin_of(confidence: float) -> int:
    return int(bins_of([confidence])[0])


def at(*places: int) -> Ints:
    return np.array(places)


def test_calibration_learns_each_requests_own_map() -> None:
    rng, calibration = random.Random(0), Calibration(4)
    true = {1: {0.25: 0.9, 0.85: 0.99}, 2: {0.25: 0.3, 0.85: 0.8}}
    for _ in range(600):
        for key, rates in true.items():
            confidences = [rng.choice((0.25, 0.85)) for _ in range(12)]
            accepted = next((i for i, c in enumerate(confidences) if rng.random() >= rates[c]), 12)
            calibration.observe(at(key), [confidences], at(accepted))
    for key, rates in true.items():
        odds = calibration.odds(at(key))
        for confidence, rate in rates.items():
            assert 1.0 - odds.reject[0, bin_of(confidence)] == pytest.approx(rate, abs=0.08)
        assert odds.accept_next[0, bin_of(0.85)] == pytest.approx(mean(rates.values()), abs=0.08)
    fresh = calibration.odds(at(3))  # the batch is the prior of a newcomer
    assert true[2][0.25] < 1.0 - fresh.reject[0, bin_of(0.25)] < true[1][0.25]
    calibration.begin(1)
    both = calibration.odds(at(1, 3))
    for of in (both.reject, both.evidence, both.accept_next):
        assert (of[0] == of[1]).all()


def test_cycles_learned_together_are_those_of_draft_after_draft() -> None:
    """Against the recursion that rates are defined by; only the batch's are those from before all of them."""
    rng, places, calibration = random.Random(1), [0, 2, 3], Calibration(4)
    counts = {place: [[0.0] * NUM_BINS for _ in range(2)] for place in places}  # rejected and tried, by bin
    trends = {place: [TREND_WEIGHT] * 2 for place in places}  # happened and expected
    batch = [[rate * BATCH_WEIGHT for rate in PRIOR_REJECTION], [BATCH_WEIGHT] * NUM_BINS]
    for _ in range(30):
        cycles = [[rng.betavariate(3.0, 0.5) for _ in range(rng.randrange(7))] for _ in places]
        accepted = [rng.randint(0, len(cycle)) for cycle in cycles]
        calibration.observe(at(*places), cycles, at(*accepted))
        rates = [a / b for a, b in zip(*batch, strict=True)]
        for place, cycle, right in zip(places, cycles, accepted, strict=True):
            rejected, tried = counts[place]
            for n, confidence in enumerate(cycle[: right + 1]):
                b, wrong = bin_of(confidence), float(n == right)
                rejected[b], tried[b] = REQUEST_KEEP * rejected[b] + wrong, REQUEST_KEEP * tried[b] + 1.0
                for i, now in enumerate((wrong, rates[b])):
                    trends[place][i] = TREND_KEEP * trends[place][i] + (1.0 - TREND_KEEP) * TREND_WEIGHT + now
                batch[0][b] += wrong
                batch[1][b] += 1.0
    odds = calibration.odds(at(*places))
    rates = [a / b for a, b in zip(*batch, strict=True)]
    for row, place in enumerate(places):
        trend = trends[place][0] / trends[place][1]
        for b, (rejected, tried) in enumerate(zip(*counts[place], strict=True)):
            known = (rejected + REQUEST_WEIGHT * min(trend * rates[b], TREND_CAP)) / (tried + REQUEST_WEIGHT)
            assert odds.reject[row, b] == pytest.approx(known, rel=1e-9)


def test_calibration_counts_nothing_after_the_first_rejection_as_a_draft_that_was_tried() -> None:
    calibration = Calibration(2)
    before = calibration.odds(at(1)).reject[0]
    calibration.observe(at(0), [[0.95, 0.25, 0.55, 0.55, 0.55]], at(1))
    after = calibration.odds(at(1)).reject[0]
    assert after[bin_of(0.55)] == before[bin_of(0.55)]
    assert after[bin_of(0.25)] > before[bin_of(0.25)]
    assert after[bin_of(0.95)] < before[bin_of(0.95)]


def test_requests_asked_together_are_answered_as_each_alone() -> None:
    """More of them than there are places at first, of every state, while others come and go."""
    rng = random.Random(0)
    together, alone = (Confidence(long_context(), READS) for _ in range(2))
    state = {key: (0, list[float]()) for key in range(40)}
    drafted = 0
    for step in range(60):
        if step % 7 == 6:
            left, state[100 + step] = rng.choice(list(state)), (0, [])
            del state[left]
            together.forget(left)
            alone.forget(left)
        views = [
            RequestView(key, rng.randint(9, LENGTH), pending, known[: rng.randint(max(0, pending - 2), pending)], 24)
            for key, (pending, known) in state.items()
        ]
        costs = RowCosts.of_step(long_context(), READS, len(views), NO_LOAD)
        together._learn()
        alone._learn()
        answers = together._want_drafts(views, costs)
        assert answers == [alone._want_drafts([view], costs)[0] for view in views]
        for view, drafts in zip(views, answers, strict=True):
            pending, known = state[view.key]
            if drafts and pending < 24:
                state[view.key] = pending + 1, [*known, rng.betavariate(5.0, 0.4)]
                drafted += 1
            else:
                state[view.key] = 0, []
                outcome = CycleOutcome(view.key, pending, rng.randint(0, pending), tuple(known))
                together.observe_cycle(outcome)
                alone.observe_cycle(outcome)
        assert together.price == pytest.approx(alone.price, rel=1e-12)
    assert 200 < drafted < 60 * 40 - 200


@pytest.mark.parametrize(("verified", "steps"), [(1, 4), (2, 1), (8, 1)])
def test_outcomes_are_learned_from_once_a_quarter_has_one_or_after_four_steps(verified: int, steps: int) -> None:
    policy = Confidence(long_context(), READS)
    views = [RequestView(key, LENGTH, 0, (), 16) for key in range(8)]
    policy.decide(views, NO_LOAD)
    policy._learn()
    before = policy.price
    for key in range(verified):
        policy.observe_cycle(CycleOutcome(key, 8, 8, (0.999,) * 8))
    for _ in range(steps):
        assert policy.price == before
        policy.decide(views, NO_LOAD)
    assert policy.price > before
