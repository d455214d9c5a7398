"""A policy of one's own, on recorded traces and in a real engine. Run: python docs/examples/own_policy.py"""

from collections.abc import Sequence
from importlib import resources
from math import prod

from aspire_llm import LLM, SamplingParams
from aspire_llm.policy.autoregressive import Autoregressive
from aspire_llm.policy.base import Action, CycleOutcome, RequestView, StepLoad
from aspire_llm.policy.simulator import Replay, SimulatedCost, Simulation
from aspire_llm.policy.trace import shipped_traces


# --8<-- [start:policy]
class MovingThreshold:
    """Draft while all pending drafts are right with a confidence above the request's own threshold, which rises after a
    rejection and falls after a cycle without one."""

    def __init__(self, start: float = 0.5) -> None:
        self._start = start
        self._thresholds: dict[int, float] = {}

    def decide(self, requests: Sequence[RequestView], prefill: StepLoad) -> list[Action]:
        return [Action.DRAFT if self._goes_on(view) else Action.VERIFY for view in requests]

    def _goes_on(self, view: RequestView) -> bool:
        threshold = self._thresholds.setdefault(view.key, self._start)
        return view.pending < view.max_draft and prod(view.confidences) > threshold

    def observe_cycle(self, outcome: CycleOutcome) -> None:
        old = self._thresholds.get(outcome.key, self._start)
        all_right = outcome.accepted == outcome.drafted
        self._thresholds[outcome.key] = 0.9 * old if all_right else 0.9 * old + 0.1

    def observe_step(self, load: StepLoad) -> None:
        pass  # a policy that weighs costs would learn them here

    def forget(self, key: int) -> None:
        self._thresholds.pop(key, None)


# --8<-- [end:policy]


def main() -> None:
    # --8<-- [start:simulate]
    trace = shipped_traces()["smollm2-135m_7k_code"]
    replay = Replay(repeats=1, tokens=128)
    own = Simulation(trace, SimulatedCost(), replay).run(MovingThreshold())
    plain = Simulation(trace, SimulatedCost(), replay).run(Autoregressive())
    print(f"replayed: {own.tokens_per_s / plain.tokens_per_s:.2f} times plain decoding")
    # --8<-- [end:simulate]
    book = resources.files("aspire_llm").joinpath("data", "texts", "kjv_jonah.txt").read_text(encoding="utf-8")
    # --8<-- [start:use]
    llm = LLM(
        "smollm2-135m",
        method="aspire",  # its selector; its policy is replaced
        policy_object=MovingThreshold(),
        budget=64,
        max_model_len="2K",
        max_num_seqs=1,
    )
    (output,) = llm.generate(book[:2000], SamplingParams(temperature=0, max_tokens=32))
    print(output.outputs[0].text)
    print(output.metrics.speculative_decoding)
    # --8<-- [end:use]


if __name__ == "__main__":
    main()
