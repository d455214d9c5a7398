"""Verifications that wait for each other, and a device that waits for its host: what policies make of either."""

from dataclasses import replace
from statistics import mean

import pytest

from aspire_llm.policy.base import Action, RequestView, StepLoad
from aspire_llm.policy.confidence import Confidence
from aspire_llm.policy.cost import CostModel
from aspire_llm.policy.factory import make_policy
from aspire_llm.policy.per_request import PerRequestPolicy
from aspire_llm.policy.rows import RowCosts
from aspire_llm.policy.simulator import Replay, SimulatedCost, Simulation
from aspire_llm.policy.trace import shipped_traces
from policy_driver import ADAPTIVE, LENGTH, NO_LOAD, READS, Driver, any_policy, long_context


@pytest.mark.parametrize("name", ADAPTIVE)
def test_no_drafts_where_the_host_is_slower_than_a_step_of_them(name: str) -> None:
    """A plain step of 256 rows takes the device 11 ms, one of drafts 3 and the host 11: only a fast host makes drafts pay."""

    def mean_drafts(host_seconds: float) -> float:
        cost = CostModel(0.001, 2e-6, 9.5e-3 / (256 * LENGTH))
        policy = make_policy(name, cost, READS)
        driver = Driver(policy, range(256), lambda key: (6, [0.99] * 24))
        for _ in range(60):
            actions = driver.step()
            drafting = Action.DRAFT in actions
            policy.observe_step(StepLoad(0, 0.0, 0.0, host_seconds=host_seconds if drafting else 0.7 * host_seconds))
        late = [drafted for cycles in driver.cycles.values() for drafted, _ in cycles[-3:]]
        return mean(late)

    assert mean_drafts(0.002) >= 2.0
    assert mean_drafts(0.014) < 0.3


def test_together_verifications_are_fewer_steps_and_tokens_come_faster() -> None:
    """A step with any verification takes a fifth longer, whatever it holds."""
    trace = shipped_traces("refreshed_16")["qwen2.5-coder-0.5b_28k_code"]
    cost = SimulatedCost(verify_step=0.3, per_check=0.1 / 28_000)
    replay = Replay(batch_size=16, tokens=128, repeats=2, late=True)

    def tokens_per_s(told: float) -> tuple[float, float]:
        policy = make_policy("confidence", replace(cost, verify_step=told).model(), cost.reads)
        run = Simulation(trace, cost, replay).run(policy)
        return run.tokens_per_s, run.num_draft_tokens / run.num_cycles

    (alone, drafts_alone), (together, drafts_together) = tokens_per_s(0.0), tokens_per_s(0.3)
    assert together > 1.02 * alone
    assert drafts_together > drafts_alone  # they draft on meanwhile


@pytest.mark.parametrize("name", ["fsm", "ema"])
def test_policies_that_do_not_know_what_waiting_loses_do_not_wait(name: str) -> None:
    policy = any_policy(name, None, verify_step=5.0)
    assert isinstance(policy, PerRequestPolicy)
    views = [RequestView(key, LENGTH, key % 4, (0.9,) * (key % 4), 8) for key in range(12)]
    asked = [Action.DRAFT if key % 3 else Action.VERIFY for key in range(12)]
    for _ in range(20):
        assert policy._wait(views, list(asked), 0.0) == asked


def test_nobody_waits_where_the_device_waits_for_its_host() -> None:
    """Verifications fill its time: spread over all steps they cost the least."""
    policy = Confidence(CostModel(1.0, 0.0, 0.35 / LENGTH, verify_step=0.5), READS)
    views = [RequestView(key, LENGTH, 2, (0.9, 0.9), 24) for key in range(4)]
    policy.decide(views, NO_LOAD)  # what one more draft would lose is known now
    asked = [Action.VERIFY, Action.DRAFT, Action.DRAFT, Action.DRAFT]
    policy._cycles.loss[:] = 0.05
    assert policy._wait(views, list(asked), 0.0) == [Action.DRAFT] * 4
    assert policy._wait(views, list(asked), 0.5) == asked


def test_a_device_waits_for_a_host_that_is_slower_than_a_step_of_drafts() -> None:
    cost = CostModel(1.0, 0.1, 0.35 / LENGTH)
    load = StepLoad(7, 5000.0)
    drafts = cost.predict(StepLoad(7 + 16, 5000.0 + 16 * READS.draft(LENGTH, 4)))
    for host in (0.0, 0.5 * drafts, drafts, 1.5 * drafts):
        costs = RowCosts.of_step(cost, READS, 16, load, host_seconds=host, length=LENGTH)
        assert costs.idle == pytest.approx(max(0.0, host - drafts))


def test_a_host_that_keeps_up_changes_nothing() -> None:
    cost = long_context()
    alone = RowCosts.of_step(cost, READS, 16, NO_LOAD)
    beside = RowCosts.of_step(cost, READS, 16, NO_LOAD, host_seconds=0.5, length=LENGTH)
    assert (beside.draft(LENGTH, 2), beside.verify(LENGTH), beside.check(LENGTH)) == (
        alone.draft(LENGTH, 2),
        alone.verify(LENGTH),
        alone.check(LENGTH),
    )
