"""Acceptance by method, budget, position and context length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.bench.accept import acceptance, resampled
from aspire_llm.cli import main
from saved_model import save_tiny_model

OPTIONS = ["--requests", "2", "--starts", "3", "--stride", "2", "--first-start", "2", "--draft-tokens", "3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def accept(model: str, out: Path, *arguments: str) -> Any:
    assert main(["bench", "accept", "--model", model, "--json", str(out), *OPTIONS, *arguments]) == 0
    return json.loads(out.read_text())


def test_every_method_budget_and_length(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = accept(
        model,
        tmp_path / "a.json",
        *("--dataset", "random", "--prompt-tokens", "60,100-140", "--methods", "window,vegas,refreshed"),
        *("--budgets", "8,64"),
    )
    assert report["kind"] == "accept"
    assert report["replayed"] is False
    cells = [(row["method"], row["budget"], row["prompt_tokens"]) for row in report["rows"]]
    assert cells == [
        *((name, 8, [60, 60]) for name in ("window", "vegas", "refreshed")),
        *((name, budget, [100, 140]) for name in ("window", "vegas", "refreshed") for budget in (8, 64)),
    ]
    assert [(cell["method"], cell["budget"]) for cell in report["left_out"]] == [
        (name, 64) for name in ("window", "vegas", "refreshed")
    ]
    for row in report["rows"]:
        assert (row["requests"], row["drafts"]) == (2, 6)
        shares = row["acceptance_by_position"]
        assert len(shares) == len(row["acceptance_by_position_interval"]) == 3
        assert all(later <= earlier for earlier, later in zip([1.0, *shares], shares, strict=False))
        assert row["mean_accepted_length"] == pytest.approx(1 + sum(shares))
        low, high = row["mean_accepted_length_interval"]
        assert low <= row["mean_accepted_length"] <= high
        assert sum(row["accepted_length_histogram"]) == 6
    by_cell = {(row["method"], row["budget"]): row for row in report["rows"][3:]}
    assert by_cell["vegas", 8]["context"] == "verified"
    assert by_cell["refreshed", 8]["refresh_layers"] == [1]
    printed = capsys.readouterr().out
    assert "left out" in printed
    assert "100-140" in printed


def test_a_set_of_nearly_everything_is_right_more_often(model: str, tmp_path: Path) -> None:
    report = accept(
        model, tmp_path / "a.json", "--dataset", "random", "--prompt-tokens", "80", "--methods", "refreshed",
        "--budgets", "8,79",
    )  # fmt: skip
    small, large = report["rows"]
    assert large["mean_accepted_length"] > small["mean_accepted_length"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "nothing"], "nothing"),
        (["--methods", ","], "names none"),
        (["--methods", "plain"], "plain"),
        (["--needles", "3"], "without --dataset"),
        (["--dataset-format", "sharegpt"], "without --dataset"),
        (["--budgets", "3"], "--budgets 3"),
        (["--budgets", "8,8"], "--budgets"),
        (["--dataset", "random", "--prompt-tokens", "60,x"], "--prompt-tokens x"),
        (["--dataset", "random", "--prompt-tokens", "60", "--budgets", "60"], "smaller --budgets"),
        (["--dataset", "random", "--prompt-tokens", "60,2000"], "2000"),
    ],
)
def test_bad_input(arguments: list[str], words: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accept", "--model", model, *OPTIONS, *arguments]) == 2
    assert words in capsys.readouterr().err


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 8), st.integers(0, 1000))
def test_numbers_agree_with_one_another(requests: int, starts: int, draft_tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    accepted = rng.integers(0, draft_tokens + 1, size=(requests, starts))
    measured = rng.random((requests, starts)) < 0.7
    measured[0, 0] = True
    row = acceptance(accepted, measured, draft_tokens)
    assert row["requests"] == int(measured.any(axis=1).sum())
    assert row["drafts"] == measured.sum() == sum(row["accepted_length_histogram"])
    assert row["mean_accepted_length"] == pytest.approx(1 + sum(row["acceptance_by_position"]))
    assert row["mean_accepted_length"] == pytest.approx(np.mean(row["per_request"]))
    product = 1.0
    for share, conditional in zip(row["acceptance_by_position"], row["conditional_by_position"], strict=True):
        assert (conditional is None) == (product == 0.0)
        product *= conditional or 0.0
        assert product == pytest.approx(share)
    if row["requests"] == 1:
        assert row["mean_accepted_length_interval"] is None
        assert row["acceptance_by_position_interval"] == [None] * draft_tokens
    else:
        low, high = row["mean_accepted_length_interval"]
        assert min(row["per_request"]) - 1e-9 <= low <= high <= max(row["per_request"]) + 1e-9


def test_intervals_of_known_values() -> None:
    assert resampled(np.array([[1.0], [1.0], [1.0]]), 0) == [[1.0, 1.0]]
    assert resampled(np.array([[1.0]]), 0) is None
    (interval,) = resampled(np.arange(100.0)[:, None], 0) or []
    assert interval == pytest.approx([49.5 - 5.66, 49.5 + 5.66], abs=0.8)  # 1.96 standard errors
