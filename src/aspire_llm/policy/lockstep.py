"""A fixed draft length for the whole batch, in phase: as MagicDec and Vegas do."""

from __future__ import annotations

from collections.abc import Sequence

from aspire_llm.policy.base import Action, CycleOutcome, RequestView, StepLoad


class Lockstep:
    """Everybody drafts until somebody has g drafts, then everybody verifies in the same step.

    A request that may draft no further waits for the others; one that joins in mid-phase verifies what it has by then. If
    nobody may draft, all verify: each step either adds a draft or verifies, so there is no deadlock.
    """

    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length

    def decide(self, requests: Sequence[RequestView], prefill: StepLoad) -> list[Action]:
        full = any(view.pending >= self._draft_length for view in requests)
        if full or not any(view.pending < view.max_draft for view in requests):
            return [Action.VERIFY] * len(requests)
        return [Action.DRAFT if view.pending < view.max_draft else Action.WAIT for view in requests]

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        pass

    def observe_step(self, load: StepLoad) -> None:
        pass

    def forget(self, key: int) -> None:
        pass
