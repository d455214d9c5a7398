"""The examples of the documentation: they run, their selector and policy work in a real engine, and tokens stay the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from aspire_llm import LLM, UserError
from aspire_llm.config import make_config
from aspire_llm.context.selectors import Scores, Selector, SelectorSetting, WindowSelector
from aspire_llm.context.state import ContextState
from aspire_llm.engine.build import build_engine
from aspire_llm.engine.engine import Engine
from aspire_llm.policy.autoregressive import Autoregressive
from aspire_llm.policy.base import Action, CycleOutcome, Policy, RequestView, StepLoad
from aspire_llm.policy.simulator import Replay, SimulatedCost, Simulation
from aspire_llm.policy.trace import shipped_traces
from aspire_llm.request import RowKind
from tiny import GREEDY, FixedCost, prompts_of, requests_for, run, tiny_model

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
LIMITS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "kv_cache_memory": 3 << 18,
}
PROMPTS = prompts_of([70, 45, 3, 90])
NO_LOAD = StepLoad(0, 0.0)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_llm(**options: Any) -> LLM:
    return LLM("tiny", loaded=tiny_model(), cost=FixedCost(1.0, 0.01, 0.05), **LIMITS, **options)


def decode(llm: LLM) -> tuple[list[list[int]], int, int]:
    """Token ids; drafts made and accepted."""
    outputs = llm.generate(PROMPTS, GREEDY)
    llm.engine.check()
    drafted = [output.metrics.speculative_decoding for output in outputs if output.metrics]
    return (
        [output.outputs[0].token_ids for output in outputs],
        sum(d["num_draft_tokens"] for d in drafted),
        sum(d["num_accepted_draft_tokens"] for d in drafted),
    )


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return decode(tiny_llm(method="plain"))[0]


@pytest.mark.parametrize("method", ["vegas", "sparsespec"])
def test_the_selector_works_in_an_engine(method: str, plain: list[list[int]]) -> None:
    made: list[Selector] = []

    def factory(setting: SelectorSetting) -> Selector:
        assert (setting.budget, setting.full_layers, setting.num_slots) == (16, (0, 1), 5)
        made.append(example("own_selector").NeighbourhoodSelector(setting))
        return made[-1]

    llm = tiny_llm(method=method, budget=16, selector_factory=factory)
    tokens, drafted, accepted = decode(llm)
    assert tokens == plain
    assert 0 < accepted < drafted
    assert llm.engine.runner.selector is made[0]
    assert int(llm.engine.runner.contexts.set_lengths.max()) == 16


def test_the_selector_changes_what_is_drafted() -> None:
    neighbourhood = example("own_selector").NeighbourhoodSelector
    own = decode(tiny_llm(method="vegas", budget=8, selector_factory=neighbourhood))
    window = decode(tiny_llm(method="vegas", budget=8, selector_factory=lambda setting: WindowSelector()))
    assert own[0] == window[0]
    assert own[2] != window[2]


def test_a_selector_gets_as_many_prompt_queries_as_it_asks_for(plain: list[list[int]]) -> None:
    class Many(example("own_selector").NeighbourhoodSelector):  # type: ignore[misc]
        prompt_queries = 20

    llm = tiny_llm(method="vegas", budget=16, selector_factory=Many)
    assert llm.engine.scheduler.limits.min_last_chunk == 20
    assert decode(llm)[0] == plain


class RefreshOnly(WindowSelector):
    """A window whose refreshes are noted: what is scored at its refresh layer, of which requests."""

    refresh_layers = (1,)
    prompt_queries = 1

    def __init__(self, setting: SelectorSetting) -> None:
        self.noted: list[tuple[str, list[int]]] = []

    def query_weights(self, kind: RowKind, num_tokens: int) -> list[float]:
        return [0.0] * (num_tokens - 1) + [1.0]

    def renew(
        self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores, prompt_ended: Sequence[bool]
    ) -> None:
        super().renew(state, slots, lengths, scores, prompt_ended)
        self.noted.append(("renew", slots.tolist()))

    def refresh(self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores) -> None:
        self.noted.append(("refresh", slots.tolist()))
        assert torch.allclose(scores(self.refresh_layers).sum(-1), torch.ones(1, len(slots)), atol=1e-5)  # of all rows


def test_who_is_renewed_is_refreshed_then_by_scores_of_the_refresh_layers(plain: list[list[int]]) -> None:
    made: list[RefreshOnly] = []

    def factory(setting: SelectorSetting) -> Selector:
        made.append(RefreshOnly(setting))
        return made[-1]

    assert decode(tiny_llm(method="aspire", budget=16, selector_factory=factory))[0] == plain
    noted = made[0].noted
    mixed = alone = False
    for (name, slots), (after, refreshed) in pairwise(noted):
        if name == "renew":
            assert after == "refresh"
            assert set(slots) <= set(refreshed)
            mixed |= len(refreshed) > len(slots)
        else:
            alone |= after == "refresh"
    assert mixed  # beside requests that drafted
    assert alone


@pytest.mark.parametrize("late", [False, True])
def test_the_policy_works_in_an_engine(late: bool, plain: list[list[int]]) -> None:
    policy = example("own_policy").MovingThreshold()
    if late:
        model = tiny_model()
        built = build_engine(make_config(model="tiny", budget=16, **LIMITS), model, policy=policy)
        requests = requests_for(model, PROMPTS, GREEDY)
        tokens = run(Engine(built.engine.scheduler, built.engine.runner, late=True), requests)
        drafted = sum(request.stats.num_draft_tokens for request in requests)
        accepted = sum(request.stats.num_accepted_tokens for request in requests)
    else:
        tokens, drafted, accepted = decode(tiny_llm(budget=16, policy_object=policy))
    assert tokens == plain
    assert 0 < accepted < drafted
    assert not policy._thresholds  # all requests were forgotten


def test_the_policy_follows_its_rule() -> None:
    policy: Policy = example("own_policy").MovingThreshold(0.5)

    def decide(*confidences: float, pending: int | None = None, max_draft: int = 16) -> Action:
        pending = len(confidences) if pending is None else pending
        return policy.decide([RequestView(7, 100, pending, confidences, max_draft)], NO_LOAD)[0]

    assert decide() is Action.DRAFT
    assert decide(0.9, 0.6) is Action.DRAFT  # 0.54
    assert decide(0.9, 0.5) is Action.VERIFY  # 0.45
    assert decide(0.9, pending=16) is Action.VERIFY
    assert decide(max_draft=0) is Action.VERIFY
    policy.observe_cycle(CycleOutcome(7, 2, 2, (0.9, 0.9)))
    assert decide(0.46) is Action.DRAFT  # the threshold is 0.45
    policy.observe_cycle(CycleOutcome(7, 2, 1, (0.9, 0.9)))
    assert decide(0.50) is Action.VERIFY  # 0.505
    policy.forget(7)
    assert decide(0.51) is Action.DRAFT


def test_the_policy_beats_plain_decoding_in_the_simulator() -> None:
    trace = shipped_traces()["smollm2-135m_7k_code"]
    replay = Replay(repeats=1, tokens=128)
    own = Simulation(trace, SimulatedCost(), replay).run(example("own_policy").MovingThreshold())
    plain = Simulation(trace, SimulatedCost(), replay).run(Autoregressive())
    assert own.tokens_per_s > 1.5 * plain.tokens_per_s


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"method": "plain", "selector_factory": lambda _: WindowSelector()}, ("selector_factory", "plain")),
        ({"context": "window", "selector_factory": lambda _: WindowSelector()}, ("context='window'",)),
        ({"refresh_layers": (1,), "selector_factory": lambda _: WindowSelector()}, ("refresh_layers=(1,)",)),
        ({"policy": "ema", "policy_object": Autoregressive()}, ("policy='ema'",)),
        ({"method": "vegas", "draft_tokens": 3, "policy_object": Autoregressive()}, ("draft_tokens=3",)),
        ({"max_verify_tokens": 8, "policy_object": Autoregressive()}, ("max_verify_tokens=8",)),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="does nothing") as caught:
        tiny_llm(**options)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.model
@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example(name).main()
    assert capsys.readouterr().out.strip()
