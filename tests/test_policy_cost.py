"""The cost model: what it recovers, what it follows, what it refuses."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aspire_llm.errors import UserError
from aspire_llm.policy.base import StepLoad
from aspire_llm.policy.cost import CostModel, ReadModel, _solve_nonnegative
from aspire_llm.policy.rows import PASS_SHARE, RowCosts

TRUE = (4e-3, 5e-6, 2e-8)


def step(rng: random.Random, speed: float = 1.0, noise: float = 0.03, free: float = 0.0) -> StepLoad:
    tokens, kv = rng.randrange(1, 400), rng.uniform(0, 400_000)
    seconds = TRUE[0] + TRUE[1] * max(0.0, tokens - free) + TRUE[2] * kv
    return StepLoad(tokens, kv, seconds * speed * rng.lognormvariate(0.0, noise))


def test_fit_recovers_known_coefficients_from_noisy_steps() -> None:
    rng = random.Random(1)
    model = CostModel.fit([step(rng) for _ in range(200)])
    assert (model.fixed, model.per_token, model.per_kv) == pytest.approx(TRUE, rel=0.05)


def test_fit_chooses_the_hinge_that_the_steps_show() -> None:
    rng = random.Random(2)
    assert CostModel.fit([step(rng, free=128) for _ in range(200)], free_tokens=(0.0, 128.0)).free_tokens == 128.0
    assert CostModel.fit([step(rng) for _ in range(200)], free_tokens=(0.0, 128.0)).free_tokens == 0.0


def test_fit_never_gives_a_negative_coefficient() -> None:
    falling = [StepLoad(n, 0.0, 1.0 - n / 100) for n in range(1, 50)]
    model = CostModel.fit(falling)
    assert min(model.fixed, model.per_token, model.per_kv) >= 0.0
    assert model.fixed > 0.0


def test_online_estimates_approach_the_truth_from_a_bad_start() -> None:
    rng = random.Random(3)
    model = CostModel(1e-3, 5e-5, 1e-9)
    for _ in range(500):
        model.observe(step(rng))
    assert (model.fixed, model.per_token, model.per_kv) == pytest.approx(TRUE, rel=0.15)


def test_follows_a_machine_that_slows_by_half_in_mid_run() -> None:
    rng = random.Random(4)
    model = CostModel.fit([step(rng) for _ in range(60)])
    for i in range(200):
        model.observe(step(rng, speed=1.0 if i < 100 else 2.0))
    assert model.share_within(0.1) >= 0.9
    assert model.fixed == pytest.approx(2 * TRUE[0], rel=0.15)
    assert model.per_kv == pytest.approx(2 * TRUE[2], rel=0.15)


def test_outliers_do_not_move_it() -> None:
    rng = random.Random(5)
    model = CostModel.fit([step(rng) for _ in range(60)])
    for i in range(300):
        load = step(rng)
        model.observe(StepLoad(load.tokens, load.kv_tokens, load.seconds * (50.0 if i % 10 == 0 else 1.0)))
    quiet = [step(rng, noise=0.0) for _ in range(50)]
    assert all(model.predict(s) == pytest.approx(s.seconds, rel=0.15) for s in quiet)


def test_steps_that_never_vary_leave_the_other_directions_alone() -> None:
    """A steady batch says nothing about the split: the coefficients must stay where calibration put them."""
    rng = random.Random(6)
    model = CostModel.fit([step(rng, noise=0.0) for _ in range(60)])
    same = StepLoad(64, 100_000.0, TRUE[0] + TRUE[1] * 64 + TRUE[2] * 100_000)
    for _ in range(5000):
        model.observe(same)
    assert (model.fixed, model.per_token, model.per_kv) == pytest.approx(TRUE, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 10**5), st.floats(0, 1e9), st.just(0.0) | st.floats(1e-7, 1e4)), max_size=60))
def test_any_steps_leave_finite_non_negative_coefficients(steps: list[tuple[int, float, float]]) -> None:
    model = CostModel(1e-3, 1e-6, 1e-8)
    for tokens, kv, seconds in steps:
        model.observe(StepLoad(tokens, kv, seconds))
    for value in (model.fixed, model.per_token, model.per_kv):
        assert 0.0 <= value < float("inf")
    assert model.fixed + model.per_token + model.per_kv > 0.0
    assert 0.0 <= model.share_within() <= 1.0


def test_reads_of_rows() -> None:
    reads = ReadModel(budget=512, num_layers=24, num_refresh_layers=1)
    assert reads.draft(28_000, 0) == pytest.approx(512 * 23 / 24 + 28_000 / 24)
    assert reads.draft(28_000, 10) - reads.draft(28_000, 0) == pytest.approx(10 * 23 / 24)
    assert reads.draft(300, 5) == 300  # no layer reads more than there is
    assert reads.verify(28_000) == 28_000


def test_row_costs_share_the_fixed_part_and_the_prefill_takes_a_share() -> None:
    cost, reads = CostModel(1.0, 0.0, 1e-5), ReadModel(0, 2, 0)
    assert RowCosts.of_step(cost, reads, 16, StepLoad(0, 0.0)).share == pytest.approx(1 / 16)
    assert RowCosts.of_step(cost, reads, 16, StepLoad(512, 1e5)).share == pytest.approx(1 / 17)


def test_tokens_are_free_below_the_hinge() -> None:
    cost, reads = CostModel(1.0, 0.01, 1e-5, free_tokens=128), ReadModel(0, 2, 0)
    assert RowCosts.of_step(cost, reads, 64, StepLoad(0, 0.0)).per_token == 0.0
    assert RowCosts.of_step(cost, reads, 256, StepLoad(0, 0.0)).per_token == pytest.approx(0.01 * (1 - 128 / 512))


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="negative"):
        CostModel(-1.0, 0.0, 0.0)
    with pytest.raises(UserError, match="at least 3"):
        CostModel.fit([StepLoad(1, 1.0, 1.0)])
    with pytest.raises(UserError, match="num_refresh_layers"):
        ReadModel(512, 24, 25)


def test_checks_are_told_apart_from_reads() -> None:
    """Fixed, per token, per KV token and per checked KV token from noisy steps, by the fit and online."""
    true = CostModel(0.05, 0.004, 5.5e-6, per_check=5.3e-6)
    rng = random.Random(0)

    def step() -> StepLoad:
        kv, tokens = rng.uniform(1e3, 4e4), rng.randint(1, 64)
        checked = rng.choice((0.0, rng.uniform(0.0, kv)))
        seconds = true.predict(StepLoad(tokens, kv, checked_kv=checked)) * rng.uniform(0.97, 1.03)
        return StepLoad(tokens, kv, seconds, checked)

    fitted = CostModel.fit([step() for _ in range(200)])
    online = CostModel(0.05, 0.004, 5.5e-6)
    for _ in range(600):
        online.observe(step())
    for model in (fitted, online):
        assert (model.per_kv, model.per_check) == pytest.approx((5.5e-6, 5.3e-6), rel=0.15)


def test_what_a_step_pays_once_for_its_verifications() -> None:
    """Told apart by the fit from what each of them costs; online it follows the machine's speed, and predictions stay right."""
    true = CostModel(0.005, 1.4e-5, 3.3e-8, per_check=8e-9, verify_step=0.0012)
    rng = random.Random(0)

    def step(slower: float = 1.0) -> StepLoad:
        kv, tokens = rng.uniform(1e3, 5e5), rng.randint(1, 64)
        checked = rng.choice((0.0, rng.uniform(0.1, 1.0) * kv))
        seconds = slower * true.predict(StepLoad(tokens, kv, checked_kv=checked)) * rng.uniform(0.97, 1.03)
        return StepLoad(tokens, kv, seconds, checked)

    samples = [step() for _ in range(200)]
    model = CostModel.fit(samples, verify_step=True)
    assert model.verify_step == pytest.approx(0.0012, rel=0.15)
    assert (model.fixed, model.per_check) == pytest.approx((0.005, 8e-9), rel=0.15)
    assert CostModel.fit(samples).verify_step == 0.0
    for slower in (1.0, 1.5):
        for _ in range(300):
            model.observe(step(slower))
        assert model.share_within() >= 0.95
        assert model.verify_step == pytest.approx(slower * 0.0012, rel=0.2)


def test_a_draft_that_makes_the_verification_read_again_pays_for_it() -> None:
    passes = (1, 1, 1, 1, 2, 2, 3)
    reads, blind = ReadModel(10, 4, 0, passes), ReadModel(10, 4, 0)
    costs, plain = (RowCosts(0.1, 0.01, 1e-3, read) for read in (reads, blind))
    for pending in range(12):
        more = costs.draft(500, pending) - plain.draft(500, pending)
        # of pending + 1 drafts, pending + 2 tokens are verified
        assert more == pytest.approx(PASS_SHARE * 1e-3 * 500 if pending + 2 in (4, 6) else 0.0)
    assert [reads.extra_passes(n) for n in range(9)] == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert blind.extra_passes(50) == 0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(-3.0, 3.0), min_size=4, max_size=4), min_size=1, max_size=8),
    st.lists(st.floats(-5.0, 5.0), min_size=4, max_size=4),
)
def test_least_squares_without_negative_entries_are_the_least_there_are(
    rows: list[list[float]], b: list[float]
) -> None:
    """Against projected descent, which needs no sets of entries."""
    x = np.array(rows)
    a = x.T @ x + 0.1 * np.eye(4)
    found = np.array(_solve_nonnegative(a.tolist(), b))
    assert (found >= 0.0).all()
    least, step = np.zeros(4), 1.0 / np.linalg.norm(a, 2)
    for _ in range(4000):
        least = np.maximum(0.0, least - step * (a @ least - b))

    def value(at: NDArray[np.float64]) -> float:
        return float(at @ a @ at / 2 - b @ at)

    assert value(found) <= value(least) + 1e-6 * (1.0 + abs(value(least)))
