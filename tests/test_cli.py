"""The command line: what it refuses and how, and what it writes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aspire_llm.cli import main
from aspire_llm.cli.options import NOT_OPTIONS, SAMPLING_HELP
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.cli.parser import make_parser
from aspire_llm.config import EngineConfig
from aspire_llm.engine.llm import LLM
from aspire_llm.errors import UserError
from aspire_llm.request import SamplingParams
from saved_model import CONTEXT, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *words: str) -> None:
    """Exit code 2, nothing on stdout, one line that begins with "error: " and has `words` in it."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line not in ("starting", "loading")]
    assert out == ""
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


GENERATE = ["generate", "--prompt", "once"]
BENCH = ["bench", "offline"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ("COMMAND",)),
        (["generat"], ("'generat'", "generate")),
        (["bench", "offlin"], ("'offlin'", "offline")),
        (["generate"], ("--prompt",)),
        ([*GENERATE, "--budgett", "3"], ("--budgett", "--budget")),
        ([*GENERATE, "--max-tok", "3"], ("--max-tok", "--max-tokens")),  # no abbreviations
        ([*GENERATE, "--xyzzy"], ("--xyzzy",)),
        ([*GENERATE, "stray"], ("'stray'",)),
        ([*GENERATE, "--budget", "0"], ("budget", "0", "[1")),
        ([*GENERATE, "--budget", "many"], ("budget", "'many'", "integer")),
        ([*GENERATE, "--draft-tokens", "-1"], ("draft_tokens", "-1", "[1, 64]")),
        ([*GENERATE, "--max-draft-tokens", "0"], ("max_draft_tokens", "0", "[1, 64]")),
        ([*GENERATE, "--method", "magic"], ("'magic'", "plain", "aspire")),
        ([*GENERATE, "--context", "magic"], ("'magic'", "window", "refreshed")),
        ([*GENERATE, "--method", "plain", "--budget", "8"], ("budget", "plain")),
        ([*GENERATE, "--refresh-layers", "1,x"], ("refresh_layers", "'x'")),
        ([*GENERATE, "--max-model-len", "32Q"], ("max_model_len", "'32Q'")),
        ([*GENERATE, "--temperature", "-1"], ("temperature", "-1", "[0")),
        ([*GENERATE, "--top-p", "2"], ("top_p", "2", "(0", "1.0]")),
        ([*GENERATE, "--max-tokens", "0"], ("max_tokens", "0")),
        ([*GENERATE, "--system", "be brief"], ("--system", "--chat")),
        ([*GENERATE, "--model", "no/such/model"], ("no/such/model", "smollm2-135m")),
        ([*GENERATE, "--device", "tpu"], ("'tpu'", "cpu", "cuda")),
        (["generate", "--prompt", ""], ("--prompt", "empty")),
        (["generate", "--prompt-file", "no-such-file"], ("no-such-file",)),
        (["generate", "--prompt-file", "."], ("'.'",)),
        ([*BENCH, "--preset", "dem"], ("'dem'", "demo")),
        ([*BENCH, "--preset", "demo", "--dataset", "x"], ("--dataset", "demo")),
        ([*BENCH, "--method", "plain,magic"], ("'magic'", "sparsespec")),
        ([*BENCH, "--method", ","], ("--method",)),
        ([*BENCH, "--requests", "0"], ("--requests", "0", "at least 1")),
        ([*BENCH, "--repeats", "two"], ("--repeats", "two")),
        ([*BENCH, "--max-tokens", "-3"], ("--max-tokens", "-3")),
        ([*BENCH, "--budget", "0"], ("budget", "0", "[1")),
        ([*BENCH, "--method", "plain", "--budget", "8"], ("budget", "plain")),
        ([*BENCH, "--method", "vegas", "--refresh-layers", "1"], ("refresh_layers", "refreshed")),
        ([*BENCH, "--draft-tokens", "-2"], ("draft_tokens", "-2")),
        ([*BENCH, "--prompt-tokens", "9-3"], ("--prompt-tokens", "9-3")),
        ([*BENCH, "--context", "window"], ("--context",)),  # would make all methods the same
        ([*BENCH, "--dataset", "no-such-file"], ("no-such-file",)),
        ([*BENCH, "--model", "no/such/model"], ("no/such/model",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # an output path does not matter to what is refused, and nothing appears there
    output = ["--json", str(tmp_path / "out.json")] if arguments[:1] == ["generate"] or arguments[:2] == BENCH else []
    refused(capsys, [*arguments, *output], *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [GENERATE, BENCH], ids=["generate", "bench offline"])
def test_output_path_is_tried_before_the_work(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    file = tmp_path / "file"
    file.write_text("kept")
    for path, word in (
        (tmp_path, "folder"),
        (tmp_path / "no" / "out.json", "No such"),
        (file / "out.json", "Not a directory"),
    ):
        refused(capsys, [*command, "--json", str(path)], "--json", str(path), word)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_prompt_too_long(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("kept")
    prompt = tmp_path / "long.txt"
    prompt.write_text("x" * CONTEXT)
    command = ["generate", "--model", model, "--prompt", "short", "--prompt-file", str(prompt), "--json", str(out)]
    refused(capsys, command, str(CONTEXT), "max_model_len")
    assert out.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.txt", "out.json"]


def test_generate_prints_and_writes_what_llm_gives(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    options = ["--model", model, "--max-tokens", "30", "--ignore-eos", "--budget", "16", "--max-model-len", "0.5K"]
    assert main(["generate", "--prompt", "once upon", *options, "--json", str(out)]) == 0
    printed, statistics = capsys.readouterr()
    llm = LLM(model, budget=16, max_model_len=512)
    expected = llm.generate("once upon", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[0]
    assert printed == expected.outputs[0].text + "\n"
    assert "30 tokens out" in statistics
    written = json.loads(out.read_text())
    assert written["outputs"][0]["outputs"][0]["token_ids"] == expected.outputs[0].token_ids
    assert expected.metrics is not None
    assert written["outputs"][0]["metrics"]["steps"] == expected.metrics.steps
    assert written["outputs"][0]["metrics"]["speculative_decoding"] == expected.metrics.speculative_decoding
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_several_prompts_come_in_the_order_given(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("second\nprompt")
    monkeypatch.setattr("sys.stdin", type("In", (), {"read": lambda self: "third"})())
    prompts = ["--prompt", "first", "--prompt-file", str(file), "--prompt-file", "-"]
    out = tmp_path / "out.json"
    assert main(["generate", "--model", model, *prompts, "--max-tokens", "8", "--chat", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    outputs = json.loads(out.read_text())["outputs"]
    assert [output["prompt"] for output in outputs] == ["first", "second\nprompt", "third"]
    assert printed == "".join(f"=== prompt {i + 1}\n{o['outputs'][0]['text']}\n" for i, o in enumerate(outputs))
    # under the chat template: one token a byte
    assert len(outputs[0]["prompt_token_ids"]) == len("<user> first\n<assistant>")


def test_sampling_options_reach_the_engine(model: str, tmp_path: Path) -> None:
    def tokens(*arguments: str) -> Any:
        out = tmp_path / "out.json"
        assert (
            main(
                ["generate", "--model", model, "--prompt", "abc", "--max-tokens", "12", *arguments, "--json", str(out)]
            )
            == 0
        )
        return json.loads(out.read_text())["outputs"][0]["outputs"]

    warm = tokens("--temperature", "1.5", "--seed", "7", "--ignore-eos")
    assert tokens("--temperature", "1.5", "--seed", "7", "--ignore-eos") == warm
    assert tokens("--temperature", "1.5", "--seed", "8", "--ignore-eos") != warm
    assert set(tokens("--allowed-token-ids", "65,66")[0]["token_ids"]) <= {65, 66}
    assert len(tokens("--temperature", "1", "--n", "3")) == 3
    # the log-probability of a token that is not allowed is no JSON number
    assert len(tokens("--logprobs", "2")[0]["logprobs"]) <= 12


def test_interrupt_is_130_and_leaves_nothing(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("aspire_llm.cli.commands.generate.Printer.__call__", interrupt)
    assert main(["generate", "--model", model, "--prompt", "once", "--json", str(tmp_path / "out.json")]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_output_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with OutputFile(str(path), "--json") as out:
        assert not path.exists()
        out.write_json({"a": [1.5, float("-inf")]})
    assert json.loads(path.read_text()) == {"a": [1.5, None]}
    with pytest.raises(ZeroDivisionError), OutputFile(str(path), "--json") as out:
        raise ZeroDivisionError
    assert json.loads(path.read_text()) == {"a": [1.5, None]}
    with OutputFile("/dev/null", "--json") as out:
        out.write_json({})
    with OutputFile(None, "--json") as out:
        out.write_json({})
    with pytest.raises(UserError), OutputFile(str(tmp_path), "--json"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def option_strings(*command: str) -> set[str]:
    parser: argparse.ArgumentParser = make_parser()
    for name in command:
        choices = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = choices.choices[name]
    return {option for action in parser._actions for option in action.option_strings}


def test_every_engine_and_sampling_option_is_on_the_command_line() -> None:
    known = option_strings("generate")
    for name in EngineConfig.model_fields:
        assert "--" + name.replace("_", "-") in known
    for name in SamplingParams.model_fields:
        assert (name in NOT_OPTIONS) != ("--" + name.replace("_", "-") in known)
        assert (name in NOT_OPTIONS) != (name in SAMPLING_HELP)
    assert "--no-enable-prefix-caching" in known
    bench = option_strings("bench", "offline")
    assert {
        "--model",
        "--method",
        "--dataset",
        "--requests",
        "--max-tokens",
        "--budget",
        "--seeds",
        "--json",
        "--preset",
    } <= bench


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["generate", "--help"], ["bench", "offline", "--help"]]
)
def test_help_needs_no_torch(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom aspire_llm.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy imports'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "aspire-llm" in done.stdout


def test_json_files_keep_lists_of_numbers_on_one_line(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None], "b": {"c": [[1], []], "d": {}}, "e": [{"é": "ü"}], "f": (True, "x")}
    with OutputFile(str(tmp_path / "out.json"), "--json") as out:
        out.write_json(value | {"g": float("-inf")})
    text = (tmp_path / "out.json").read_text(encoding="utf-8")
    assert json.loads(text) == {**value, "f": [True, "x"], "g": None}
    assert '"a": [1, 2.5, null],\n' in text
