"""What the rows of a step have in common for a policy: the host's pace, and verifications that wait for each other."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire_llm.policy.base import StepLoad
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.rows import HostPace, RowCosts, VerifyTogether


def test_verifications_wait_for_each_other_while_that_lowers_the_cost_of_a_step() -> None:
    waiting = VerifyTogether()
    assert waiting.waits(1.0, 0.4)  # two steps for 1.4, where one had cost 1.0
    assert waiting.waits(1.0, 0.5)  # three for 1.9
    assert not waiting.waits(1.0, 0.7)  # four for 2.6 would cost more each
    assert waiting.waits(1.0, 0.9)  # begins anew
    assert not waiting.waits(1.0, math.inf)  # somebody cannot draft on
    for _ in range(9):
        assert waiting.waits(1.0, 0.0)  # nobody asks
    assert not waiting.waits(1.0, 0.2)  # ten steps have shared it already


def test_a_host_that_stumbled_is_not_a_slow_host() -> None:
    """A kernel that is compiled holds the host up for a hundred steps' time: drafts are worth no less after it."""
    pace = HostPace()
    for i in range(60):
        pace.observe(StepLoad(0, 0.0, 0.0, host_seconds=0.5 if i in (2, 3, 20, 40, 42) else 0.004))
    assert pace.seconds == pytest.approx(0.004, rel=0.05)


def test_a_host_that_is_slow_for_a_while_is_seen_and_forgiven() -> None:
    pace = HostPace()

    def after(steps: int, seconds: float) -> float:
        for _ in range(steps):
            pace.observe(StepLoad(0, 0.0, 0.0, host_seconds=seconds))
        return pace.seconds

    assert after(60, 0.004) == pytest.approx(0.004, rel=0.01)
    assert after(30, 0.040) > 0.035
    assert after(30, 0.004) > 0.025  # not at once
    assert after(600, 0.004) < 0.0042


@given(
    st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 40)), min_size=1, max_size=9),
    st.sampled_from([(), (0, *[1] * 18, *[2] * 18)]),
)
def test_rows_cost_together_what_they_cost_one_by_one(rows: list[tuple[int, int]], passes: tuple[int, ...]) -> None:
    cost = CostModel(0.005, 1e-5, 3e-8, 64.0, 1e-8, 0.001)
    costs = RowCosts.of_step(cost, ReadModel(512, 36, 2, passes), len(rows), StepLoad(0, 0.0), 0.004, 20_000.0, 3.0)
    columns = costs.of_rows(np.array([float(length) for length, _ in rows]), np.array([pending for _, pending in rows]))
    for (length, pending), *row in zip(rows, *columns, strict=True):
        one = costs.draft(length, pending), costs.verify(length), costs.check(length)
        assert row == pytest.approx(one, rel=1e-12)
