"""Plain decoding: one token a step, read in full."""

from __future__ import annotations

from collections.abc import Sequence

from aspire_llm.policy.base import Action, CycleOutcome, RequestView, StepLoad


class Autoregressive:
    """g = 0: every step verifies nothing and takes one token."""

    def decide(self, requests: Sequence[RequestView], prefill: StepLoad) -> list[Action]:
        return [Action.VERIFY] * len(requests)

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        pass

    def observe_step(self, load: StepLoad) -> None:
        pass

    def forget(self, key: int) -> None:
        pass
