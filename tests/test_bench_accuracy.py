"""Whether outputs of methods differ: none does in float32, and what differs is counted where it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aspire_llm.bench.accuracy import Parting, parting, parting_report, score_report
from aspire_llm.cli import main
from aspire_llm.request import CompletionOutput, TokenLogprobs
from saved_model import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def accuracy(model: str, out: Path, *arguments: str) -> Any:
    assert main(["bench", "accuracy", "--model", model, "--json", str(out), *arguments]) == 0
    return json.loads(out.read_text())


def test_no_difference_in_float32(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = accuracy(
        model,
        tmp_path / "a.json",
        *("--method", "plain,vegas,magicdec-window", "--requests", "3", "--prompt-tokens", "900", "--needles", "4"),
        *("--max-tokens", "24", "--budget", "64", "--ignore-eos"),
    )
    assert (report["kind"], report["dtype"], report["reference"]) == ("accuracy", "float32", "plain")
    assert report["workload"]["with_answers"] == report["workload"]["requests"] == 3
    for method in report["methods"].values():
        assert method["requests_differing"] == method["tokens_differing"] == 0
        assert method["partings"] == []
        assert method["tokens"] == 72
        for score in method["scores"].values():
            assert score["difference"] == 0.0
            assert score["difference_interval"] == [0.0, 0.0]
        assert all(len(request["answers"][0]) == 7 for request in method["requests"])
    assert "0 differences to plain in 144 tokens" in capsys.readouterr().out.replace("\n", " ")


def test_rows_with_and_without_answers(model: str, tmp_path: Path) -> None:
    rows = [{"context": "Ann came. " * 9, "input": "Who?", "answers": ["Ann"], "dataset": "hotpotqa"}] * 2
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, [*rows, {**rows[0], "answers": []}])))
    arguments = ["--method", "plain,vegas", "--requests", "3", "--max-tokens", "8", "--budget", "32"]
    report = accuracy(model, tmp_path / "a.json", "--dataset", str(file), *arguments)
    assert (report["workload"]["requests"], report["workload"]["with_answers"]) == (3, 2)
    assert report["methods"]["vegas"]["scores"]["f1"]["mean"] >= 0.0
    file.write_text(json.dumps({"prompt": "Ann came. " * 9}))
    arguments = ["--method", "plain,vegas", "--requests", "1", "--max-tokens", "8", "--budget", "32"]
    report = accuracy(model, tmp_path / "b.json", "--dataset", str(file), *arguments)
    assert report["methods"]["vegas"]["scores"] == dict.fromkeys(("exact_match", "f1", "rouge_l", "contains"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "plain"], "two different"),
        (["--method", "plain,plain"], "two different"),
        (["--method", "plain,hindsight"], "hindsight"),
        (["--method", "plain,nothing"], "nothing"),
        (["--max-tokens", "5000"], "max_tokens"),
        (["--prompt-tokens", "3000"], "3000"),
    ],
)
def test_bad_input(arguments: list[str], words: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accuracy", "--model", model, *arguments]) == 2
    assert words in capsys.readouterr().err


def output(*token_ids: int) -> CompletionOutput:
    """With log-probabilities: the token said has -0.1, the next higher id -0.4, no other is known."""
    logprobs = [TokenLogprobs(token, -0.1, 1, ((token, -0.1), (token + 1, -0.4))) for token in token_ids]
    return CompletionOutput(0, "", list(token_ids), logprobs, "length", None)


def test_where_outputs_part() -> None:
    assert parting(output(1, 2, 3), output(1, 2, 3)) is None
    assert parting(output(1, 2, 3), output(1, 3, 3)) == Parting(1, 1, pytest.approx(0.3))
    assert parting(output(1, 2, 3), output(1, 9, 9)) == Parting(1, 2, None)
    assert parting(output(1, 2, 3), output(1, 2)) == Parting(2, 1, None)
    assert parting(output(1, 2), output(2, 2, 4, 5)) == Parting(0, 3, pytest.approx(0.3))


def test_partings_are_counted() -> None:
    report = parting_report([None, Parting(3, 4, 0.1), Parting(0, 1, None), Parting(2, 2, 0.3)])
    assert report["requests_differing"] == 3
    assert report["tokens_differing"] == 7
    assert report["margin_median"] == pytest.approx(0.2)
    assert report["margin_max"] == 0.3
    assert [each["request"] for each in report["partings"]] == [1, 2, 3]
    assert parting_report([None])["margin_max"] is None


def test_differences_are_taken_request_by_request() -> None:
    report = score_report([50.0, 100.0, 0.0], [50.0, 100.0, 100.0])
    assert report["mean"] == 50.0
    assert report["difference"] == pytest.approx(-100 / 3)
    low, high = report["difference_interval"]
    assert low == -100.0
    assert high == 0.0
