"""The search that measures a profile: recall, drafts without an engine, what is chosen, and the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aspire_llm.analysis.efficiency import efficiency
from aspire_llm.analysis.recall import RecallTable, ScoreRecorder, Split, recall_of
from aspire_llm.analysis.recorder import Method, Recorder
from aspire_llm.analysis.saved_work import SavedWork
from aspire_llm.analysis.search import Effort, ProfileSearch
from aspire_llm.cli import main
from aspire_llm.config import make_config
from aspire_llm.context.profile import find_profile, kept_profile, read_profile
from aspire_llm.context.ranking import forced_counts
from aspire_llm.context.selectors import RefreshedSelector
from aspire_llm.engine.build import build_engine
from aspire_llm.errors import UserError
from aspire_llm.models.load import LoadedModel
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.request import SamplingParams
from saved_model import save_tiny_model
from tiny import plain_tokens, prompts_of, requests_for, tiny_model

LAYERS = 4
pytestmark = pytest.mark.usefixtures("data_home")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(num_layers=LAYERS, windows=(None,) * LAYERS)


# ---- recall


def attention_of(model: LoadedModel, tokens: list[int]) -> list[torch.Tensor]:
    """Each layer's attention probabilities [n, n], mean over heads, computed without any cache."""
    found: list[torch.Tensor] = []
    n, config = len(tokens), model.config

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = config.num_heads // config.num_kv_heads
        keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, keys) * config.attention_scale
        p = logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        found.append(p.mean(0))
        return torch.einsum("hqk,khd->qhd", p, values)

    model.decoder(torch.tensor(tokens), torch.arange(n), attend)
    return found


def brute_force_set(scores: torch.Tensor, n: int, budget: int, sinks: int, recent: int, *, forced: bool) -> set[int]:
    always = {i for i in range(n) if i < sinks or i >= n - recent}
    others = sorted((i for i in range(n) if i not in always), key=lambda i: -float(scores[i]))
    return (always if forced else set()) | set(others[: budget - len(always) if forced else budget])


@pytest.mark.parametrize("split", [Split(16, 0.5), Split(24, 0.25), Split(8, 1.0)])
def test_recall_is_that_of_brute_force(model: LoadedModel, split: Split) -> None:
    cycle, num_output = 3, 14
    prompts = prompts_of([60, 45], seed=3)
    recorder = Recorder(model, prompts, num_output)
    table = RecallTable(range(LAYERS), [split], cycle)
    recorder.decode(lambda n: None, ScoreRecorder(range(LAYERS), table))
    expected = torch.zeros(LAYERS, LAYERS, dtype=torch.float64)
    count = 0
    sinks, recent = forced_counts(split.num_verified)
    for prompt, continuation in zip(prompts, recorder.continuations, strict=True):
        scores = attention_of(model, list(prompt) + continuation)
        positions = range(len(prompt) - 1, len(prompt) + num_output - 1)
        for i, position in enumerate(positions):
            since = i % (cycle + 1)
            if since == 0:
                verified_at = position
                continue
            n = verified_at + 1
            count += 1
            for refresh in range(LAYERS):
                wanted = split.budget - split.num_verified
                found = brute_force_set(scores[refresh][position - 1], n, wanted, sinks, recent, forced=False)
                for layer in range(LAYERS):
                    own = brute_force_set(scores[layer][verified_at], n, split.num_verified, sinks, recent, forced=True)
                    seen = found | own | set(range(n, position + 1))
                    expected[refresh, layer] += float(scores[layer][position][list(seen)].sum())
    got = torch.tensor(table.covered()[0], dtype=torch.float64)
    torch.testing.assert_close(got, expected / count, atol=1e-5, rtol=0)
    assert 0.05 < float(got.min()) < float(got.max()) < 0.95


@pytest.mark.parametrize("refresh", [(0,), (3,), (1, 2), (0, 3), (0, 2)])
def test_pairs_serve_the_layers_that_the_selector_lets_them_serve(refresh: tuple[int, ...]) -> None:
    covered = [[float(10 * r + layer) for layer in range(LAYERS)] for r in range(LAYERS)]
    selector = RefreshedSelector(range(LAYERS), refresh, LAYERS, 2, 8, 0.5, torch.device("cpu"))
    served = [refresh[i] for i in selector._served_by.tolist()]
    expected = [covered[r][layer] for layer, r in enumerate(served)]
    assert recall_of(covered, range(LAYERS), refresh) == pytest.approx(sum(expected) / LAYERS)


# ---- drafts


def test_the_recorder_decodes_plainly_and_ends_at_the_end_of_text(model: LoadedModel) -> None:
    prompts = prompts_of([40, 70, 700 % 97])
    recorder = Recorder(model, prompts, 20)
    recorder.decode(lambda n: None)
    plain = plain_tokens(model, prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert recorder.continuations == plain
    ends = plain[0][6]
    ending = Recorder(replace(model, eos_token_ids=frozenset([ends])), prompts, 20)
    ending.decode(lambda n: None)
    assert ending.continuations[0] == plain[0][: plain[0].index(ends) + 1]
    drafts = ending.record(Method("verified", 16), [1, 2, 4, 8, 16], 4, lambda n: None)
    for r, text in enumerate(ending.continuations):
        assert drafts.measured[r].tolist() == [start + 4 <= len(text) for start in drafts.starts]


def test_a_budget_that_leaves_nothing_out_is_always_right(model: LoadedModel) -> None:
    recorder = Recorder(model, prompts_of([50, 61]), 30)
    recorder.decode(lambda n: None)
    for method in (
        Method("refreshed", 128, (1,)),
        Method("verified", 128),
        Method("window", 128),
        Method("snapkv", 128),
    ):
        drafts = recorder.record(method, [1, 2, 5, 14], 16, lambda n: None)
        assert drafts.measured.all()
        assert (drafts.accepted == 16).all()
        assert drafts.mean_accepted_length() == 17.0


def test_drafts_depend_on_nothing_drafted_before(model: LoadedModel) -> None:
    recorder = Recorder(model, prompts_of([80, 61]), 40)
    recorder.decode(lambda n: None)
    method = Method("refreshed", 16, (1,))
    first = recorder.record(method, [1, 4, 9, 14, 20], 8, lambda n: None)
    recorder.record(Method("window", 8), [3, 11], 8, lambda n: None)
    again = recorder.record(method, [1, 4, 9, 14, 20], 8, lambda n: None)
    assert (first.match == again.match).all()
    assert (first.confidence == again.confidence).all()
    assert 0 < first.accepted.mean() < 8


def test_drafts_are_the_engines(model: LoadedModel) -> None:
    """The first cycle after the prompt: the engine drafts from start 1, with the same context."""
    prompts = prompts_of([80, 61, 44], seed=5)
    recorder = Recorder(model, prompts, 12)
    recorder.decode(lambda n: None)
    drafts = recorder.record(Method("refreshed", 16, (2,)), [1], 6, lambda n: None)
    config = make_config(
        model="tiny", max_model_len=128, max_num_seqs=2, block_size=4, calibrate=False,
        method="aspire", policy="staggered", draft_tokens=6, budget=16, refresh_layers=(2,),
    )  # fmt: skip
    built = build_engine(config, model)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for r, request in enumerate(requests_for(model, prompts, params)):
        built.engine.add(request)
        while built.engine.has_work and not request.stats.num_drafts:
            built.engine.step()
        assert request.stats.num_draft_tokens == 6
        assert request.stats.num_accepted_tokens == drafts.accepted[r, 0]
        built.engine.abort(request)


# ---- efficiency


def test_efficiency_is_that_of_the_best_length() -> None:
    cost, reads = CostModel(1.0, 0.01, 0.001), ReadModel(100, 10, 1)
    survival = [0.9**k for k in range(1, 9)]
    found = efficiency(survival, cost, reads, 4000, 4)
    plain = 0.25 + 0.01 + 0.001 * 4000
    rates = {0: 1 / plain}
    for g in range(1, 9):
        drafts = sum(0.25 + 0.01 + 0.001 * ((100 + i) * 0.9 + (4000 + i) * 0.1) for i in range(1, g + 1))
        verify = 0.25 + 0.01 * (g + 1) + 0.001 * (4000 + g + 1)
        rates[g] = (1 + sum(survival[:g])) / (drafts + verify)
    best = max(rates, key=lambda g: rates[g])
    assert found.draft_length == best
    assert found.tokens_per_s == pytest.approx(rates[best])
    assert found.speedup == pytest.approx(rates[best] * plain)
    assert efficiency([0.0] * 4, cost, reads, 4000, 4).draft_length == 0
    assert efficiency(survival, CostModel(1.0, 0.0, 0.0), reads, 4000, 4).speedup == 1.0  # full reads cost nothing


# ---- the search

EFFORT = Effort(
    budgets=(8, 16, 32), singles=2, pairs=1, starts=3, first_start=2, stride=3, draft_tokens=6, cycle=3, batch_size=2
)
COST = CostModel(1.0, 0.01, 0.05)


def search(model: LoadedModel, show: Any = lambda stage, done, most: None, **changes: Any) -> ProfileSearch:
    return ProfileSearch(model, prompts_of([70, 90, 64]), replace(EFFORT, **changes), show, COST)


def test_a_search_measures_what_it_says(model: LoadedModel) -> None:
    made = search(model)
    profile = made.run(SavedWork(None, {}), {"dataset": "x"})
    measured = profile.measured
    assert profile.fingerprint == "tiny-0"
    assert measured["dataset"] == "x"
    assert measured["penultimate"]["refresh_layers"] == [LAYERS - 2]
    assert set(measured["recall"]["refresh_layer"]) == {"0", "1", "2", "3"}
    rows = measured["candidates"]
    assert len(rows) == len({(tuple(r["refresh_layers"]), r["budget"], r["verified_share"]) for r in rows})
    assert {r["budget"] for r in rows} == {8, 16, 32}
    assert {r["verified_share"] for r in rows} == {0.25, 0.5, 0.75}
    assert any(len(r["refresh_layers"]) == 2 for r in rows)
    best = max(rows, key=lambda r: r["speedup"])
    assert measured["best"]["speedup"] == best["speedup"]
    assert (profile.refresh_layers, profile.budget, profile.verified_share) == (
        tuple(measured["best"]["refresh_layers"]),
        measured["best"]["budget"],
        measured["best"]["verified_share"],
    )
    for row in rows:
        assert row["accepted_length"] == pytest.approx(1 + sum(row["acceptance_by_position"]), abs=1e-4)
    recorder = Recorder(model, made.prompts, EFFORT.num_output)
    recorder.decode(lambda n: None)
    split = Split(best["budget"], best["verified_share"])
    method = Method("refreshed", split.budget, tuple(best["refresh_layers"]), split.verified_share)
    drafts = recorder.record(method, EFFORT.all_starts(), EFFORT.draft_tokens, lambda n: None)
    assert best["accepted_length"] == pytest.approx(drafts.mean_accepted_length(), abs=1e-5)


def test_an_interrupted_search_goes_on_and_ends_the_same(model: LoadedModel, tmp_path: Path) -> None:
    whole = search(model).run(SavedWork(None, {}), {})
    path = tmp_path / "work.json"
    stages: list[str] = []
    interrupted = 0
    for stop_at in (
        8,
        40,
        30,
        10**9,
    ):  # steps before the user's Ctrl-C: in plain decoding, in the second candidate, later
        shown = 0

        def show(stage: str, done: int, most: int, stop_at: int = stop_at) -> None:
            nonlocal shown
            shown += 1
            stages.append(stage)
            if shown > stop_at:
                raise KeyboardInterrupt

        one = search(model, show)
        saved = SavedWork(path, one.settings())
        try:
            profile = one.run(saved, {})
        except KeyboardInterrupt:
            interrupted += 1
            continue
        break
    assert interrupted == 3
    assert profile == whole
    assert len({s for s in stages if s.startswith("drafting")}) == len(whole.measured["candidates"])
    saved.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["settings", "text", "none"])
def test_saved_work_of_something_else_counts_for_nothing(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    SavedWork(path, {"a": (1, 2)}).put("part", [1.5])
    if damage == "text":
        path.write_text(path.read_text()[:-3])
    again = SavedWork(path, {"a": (1, 3)} if damage == "settings" else {"a": (1, 2)})
    assert again.get("part") == ([1.5] if damage == "none" else None)


def test_searches_that_cannot_work_are_refused(model: LoadedModel) -> None:
    with pytest.raises(UserError, match=r"budget 64.*64 tokens"):
        search(model, budgets=(64,)).run(SavedWork(None, {}), {})
    with pytest.raises(UserError, match=r"64 tokens.*512"):
        search(model, budgets=None).run(SavedWork(None, {}), {})
    windows = tiny_model(windows=(8, 8))
    with pytest.raises(UserError, match="sliding window"):
        search(windows).run(SavedWork(None, {}), {})
    first = Recorder(model, prompts_of([70, 90, 64]), 2)
    first.decode(lambda n: None)
    ending = replace(model, eos_token_ids=frozenset(text[1] for text in first.continuations))
    with pytest.raises(UserError, match="answers end after"):
        search(ending).run(SavedWork(None, {}), {})


def test_sliding_window_layers_are_no_candidates() -> None:
    mixed = tiny_model(num_layers=4, windows=(None, 8, None, None))
    profile = search(mixed).run(SavedWork(None, {}), {})
    assert set(profile.measured["recall"]["refresh_layer"]) == {"0", "2", "3"}
    assert all(1 not in row["refresh_layers"] for row in profile.measured["candidates"])


# ---- the command


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_the_command_writes_a_profile_that_engines_find(
    saved_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    cost = tmp_path / "cost.json"
    cost.write_text('{"fixed": 1.0, "per_token": 0.01, "per_kv": 0.05}')
    workload = ["--dataset", str(text), "--prompt-tokens", "120-160", "--requests", "2", "--model", str(saved_model)]
    arguments = ["profile", *workload, "--budgets", "16,32", "--starts", "2", "--draft-tokens", "4"]
    out = tmp_path / "a.profile.json"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProfileSearch, "_cost", interrupt)
        assert main([*arguments, "--cost", str(cost), "--out", str(out)]) == 130
    assert not out.exists()
    assert main([*arguments, "--cost", str(cost), "--out", str(out)]) == 0
    assert "going on" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.glob("a.*")) == ["a.profile.json"]
    named = read_profile(out)
    assert main([*arguments, "--cost", str(cost)]) == 0
    kept = kept_profile(named.fingerprint)
    assert str(kept) in capsys.readouterr().out.replace("\n", "")
    assert read_profile(kept) == named
    assert find_profile(None, named.fingerprint) == named
    assert main([*arguments, "--out", str(out)]) == 0  # this machine is timed
    assert read_profile(out).measured["cost"]["fixed"] > 0
    capsys.readouterr()
    for option, words in (("200", "budget 200"), (",", "--budgets"), ("3", "at least 4")):
        assert main([*arguments, "--budgets", option]) == 2
        assert words in capsys.readouterr().err
