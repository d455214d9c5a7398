"""The `analyze` commands: what their numbers mean, the shape of their files, and that plots are written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aspire_llm.analysis import reports
from aspire_llm.analysis.recall import ReuseTable, ScoreRecorder
from aspire_llm.analysis.recorder import Drafts, Recorder
from aspire_llm.cli import main
from aspire_llm.context.ranking import forced_counts
from aspire_llm.policy.trace import read_traces
from saved_model import save_tiny_model
from tiny import prompts_of, tiny_model

pytestmark = pytest.mark.usefixtures("data_home")

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a tiny model and short prompts."""
    folder = tmp_path_factory.mktemp("workload")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} green bottles, standing on wall {i * i}. " for i in range(60)))
    model = save_tiny_model(folder / "model")
    return ["--model", str(model), "--dataset", str(text), "--prompt-tokens", "100-140", "--requests", "3"]


def analyze(tmp_path: Path, command: str, *arguments: str) -> Any:
    """The JSON report of a command that also plots."""
    picture, numbers = tmp_path / "plot.png", tmp_path / "numbers.json"
    assert main(["analyze", command, *arguments, "--out", str(picture), "--json", str(numbers)]) == 0
    assert picture.read_bytes().startswith(PNG)
    return json.loads(numbers.read_text())


DRAFTS = ["--budget", "16", "--starts", "5", "--stride", "3", "--draft-tokens", "4", "--first-start", "2"]


def test_heterogeneity(workload: list[str], tmp_path: Path) -> None:
    report = analyze(tmp_path, "heterogeneity", *workload, *DRAFTS)
    assert report["method"] == {"context": "refreshed", "budget": 16, "refresh_layers": [1], "verified_share": 0.5}
    assert report["draft_tokens"] == 4
    assert len(report["requests"]) == 3
    for request in report["requests"]:
        assert request["starts"] == [2, 5, 8, 11, 14][: len(request["starts"])]
        lengths = request["accepted_length"]
        assert len(lengths) == len(request["starts"])
        assert all(1 <= length <= 5 for length in lengths)
        assert request["mean"] == pytest.approx(np.mean(lengths))
        assert (request["min"], request["max"]) == (min(lengths), max(lengths))
        assert 100 <= request["prompt_tokens"] <= 140
    means = [request["mean"] for request in report["requests"]]
    assert report["between_requests"]["ratio"] == pytest.approx(max(means) / min(means))
    windowed = analyze(tmp_path, "heterogeneity", *workload, *DRAFTS, "--context", "window")
    assert windowed["method"]["context"] == "window"


def test_staleness(workload: list[str], tmp_path: Path) -> None:
    report = analyze(tmp_path, "staleness", *workload, *DRAFTS, "--refresh-layers", "0,2")
    assert report["methods"]["refreshed"]["refresh_layers"] == [0, 2]
    assert report["methods"]["stale"]["context"] == "verified"
    assert report["draft_position"] == [1, 2, 3, 4]
    for name in ("refreshed", "stale"):
        of = report["contexts"][name]
        assert len(of["survival"]) == len(of["conditional"]) == 4
        assert of["mean_accepted_length"] == pytest.approx(1 + sum(of["survival"]))
        assert of["survival"] == sorted(of["survival"], reverse=True)


def test_staleness_by_hand() -> None:
    match = np.array([[[True, True, False], [True, False, True], [False, True, True], [True, True, True]]])
    accepted = np.cumprod(match, axis=2).sum(axis=2)
    measured = np.array([[True, True, True, False]])
    drafts = Drafts((1, 2, 3, 4), measured, accepted, np.zeros(match.shape), match)
    report = reports.staleness({"x": drafts})
    assert report["num_drafts"] == 3
    assert report["contexts"]["x"]["survival"] == pytest.approx([2 / 3, 1 / 3, 0])
    assert report["contexts"]["x"]["conditional"] == pytest.approx([2 / 3, 1 / 2, 0])
    assert report["contexts"]["x"]["mean_accepted_length"] == pytest.approx(2.0)


def test_recall(workload: list[str], tmp_path: Path) -> None:
    report = analyze(tmp_path, "recall", *workload, "--top-k", "16", "--max-tokens", "12")
    layers = report["layers"]
    assert layers == [0, 1, 2]
    assert report["over_time"]["lag"] == [1, 2, 3, 4, 6, 8]
    assert report["across_layers"]["distance"] == [1, 2]
    across = np.array(report["across_layers"]["by_layers"])
    assert np.allclose(np.diag(across), 1.0)
    assert np.allclose(across, across.T)
    for value in [*report["over_time"]["recall"], *report["across_layers"]["recall"]]:
        assert 0.0 <= value <= 1.0
    assert report["next_layer"] == report["across_layers"]["recall"][0]


def test_reuse_is_that_of_brute_force() -> None:
    model = tiny_model(num_layers=3, windows=(None,) * 3)
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    k, lags = 12, (1, 3)
    table = ReuseTable(range(3), k, lags)

    def observe(request: int, probabilities: torch.Tensor) -> None:
        seen[request].append(probabilities)
        table(request, probabilities)

    Recorder(model, prompts_of([50, 70]), 8).decode(lambda n: None, ScoreRecorder(range(3), observe))
    sinks, recent = forced_counts(k)

    def top(p: torch.Tensor) -> set[int]:
        return set(sorted(range(sinks, len(p) - recent), key=lambda i: -float(p[i]))[:k])

    across = np.zeros((3, 3))
    later: dict[int, list[float]] = {lag: [] for lag in lags}
    for steps in seen.values():
        assert len(steps) == 8  # the prompt's last token, and every output token but the last
        for t, p in enumerate(steps):
            sets = [top(p[layer]) for layer in range(3)]
            across += np.array([[len(a & b) / k for b in sets] for a in sets]) / 16
            for lag in lags:
                if t >= lag:
                    before = steps[t - lag]
                    end = before.shape[1] - recent
                    for layer in range(3):
                        wanted = {i for i in sets[layer] if i < end}
                        later[lag].append(len(wanted & top(before[layer])) / len(wanted))
    assert np.allclose(table.across_layers(), across)
    for lag in lags:
        assert np.mean(table.over_time()[lag]) == pytest.approx(np.mean(later[lag]))


def test_trace_is_recorded_and_replayed(workload: list[str], tmp_path: Path) -> None:
    path, numbers = tmp_path / "t.npz", tmp_path / "t.json"
    starts = ["--budget", "16", "--starts", "9", "--first-start", "2", "--draft-tokens", "5"]
    recorded = ["analyze", "trace", *workload, *starts, "--out", str(path), "--json", str(numbers)]
    assert main(recorded) == 0
    traces = read_traces(str(path))
    assert set(traces) == {"window", "verified", "refreshed_penultimate", "refreshed_1"}
    trace = traces["refreshed_1"]
    assert (trace.num_requests, trace.max_draft, trace.stride, trace.first_start, trace.span) == (3, 5, 1, 2, 9)
    assert trace.drafts == traces["refreshed_penultimate"].drafts  # without a profile they are the same
    report = json.loads(numbers.read_text())
    for name, one in traces.items():
        mean = 1 + np.mean([d.accepted for row in one.drafts for d in row])
        assert report["methods"][name]["mean_accepted_length"] == pytest.approx(mean)
    # the traces hold what a draft from one position further says, too: right drafts reach the same mismatch
    replay = ["--trace", str(path), "--policy", "staggered:3,hindsight", "--tokens", "40", "--repeats", "2"]
    report = analyze(tmp_path, "simulate", *replay)
    policies = report["traces"]["t"]["policies"]
    assert set(policies) == {"staggered:3", "hindsight"}
    for row in policies.values():
        assert set(row) == {"tokens_per_s", "speedup", "of_hindsight", "interval"}
    assert policies["hindsight"]["of_hindsight"] == pytest.approx(1.0)


def test_simulate_replays_the_shipped_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aspire_llm.policy.trace import shipped_traces

    some = {name: trace for i, (name, trace) in enumerate(shipped_traces().items()) if i < 2}
    monkeypatch.setattr("aspire_llm.policy.trace.shipped_traces", lambda method: some)
    cost = tmp_path / "cost.json"
    cost.write_text('{"fixed": 1.0, "per_kv": 0.001, "context_length": 1000}')
    fast = ["--tokens", "30", "--repeats", "1", "--batch-size", "4", "--late", "--arrival-rate", "0.1"]
    report = analyze(tmp_path, "simulate", "--policy", "staggered:4", "--cost", str(cost), *fast)
    assert set(report["traces"]) == set(some)
    assert "staggered:4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "--trace", "no-such.npz"], ("no-such.npz",)),
        (["simulate", "--policy", "magic"], ("'magic'", "confidence")),
        (["simulate", "--policy", "staggered:x"], ("staggered:x",)),
        (["simulate", "--policy", ","], ("--policy",)),
        (["simulate", "--cost", "no-such.json"], ("no-such.json",)),
        (["simulate", "--batch-size", "0"], ("--batch-size", "0")),
        (["simulate", "--arrival-rate", "often"], ("--arrival-rate", "often")),
        (["simulate", "--arrival-rate", "-1"], ("arrival_rate", "-1")),
        (["simulate", "--trace-method", "magic"], ("'magic'",)),
        (["trace"], ("--out",)),
        (["trace", "--out", "t.npz", "--methods", "window,magic"], ("'magic'", "verified")),
        (["trace", "--out", "no/such/folder/t.npz"], ("--out", "no/such/folder")),
        (["heterogeneity", "--starts", "0"], ("--starts", "0")),
        (["heterogeneity", "--draft-tokens", "x"], ("--draft-tokens", "x")),
        (["heterogeneity", "--budget", "0"], ("budget", "0")),
        (["heterogeneity", "--dataset", "no-such-file"], ("no-such-file",)),
        (["staleness", "--context", "window"], ("--context",)),
        (["recall", "--top-k", "0"], ("--top-k", "0")),
        (["recall", "--max-tokens", "1"], ("--max-tokens", "1")),
        (["nothing"], ("'nothing'", "recall")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(
    arguments: list[str],
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line != "loading"]
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("recall", ["--top-k", "90"], ("--top-k 90", "tokens")),
        ("heterogeneity", ["--budget", "100", "--starts", "2", "--draft-tokens", "3"], ("budget 100", "left out")),
        ("heterogeneity", ["--starts", "1000"], ("leaves no room",)),
        ("heterogeneity", ["--refresh-layers", "7", "--budget", "16", "--starts", "2"], ("refresh layer 7",)),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    command: str, arguments: list[str], words: tuple[str, ...], workload: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", command, *workload, *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    for word in words:
        assert word in error


def test_plots_without_matplotlib_are_one_clear_error(
    workload: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else real(name, *a))
    for command in ("heterogeneity", "staleness", "recall", "simulate"):
        options = [] if command == "simulate" else workload
        assert main(["analyze", command, *options, "--out", str(tmp_path / "p.png")]) == 2
        assert "aspire-llm[plots]" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))
    assert main(["analyze", "recall", *workload, "--top-k", "16", "--max-tokens", "4"]) == 0
