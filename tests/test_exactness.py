"""The drafter can never matter: every method gives the tokens of plain decoding, whatever is drafted, however long."""

from __future__ import annotations

import pytest
import torch

from aspire_llm.config import METHODS
from aspire_llm.models.load import LoadedModel
from aspire_llm.policy.base import Action
from aspire_llm.request import Request, RowKind, SamplingParams
from dense_attention import dense_attention
from tiny import (
    GREEDY,
    VOCAB,
    ScriptedPolicy,
    always_draft_to,
    cached_kv,
    plain_tokens,
    prompts_of,
    requests_for,
    run,
    script_drafts,
    tiny_engine,
    tiny_model,
)

DRAFTING = [name for name, preset in METHODS.items() if preset.context is not None]
LENGTHS = [1, 3, 7, 20, 33, 47, 64, 90, 110]  # below, at and above the budget of 16


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


def greedy_reference(model: LoadedModel, prompt: list[int], n: int) -> list[int]:
    """Token by token over the whole text, without any cache."""
    tokens = list(prompt)
    for _ in range(n):
        hidden = model.decoder(
            torch.tensor(tokens), torch.arange(len(tokens)), dense_attention(model.config, [len(tokens)])
        )
        tokens.append(int(model.decoder.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def drafted(requests: list[Request]) -> tuple[int, int]:
    """(accepted, rejected) drafts."""
    made = sum(r.stats.num_draft_tokens for r in requests)
    accepted = sum(r.stats.num_accepted_tokens for r in requests)
    return accepted, made - accepted


def test_plain_equals_recomputation(model: LoadedModel) -> None:
    prompts = prompts_of(LENGTHS)
    assert plain_tokens(model, prompts, GREEDY) == [greedy_reference(model, p, 24) for p in prompts]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", DRAFTING)
def test_methods_equal_plain(model: LoadedModel, method: str, late: bool) -> None:
    prompts = prompts_of(LENGTHS)
    expected = plain_tokens(model, prompts, GREEDY)
    for batch in (1, 2, 9):
        requests = requests_for(model, prompts[-batch:], GREEDY)
        assert run(tiny_engine(model, method=method, late=late), requests) == expected[-batch:]
    assert min(drafted(requests)) > 0  # drafts were accepted and rejected


@pytest.mark.parametrize("late", [False, True])
def test_verifications_that_wait_for_each_other(model: LoadedModel, late: bool) -> None:
    prompts = prompts_of(LENGTHS)
    expected = plain_tokens(model, prompts, GREEDY)
    steps: list[int] = []  # with any verification of drafts
    for verify_step in (0.0, 1.0):
        engine = tiny_engine(model, method="aspire", late=late, verify_step=verify_step)
        requests = requests_for(model, prompts, GREEDY)
        for request in requests:
            engine.add(request)
        steps.append(0)
        while engine.has_work:
            plan = engine.step().plan
            rows = plan.rows if plan is not None else ()
            steps[-1] += any(row.kind is RowKind.VERIFY and row.num_tokens > 1 for row in rows)
        assert [request.output_token_ids for request in requests] == expected
        engine.check()
    assert steps[1] < steps[0]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13, 16])
def test_every_draft_length(model: LoadedModel, length: int) -> None:
    prompts = prompts_of(LENGTHS)
    expected = plain_tokens(model, prompts, GREEDY)
    for method, policy in (("aspire", "staggered"), ("vegas", "lockstep")):
        requests = requests_for(model, prompts, GREEDY)
        engine = tiny_engine(model, method=method, draft_tokens=length, policy_name=policy)
        assert run(engine, requests) == expected
        assert max(len(r.stats.drafted_per_position) for r in requests) == length


@pytest.mark.parametrize(
    "changes", [{"windows": (8, 8)}, {"windows": (8, None)}, {"num_layers": 4, "windows": (None, 8, None, None)}]
)
def test_sliding_windows(changes: dict[str, object]) -> None:
    model = tiny_model(**changes)
    prompts = prompts_of(LENGTHS)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    expected = plain_tokens(model, prompts, params)
    assert expected[3] == greedy_reference(model, prompts[3], 64)
    for method in DRAFTING:
        requests = requests_for(model, prompts, params)
        assert run(tiny_engine(model, method=method), requests) == expected
        assert drafted(requests)[0] > 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("wrong_at", [None, *range(10), "always"])
def test_scripted_drafts(model: LoadedModel, wrong_at: int | str | None, late: bool) -> None:
    """Right everywhere, wrong everywhere, right up to every position: the accepted length is known exactly."""
    prompts = prompts_of(LENGTHS)
    params = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)
    expected = plain_tokens(model, prompts, params)

    def script(before: list[int], own: int) -> int:
        prompt, output = next((p, e) for p, e in zip(prompts, expected, strict=True) if before[: len(p)] == p)
        made = len(before) - len(prompt)
        right = output[made] if made < len(output) else 0
        wrong = wrong_at == "always" or (wrong_at is not None and made % 10 == wrong_at)
        return (right + 1) % VOCAB if wrong else right

    engine = tiny_engine(model, method="aspire", late=late, policy=always_draft_to(8))
    script_drafts(engine, script)
    requests = requests_for(model, prompts, params)
    assert run(engine, requests) == expected
    accepted, rejected = drafted(requests)
    if wrong_at is None:
        assert accepted > 0
        assert rejected == 0
    elif wrong_at == "always":
        assert accepted == 0
        assert rejected > 0
    else:
        assert rejected > 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("late", [False, True])
def test_adversarial_drafts_and_schedules(model: LoadedModel, seed: int, late: bool) -> None:
    """Random tokens drafted for random stretches, waiting at random: still plain decoding's tokens."""
    prompts = prompts_of(LENGTHS, seed)
    expected = plain_tokens(model, prompts, GREEDY)
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(0, 10, (4096,), generator=generator).tolist()
    actions = [Action.DRAFT] * 6 + [Action.VERIFY] * 3 + [Action.WAIT]
    policy = ScriptedPolicy(lambda view, asked: actions[choices[asked % 4096]])
    engine = tiny_engine(model, method=DRAFTING[seed % len(DRAFTING)], late=late, policy=policy)
    script_drafts(engine, lambda before, own: own if choices[len(before) + seed] < 5 else choices[len(before)] * 9)
    requests = requests_for(model, prompts, GREEDY)
    assert run(engine, requests) == expected
    assert policy.outcomes
    assert min(drafted(requests)) > 0


@pytest.mark.parametrize("method", DRAFTING)
def test_committed_kv_is_exact(model: LoadedModel, method: str) -> None:
    """Verification overwrites what drafts wrote: K/V of committed positions are those of a full pass over the text."""
    engine = tiny_engine(model, method=method, enable_prefix_caching=False)
    requests = requests_for(
        model, prompts_of([5, 40, 80]), SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    )
    for request in requests:
        engine.add(request)
    while min(len(r.output_token_ids) for r in requests) < 30 and not any(r.finished for r in requests):
        engine.step()
    assert sum(r.stats.num_draft_tokens for r in requests) > 0
    for request in requests:
        assert request.num_computed == request.num_tokens - 1
        tokens = request.token_ids[: request.num_computed]
        seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        dense = dense_attention(model.config, [len(tokens)])

        def capture(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense=dense, seen=seen
        ) -> torch.Tensor:
            seen[layer] = (k.transpose(0, 1), v.transpose(0, 1))
            return dense(layer, q, k, v)

        model.decoder(torch.tensor(tokens), torch.arange(len(tokens)), capture)
        for layer in range(model.config.num_layers):
            for cached, exact in zip(cached_kv(engine, request, layer), seen[layer], strict=True):
                torch.testing.assert_close(cached, exact, atol=1e-5, rtol=0)


def test_draft_rows_touch_only_their_set_and_tail(model: LoadedModel) -> None:
    """Counted by the backend: per sparse layer at most budget + tail, per refresh layer everything."""
    budget, prompt = 16, 100
    engine = tiny_engine(model, method="aspire", budget=budget, policy=always_draft_to(6))
    (request,) = requests_for(model, prompts_of([prompt]), GREEDY)
    engine.add(request)
    drafts = 0
    while engine.has_work:
        length, pending = request.num_tokens, request.num_pending
        step = engine.step()
        if step.plan is not None and step.plan.rows[0].kind is RowKind.DRAFT:
            assert step.result is not None
            tail = pending + 1
            full = length + pending  # at the refresh layer
            read = step.result.kv_tokens_read[RowKind.DRAFT]
            assert full + tail < read <= full + budget + tail  # of two layers, one refreshes
            drafts += 1
    assert drafts > 10


def test_only_sampling_rows_get_logits(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(model, method="aspire")
    widths: list[int] = []
    real = model.decoder.logits
    monkeypatch.setattr(model.decoder, "logits", lambda hidden: widths.append(hidden.shape[0]) or real(hidden))
    (request,) = requests_for(model, prompts_of([110]), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    run(engine, [request])
    assert widths == [1]  # 110 prompt tokens in four chunks, one row of logits
