"""Requests made by hand for a policy to decide about, and a cost model for them."""

from collections.abc import Callable, Sequence

from aspire_llm.policy.base import Action, CycleOutcome, Policy, RequestView, StepLoad
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.factory import POLICY_SETTINGS, make_policy

NO_LOAD = StepLoad(0, 0.0)
READS = ReadModel(452, 24, 1)
LENGTH = 28_000
ADAPTIVE = ["fsm", "ema", "confidence"]


def long_context() -> CostModel:
    """Of 16 requests each pays 1/16 for the weights and 0.35 for a full read."""
    return CostModel(1.0, 0.0, 0.35 / LENGTH)


class Driver:
    """Runs a policy on requests whose drafts are accepted as `drafts(key)` says: (how many right, confidences)."""

    def __init__(
        self,
        policy: Policy,
        keys: Sequence[int],
        drafts: Callable[[int], tuple[int, Sequence[float]]],
        max_draft: int = 24,
    ) -> None:
        self.policy, self.drafts, self.max_draft = policy, drafts, max_draft
        self.current = {key: drafts(key) for key in keys}
        self.pending = dict.fromkeys(keys, 0)
        self.cycles: dict[int, list[tuple[int, int]]] = {key: [] for key in keys}  # (drafted, accepted)
        self.verify_tokens: list[int] = []

    def all_right(self, key: int, pending: int) -> bool:
        return self.current[key][0] >= pending

    def step(self) -> list[Action]:
        views = [RequestView(k, LENGTH, n, self.current[k][1][:n], self.max_draft) for k, n in self.pending.items()]
        actions = self.policy.decide(views, NO_LOAD)
        self.verify_tokens.append(sum(v.pending + 1 for v, a in zip(views, actions, strict=True) if a is Action.VERIFY))
        for view, action in zip(views, actions, strict=True):
            key = view.key
            if action is Action.DRAFT:
                assert view.pending < self.max_draft
                self.pending[key] += 1
            elif action is Action.VERIFY:
                right, confidences = self.current[key]
                accepted = min(right, view.pending)
                self.policy.observe_cycle(CycleOutcome(key, view.pending, accepted, confidences[: view.pending]))
                self.cycles[key].append((view.pending, accepted))
                self.pending[key], self.current[key] = 0, self.drafts(key)
        return actions

    def run(self, cycles: int) -> None:
        while min(len(c) for c in self.cycles.values()) < cycles:
            self.step()


class Fair:
    """A truth that knows nothing: every other question is answered yes."""

    def __init__(self) -> None:
        self.asked = 0

    def all_right(self, key: int, pending: int) -> bool:
        self.asked += 1
        return bool(self.asked % 2)


def any_policy(name: str, limit: int | None, verify_step: float = 0.0) -> Policy:
    takes, _ = POLICY_SETTINGS[name]
    return make_policy(
        name,
        CostModel(1.0, 0.0, 0.35 / LENGTH, verify_step=verify_step),
        READS,
        draft_length=5 if "draft_length" in takes else None,
        max_verify_tokens=limit if "max_verify_tokens" in takes else None,
        truth=Fair() if "truth" in takes else None,
    )
