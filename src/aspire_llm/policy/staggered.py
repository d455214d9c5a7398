"""A fixed draft length with the requests' phases spread at admission: as SparseSpec does."""

from __future__ import annotations

from collections.abc import Sequence

from aspire_llm.policy.base import Action, CycleOutcome, RequestView, StepLoad
from aspire_llm.policy.rows import VerifyBound


class Staggered:
    """Every cycle has g drafts, but a request's first cycle has f ≤ g, so that it verifies in the step, of the g + 1 to
    come, in which the fewest others do. From then on each verifies every g + 1 steps and the phases stay spread."""

    def __init__(self, draft_length: int, max_verify_tokens: int | None = None) -> None:
        self._draft_length = draft_length
        self._bound = VerifyBound(max_verify_tokens)
        self._targets: dict[int, int] = {}  # drafts of the current cycle

    def decide(self, requests: Sequence[RequestView], prefill: StepLoad) -> list[Action]:
        due = [0] * (self._draft_length + 1)  # [steps from now]: verifications
        new = []
        for view in requests:
            if view.key in self._targets:
                due[max(0, min(self._targets[view.key], view.max_draft) - view.pending)] += 1
            else:
                new.append(view.key)
        for key in new:
            phase = min(range(len(due)), key=lambda f: (due[f], -f))
            due[phase] += 1
            self._targets[key] = phase
        actions = self._bound.apply(
            requests,
            [
                Action.DRAFT if view.pending < min(self._targets[view.key], view.max_draft) else Action.VERIFY
                for view in requests
            ],
        )
        for view, action in zip(requests, actions, strict=True):
            if action is Action.VERIFY:
                self._targets[view.key] = self._draft_length
        return actions

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        pass

    def observe_step(self, load: StepLoad) -> None:
        pass

    def forget(self, key: int) -> None:
        self._targets.pop(key, None)
        self._bound.forget(key)
