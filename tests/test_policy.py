"""Every policy on hand-made sequences, and what all of them must keep."""

import random
from collections.abc import Callable, Sequence
from statistics import mean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.errors import UserError
from aspire_llm.policy.acceptance import SmoothedRate, expected_tokens
from aspire_llm.policy.base import Action, CycleOutcome, RequestView, StepLoad
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.factory import POLICY_SETTINGS, make_policy
from policy_driver import ADAPTIVE, LENGTH, NO_LOAD, READS, Driver, any_policy, long_context


def constant(rate: float, seed: int = 0) -> Callable[[int], tuple[int, Sequence[float]]]:
    """Every draft right with the same probability; confidences tell nothing."""
    rng = random.Random(seed)

    def drafts(key: int) -> tuple[int, Sequence[float]]:
        right = 0
        while right < 64 and rng.random() < rate:
            right += 1
        return right, [0.85] * 64

    return drafts


def brute_force(rate: float, n: int, cost: CostModel, longest: int) -> int:
    def value(g: int) -> float:
        drafts = sum(cost.fixed / n + cost.per_kv * READS.draft(LENGTH, 1) for _ in range(g))
        tokens = sum(rate**i for i in range(g + 1))
        return tokens / (drafts + cost.fixed / n + cost.per_kv * LENGTH)

    return max(range(longest + 1), key=value)


# --- estimates


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 0.999, 1.0])
def test_expected_tokens_is_the_geometric_sum(rate: float) -> None:
    for g in range(20):
        assert expected_tokens(rate, g) == pytest.approx(sum(rate**i for i in range(g + 1)))


@pytest.mark.parametrize("drafted", [1, 5, 20])
def test_smoothed_rate_is_unbiased_whatever_the_draft_length(drafted: int) -> None:
    """accepted/drafted would give 0.41 at 20 drafts of rate 0.9; the mean of per-cycle quotients is low as well."""
    rng, estimate = random.Random(0), SmoothedRate(0.5, 5.0, 0.999)
    for _ in range(4000):
        right = 0
        while right < drafted and rng.random() < 0.9:
            right += 1
        estimate.observe(drafted, right)
    assert estimate.value == pytest.approx(0.9, abs=0.015)


# --- draft lengths


@pytest.mark.parametrize("accepted", [1, 2, 5, 12, 30])
@pytest.mark.parametrize("n", [1, 16, 64])
def test_ema_chooses_the_argmax_at_constant_acceptance(accepted: int, n: int) -> None:
    """Cycles of `accepted` right drafts and a wrong one: the rate is accepted / (accepted + 1), exactly, once the prior
    has faded."""
    cost = long_context()
    policy = make_policy("ema", cost, READS)
    views = [RequestView(key, LENGTH, 0, (), 24) for key in range(n)]
    for _ in range(100):
        policy.decide(views, NO_LOAD)
        for key in range(n):
            policy.observe_cycle(CycleOutcome(key, accepted + 1, accepted, [0.9] * (accepted + 1)))
    policy.decide(views, NO_LOAD)  # chooses for this cycle
    wanted = brute_force(accepted / (accepted + 1), n, cost, 24)
    for pending in range(1, 25):
        actions = policy.decide([RequestView(key, LENGTH, pending, (), 24) for key in range(n)], NO_LOAD)
        assert actions == [Action.DRAFT if pending < wanted else Action.VERIFY] * n


@pytest.mark.parametrize("name", ["ema", "confidence"])
def test_uninformative_confidences_give_the_length_of_the_rate(name: str) -> None:
    """With confidences that tell nothing, optimal stopping is a fixed length: the brute-force one, within its flat top."""
    cost = long_context()
    driver = Driver(make_policy(name, cost, READS), range(16), constant(0.9))
    driver.run(60)
    wanted = brute_force(0.9, 16, cost, driver.max_draft)
    recent = [c for cycles in driver.cycles.values() for c in cycles[20:]]
    tokens = sum(a + 1 for _, a in recent)
    draft, verify = 1 / 16 + cost.per_kv * READS.draft(LENGTH, 1), 1 / 16 + 0.35
    reached = tokens / sum(d * draft + verify for d, _ in recent)
    assert reached >= 0.96 * expected_tokens(0.9, wanted) / (wanted * draft + verify)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_sudden_drop_shortens_within_a_few_cycles(name: str) -> None:
    good = [True]
    driver = Driver(
        make_policy(name, long_context(), READS), [0], lambda key: (64, [0.97] * 64) if good[0] else (0, [0.35] * 64)
    )
    driver.run(30)
    before = driver.cycles[0][-1][0]
    assert before >= 10
    good[0] = False
    driver.run(31)  # the cycle under way
    driver.run(31 + 12)
    assert driver.cycles[0][-1][0] <= before // 3


@pytest.mark.parametrize("name", ADAPTIVE)
def test_infinite_kv_cost_gives_long_drafts(name: str) -> None:
    reads = ReadModel(512, 24, 0)
    driver = Driver(make_policy(name, CostModel(1.0, 0.0, 1e6), reads), range(4), constant(0.99))
    driver.run(40)
    assert mean(d for c in driver.cycles.values() for d, _ in c[20:]) >= 18


@pytest.mark.parametrize("name", [*ADAPTIVE, "hindsight"])
@pytest.mark.parametrize("rate", [0.7, 1.0])
def test_zero_kv_cost_gives_none(name: str, rate: float) -> None:
    driver = Driver.__new__(Driver)
    policy = make_policy(name, CostModel(1.0, 1e-3, 0.0), READS, truth=driver if name == "hindsight" else None)
    driver.__init__(policy, range(8), constant(rate))  # type: ignore[misc]
    driver.run(100)
    assert all(d == 0 for c in driver.cycles.values() for d, _ in c)


@pytest.mark.parametrize("name", ["ema", "confidence"])
def test_drafts_that_never_pay_cost_at_most_two_percent(name: str) -> None:
    """Every draft is wrong: all but the first few cycles and the paid-for probes are plain."""
    cost = long_context()
    driver = Driver(make_policy(name, cost, READS), range(4), lambda key: (0, [0.9] * 64))
    driver.run(1500)
    draft, verify = 1 / 4 + cost.per_kv * READS.draft(LENGTH, 1), 1 / 4 + 0.35
    for cycles in driver.cycles.values():
        assert any(d for d, _ in cycles[500:])  # it goes on probing
        assert sum(d * draft for d, _ in cycles[:1500]) <= 0.02 * verify * 1500


@pytest.mark.parametrize("name", ["ema", "confidence"])
def test_a_request_that_turns_good_is_found_again(name: str) -> None:
    good = [False]
    driver = Driver(make_policy(name, long_context(), READS), [0], lambda key: (64 if good[0] else 0, [0.9] * 64))
    driver.run(400)
    good[0] = True
    driver.run(1500)
    assert driver.cycles[0][-1][0] >= 8


@pytest.mark.parametrize("name", ["ema", "confidence"])
def test_no_oscillation_at_constant_acceptance(name: str) -> None:
    """Deterministic acceptance of 6 in every cycle: the length settles."""
    driver = Driver(make_policy(name, long_context(), READS), [0], lambda key: (6, [0.9] * 64))
    driver.run(200)
    tail = [d for d, _ in driver.cycles[0][-60:]]
    assert pstdev(tail) <= 1.5


def test_confidence_stops_at_a_draft_that_its_request_has_shown_to_be_doubtful() -> None:
    """Wrong exactly where the confidence falls: after a while it verifies right there, and drafts long otherwise."""
    rng = random.Random(0)

    def drafts(key: int) -> tuple[int, Sequence[float]]:
        right = rng.randrange(2, 20)
        return right, [0.97] * right + [0.15] + [0.85] * (64 - right)

    driver = Driver(make_policy("confidence", long_context(), READS), range(8), drafts)
    driver.run(60)
    recent = [c for cycles in driver.cycles.values() for c in cycles[30:]]
    assert mean(d == a + 1 for d, a in recent) >= 0.95


def test_hindsight_verifies_exactly_when_a_draft_has_gone_wrong() -> None:
    driver = Driver.__new__(Driver)
    policy = make_policy("hindsight", long_context(), READS, truth=driver)
    driver.__init__(policy, range(4), constant(0.9), max_draft=12)  # type: ignore[misc]
    driver.run(50)
    assert all(d == min(a + 1, 12) for c in driver.cycles.values() for d, a in c)


def test_fsm_lengthens_on_full_acceptance_and_shortens_on_rejection() -> None:
    right = [64]
    driver = Driver(make_policy("fsm", long_context(), READS), [0], lambda key: (right[0], [0.9] * 64), max_draft=16)
    driver.run(10)
    lengths = [d for d, _ in driver.cycles[0]]
    assert lengths[0] == 4
    assert lengths == sorted(lengths)
    assert lengths[-1] == 16
    right[0] = 0
    driver.run(25)
    assert driver.cycles[0][-1][0] == 1


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_request_alone_drafts_no_longer_than_in_a_batch(name: str) -> None:
    """Alone it pays for the weights of every draft by itself; among 64 it shares them."""
    alone = Driver(make_policy(name, long_context(), READS), range(1), constant(0.95))
    batch = Driver(make_policy(name, long_context(), READS), range(64), constant(0.95))
    alone.run(100)
    batch.run(30)
    of_alone = mean(d for d, _ in alone.cycles[0][20:])
    of_batch = mean(d for c in batch.cycles.values() for d, _ in c[20:])
    if name == "fsm":  # knows no costs
        assert of_alone == pytest.approx(of_batch, rel=0.2)
    else:
        assert of_alone < of_batch


# --- phases


def test_lockstep_verifies_the_whole_batch_in_one_step() -> None:
    driver = Driver(make_policy("lockstep", long_context(), READS, draft_length=5), range(7), constant(0.9))
    for _ in range(60):
        assert len(set(driver.step())) == 1
    assert {d for c in driver.cycles.values() for d, _ in c} == {5}


def test_lockstep_waits_for_requests_that_may_draft_further_and_never_deadlocks() -> None:
    policy = make_policy("lockstep", long_context(), READS, draft_length=3)

    def decide(*pending_and_most: tuple[int, int]) -> list[Action]:
        return policy.decide([RequestView(i, 100, p, (), m) for i, (p, m) in enumerate(pending_and_most)], NO_LOAD)

    assert decide((0, 8), (0, 0)) == [Action.DRAFT, Action.WAIT]
    assert decide((1, 8), (1, 1)) == [Action.DRAFT, Action.WAIT]
    assert decide((3, 8), (1, 1)) == [Action.VERIFY] * 2
    assert decide((1, 1), (0, 0)) == [Action.VERIFY] * 2  # all wait: verify
    assert decide((3, 8), (0, 8)) == [Action.VERIFY] * 2  # a newcomer joins the batch's phase


def test_staggered_spreads_the_verifications() -> None:
    driver = Driver(make_policy("staggered", long_context(), READS, draft_length=7), range(32), constant(0.9))
    for _ in range(80):
        driver.step()
    assert set(driver.verify_tokens[8:]) == {32}  # 4 of 32 requests, 8 tokens each, in every step
    assert {d for c in driver.cycles.values() for d, _ in c[1:]} == {7}


@pytest.mark.parametrize("name", ["staggered", *ADAPTIVE])
def test_verify_tokens_are_bounded_and_nobody_starves(name: str) -> None:
    length = 7 if name == "staggered" else None
    policy = make_policy(name, long_context(), READS, draft_length=length, max_verify_tokens=40)
    driver = Driver(policy, range(24), lambda key: (64, [0.97] * 64), max_draft=10)
    for _ in range(400):
        driver.step()
    assert max(driver.verify_tokens) <= 40
    counts = [len(c) for c in driver.cycles.values()]
    assert min(counts) >= 0.8 * max(counts) > 10


# --- what every policy keeps


@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("name", list(POLICY_SETTINGS))
@given(
    seed=st.integers(0, 2**32), limit=st.sampled_from([None, 1, 9, 128]), verify_step=st.sampled_from([0.0, 0.3, 5.0])
)
def test_every_policy_keeps_the_protocol_whatever_happens(
    name: str, seed: int, limit: int | None, verify_step: float
) -> None:
    """Random requests that come and go, limits that move, confidences and outcomes that come late, after they have left."""
    rng, policy = random.Random(seed), any_policy(name, limit, verify_step)
    pending: dict[int, int] = {}
    late: list[CycleOutcome] = []
    next_key = stuck = 0
    for _ in range(60):
        while rng.random() < 0.4:
            pending[next_key], next_key = 0, next_key + 1
        views = []
        for key, n in pending.items():
            known = rng.randint(max(0, n - 1), n)
            confidences = [rng.choice((0.0, rng.random(), 1.0)) for _ in range(known)]
            views.append(RequestView(key, rng.randrange(1, 10**5), n, confidences, n + rng.randrange(4)))
        actions = policy.decide(views, StepLoad(rng.choice((0, 512)), rng.uniform(0, 1e5)))
        assert len(actions) == len(views)
        stuck = stuck + 1 if views and all(a is Action.WAIT for a in actions) else 0
        assert stuck == 0  # somebody always moves
        for view, action in zip(views, actions, strict=True):
            if action is Action.DRAFT:
                assert view.pending < view.max_draft
                pending[view.key] += 1
            elif action is Action.VERIFY:
                n, pending[view.key] = pending[view.key], 0
                late.append(CycleOutcome(view.key, n, rng.randint(0, n), [rng.random() for _ in range(n)]))
        while late and rng.random() < 0.7:
            policy.observe_cycle(late.pop(0))
        policy.observe_step(
            StepLoad(rng.randrange(500), rng.uniform(0, 1e6), rng.choice((0.0, rng.uniform(1e-4, 10.0))))
        )
        for key in [k for k in pending if rng.random() < 0.05]:
            policy.forget(key)
            del pending[key]


@pytest.mark.parametrize("name", list(POLICY_SETTINGS))
def test_forgetting_leaves_nothing_behind(name: str) -> None:
    def size(value: object, depth: int = 0) -> int:
        """Entries of all dictionaries in reach."""
        if isinstance(value, dict):
            return len(value) + sum(size(v, depth + 1) for v in value.values())
        if depth > 4 or not hasattr(value, "__dict__"):
            return 0
        return sum(size(v, depth + 1) for v in vars(value).values())

    policy = any_policy(name, 16)
    empty = size(policy)
    driver = Driver(policy, range(50), constant(0.8))
    driver.run(3)
    for key in range(50):
        policy.forget(key)
        policy.observe_cycle(CycleOutcome(key, 3, 1, (0.9, 0.5, 0.4)))  # a result that was still in flight
    policy.decide([RequestView(50, LENGTH, 0, (), 16)], NO_LOAD)  # until then, what the last step told may be kept
    policy.forget(50)
    assert size(policy) == empty


def test_unknown_names_and_settings_without_use_are_refused() -> None:
    with pytest.raises(UserError, match=r"known are autoregressive, lockstep.*hindsight"):
        make_policy("medusa", long_context(), READS)
    with pytest.raises(UserError, match="needs draft_length"):
        make_policy("lockstep", long_context(), READS)
    with pytest.raises(UserError, match=r"draft_length.*no such setting"):
        make_policy("ema", long_context(), READS, draft_length=4)
    with pytest.raises(UserError, match=r"max_verify_tokens.*no such setting"):
        make_policy("lockstep", long_context(), READS, draft_length=4, max_verify_tokens=128)
    with pytest.raises(UserError, match="draft_length 0"):
        make_policy("staggered", long_context(), READS, draft_length=0)
    with pytest.raises(UserError, match="max_verify_tokens 0"):
        make_policy("ema", long_context(), READS, max_verify_tokens=0)
    with pytest.raises(UserError, match="needs truth"):
        make_policy("hindsight", long_context(), READS)
