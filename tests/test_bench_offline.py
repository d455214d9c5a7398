"""The offline benchmark: datasets, what it measures, the JSON it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aspire_llm.bench.hindsight import PlainContinuations
from aspire_llm.bench.measure import DecodeClock, free_all_but
from aspire_llm.bench.methods import method_configs
from aspire_llm.bench.offline_report import acceptance_by_position, distinct_token_ratio
from aspire_llm.bench.presets import DEMO, demo_dataset
from aspire_llm.bench.recording import LANE_STEPS, Recording
from aspire_llm.bench.statistics import bootstrap_interval
from aspire_llm.bench.workloads.rows import RowDataset
from aspire_llm.cache.pages import PageAllocator
from aspire_llm.cli import main
from aspire_llm.config import METHODS
from aspire_llm.engine.engine import Step
from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.engine.llm import LLM
from aspire_llm.errors import UserError
from aspire_llm.models.load import load_tokenizer
from aspire_llm.policy.base import CycleOutcome
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.hindsight import Hindsight
from aspire_llm.policy.trace_synthetic import synthetic_trace
from aspire_llm.request import Request, RowKind, SamplingParams, SpeculationStats
from aspire_llm.scheduler.plan import Row, StepPlan
from aspire_llm.scheduler.scheduler import Progress
from saved_model import CONTEXT, save_tiny_model

TEXT = "".join(f"{i} is a number and {i * i} its square.\n" for i in range(200))
TOP = {
    *(
        "kind",
        "replayed",
        "replay",
        "environment",
        "model",
        "dtype",
        "device",
        "workload",
        "seeds",
        "repeats",
        "prefill",
    ),
    *("runs", "methods"),
}
METHOD = {
    "tokens_per_s",
    "speedup",
    "mean_accepted_length",
    "acceptance_by_position",
    "tokens_equal_plain",
    "distinct_token_ratio",
    "peak_memory_bytes",
    "requests",
    *("accepted_length_histogram", "draft_length_histogram", "memory", "cycles", "swim_lane", "step_times", "cost"),
}
ADAPTIVE = {"fsm", "ema", "confidence"}  # these need not draft where it does not pay, as on short prompts
REQUEST = {
    "prompt_tokens",
    "output_tokens",
    "steps",
    "draft_tokens",
    "accepted_tokens",
    "accepted_by_position",
    "mean_accepted_length",
    "seconds",
    "tokens_per_s",
    "tokens_equal_plain",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def inputs(model: str) -> InputProcessor:
    loaded = load_tokenizer(model)
    return InputProcessor(loaded.tokenizer, loaded.config.vocab_size, loaded.eos_token_ids, 0)


def bench(model: str, out: Path, *arguments: str) -> Any:
    assert main(["bench", "offline", "--model", model, "--json", str(out), *arguments]) == 0
    return json.loads(out.read_text())


def check_report(report: Any, methods: list[str], requests: int, max_tokens: int) -> None:
    """Shape, and that the counts agree with one another."""
    assert set(report) == TOP
    assert report["kind"] == "offline"
    assert report["replayed"] is False
    assert set(report["environment"]) == {"machine", "versions", "commit", "command", "started"}
    assert list(report["methods"]) == methods
    for name, method in report["methods"].items():
        assert set(method) >= METHOD
        check_records(method)
        assert method["tokens_equal_plain"] is True
        assert method["tokens_per_s"] > 0
        assert method["peak_memory_bytes"] > 0
        assert len(method["requests"]) == requests
        assert all(0 <= share <= 1 for share in method["acceptance_by_position"])
        for request in method["requests"]:
            assert set(request) >= REQUEST
            assert set(request["steps"]) == {"prefill", "draft", "verify"}
            assert request["tokens_equal_plain"] is True
            assert 1 <= request["output_tokens"] <= max_tokens
            assert sum(request["accepted_by_position"]) == request["accepted_tokens"] <= request["draft_tokens"]
            # one token of the last prompt row, one of each verification, and the accepted drafts
            assert request["output_tokens"] <= 1 + request["steps"]["verify"] + request["accepted_tokens"]
            if name != "hindsight" and METHODS[name].policy not in ADAPTIVE:
                assert (request["steps"]["draft"] > 0) == (name != "plain")
                assert (request["draft_tokens"] > 0) == (name != "plain")
    plain = report["methods"]["plain"]
    assert plain["speedup"] == 1.0
    assert plain["mean_accepted_length"] == 1.0
    assert plain["acceptance_by_position"] == []


def check_records(method: Any) -> None:
    """Columns are of equal length, and agree with the counts of the requests."""
    for record in ("cycles", "swim_lane", "step_times"):
        assert len({len(column) for column in method[record].values()}) == 1
    cycles, lane, requests = method["cycles"], method["swim_lane"], method["requests"]
    for i in range(max(cycles["request"]) + 1):
        mine = [c for c, request in enumerate(cycles["request"]) if request == i]
        assert sum(cycles["drafted"][c] for c in mine) == requests[i]["draft_tokens"]
        assert sum(cycles["accepted"][c] for c in mine) == requests[i]["accepted_tokens"]
        assert len(mine) <= requests[i]["steps"]["verify"]  # a late engine may run one more, for nothing
    assert max(lane["step"]) - min(lane["step"]) < LANE_STEPS
    assert len(set(lane["step"])) == max(lane["step"]) - min(lane["step"]) + 1
    for kind, tokens, accepted in zip(lane["kind"], lane["tokens"], lane["accepted"], strict=True):
        assert kind in ("prefill", "draft", "verify")
        assert tokens >= 1 + accepted
        assert accepted == 0 or kind == "verify"
        assert tokens == 1 or kind != "draft"
    assert sum(method["draft_length_histogram"]) >= len(cycles["step"])
    assert sum(method["accepted_length_histogram"]) == sum(method["draft_length_histogram"][1:])
    times = method["step_times"]
    assert times["step"] == list(range(len(times["step"])))
    assert sum(times["new_tokens"]) == sum(request["output_tokens"] for request in requests if request["seed"] == 0)
    assert all(measured >= 0 for measured in times["measured"])
    assert (times["predicted"][0] is None) == (method["cost"] is None)
    assert 0 < method["memory"]["kv_cache_peak_usage"] <= 1


def test_report_on_a_text_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = [
        "--dataset",
        str(text),
        "--prompt-tokens",
        "60-200",
        "--requests",
        "3",
        "--max-tokens",
        "20",
        "--ignore-eos",
    ]
    options = [
        "--method",
        "vegas,aspire,magicdec-snapkv",
        "--budget",
        "32",
        "--block-size",
        "16",
        "--draft-tokens",
        "3",
    ]
    report = bench(model, tmp_path / "out.json", *arguments, *options, "--repeats", "2")
    check_report(report, ["plain", "vegas", "aspire", "magicdec-snapkv"], 3, 20)
    assert report["model"] == model
    assert {"torch", "python", "aspire-llm"} <= set(report["environment"]["versions"])
    lengths = [request["prompt_tokens"] for request in report["methods"]["plain"]["requests"]]
    assert sorted(lengths) == [60, 130, 200]
    for method in report["methods"].values():
        assert [request["prompt_tokens"] for request in method["requests"]] == lengths
        for request in method["requests"]:
            assert request["output_tokens"] == 20
            # prefilled once: only the last page and, for snapkv, the last 32 tokens are left to each method
            assert request["cached_prompt_tokens"] >= request["prompt_tokens"] - 16 - 32
        low, high = method["tokens_per_s_interval"]
        assert low <= method["tokens_per_s"] <= high
    # in turn, and every speed-up is over plain's run of the same turn
    assert [run["method"] for run in report["runs"]] == 2 * ["plain", "vegas", "aspire", "magicdec-snapkv"]
    assert [run["repeat"] for run in report["runs"]] == 4 * [0] + 4 * [1]
    for first in (0, 4):
        turn = report["runs"][first : first + 4]
        assert [run["speedup"] for run in turn] == [run["tokens_per_s"] / turn[0]["tokens_per_s"] for run in turn]
    assert report["workload"]["generation"] == "fixed"
    assert len(report["methods"]["vegas"]["acceptance_by_position"]) == 3
    printed = capsys.readouterr().out
    for word in ("vegas", "magicdec-snapkv", "speed-up", "yes", "prefilled once", "resident memory"):
        assert word in printed


def test_report_on_jsonl(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": TEXT[:150]}, {"messages": [{"role": "user", "content": TEXT[:100]}]}, {"prompt": TEXT[50:120]}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    report = bench(
        model,
        tmp_path / "out.json",
        "--dataset",
        str(file),
        "--method",
        "sparsespec",
        "--budget",
        "16",
        "--max-tokens",
        "12",
    )
    check_report(report, ["plain", "sparsespec"], 3, 12)
    lengths = [request["prompt_tokens"] for request in report["methods"]["plain"]["requests"]]
    assert lengths == [150, len("<user> " + TEXT[:100] + "\n<assistant>"), 70]


def test_more_requests_than_run_at_once_and_no_prefix_cache(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt-tokens", "100", "--requests", "4", "--max-tokens", "10", "--budget", "16", "--ignore-eos"]
    report = bench(model, tmp_path / "out.json", *arguments, "--max-num-seqs", "2", "--no-enable-prefix-caching")
    check_report(report, ["plain", "vegas", "aspire-ema", "aspire"], 4, 10)
    assert all(request["cached_prompt_tokens"] == 0 for request in report["methods"]["aspire"]["requests"])
    assert "prefilled the prompts itself" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", " \n", ("empty",)),
        ("empty.jsonl", "\n\n", ("empty",)),
        ("bad.jsonl", '{"prompt": "x"}\n{"prompt": ', ("line 2", "JSON")),
        ("other.jsonl", '{"text": "x"}', ("line 1", '"prompt"', '"messages"')),
        ("list.jsonl", "[1]", ("line 1",)),
        ("blank.jsonl", '{"prompt": ""}', ("line 1", "empty")),
        ("role.jsonl", '{"messages": [{"content": "x"}]}', ("line 1", "role")),
        ("latin.txt", b"caf\xe9", ("latin.txt", "UTF-8")),
        ("few.jsonl", '{"prompt": "x"}', ("requests = 2", "has 1")),
        (
            "long.jsonl",
            json.dumps({"prompt": "x" * CONTEXT}) + '\n{"prompt": "y"}',
            ("1 rows too long", "has 1 that fit"),
        ),
        ("short.txt", "short", ("5 tokens", "100")),
    ],
)
def test_bad_datasets(
    name: str,
    content: str | bytes,
    words: tuple[str, ...],
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    lengths = ["--prompt-tokens", "100"] if name == "short.txt" else []
    out = tmp_path / "out.json"
    command = [
        "bench",
        "offline",
        "--model",
        model,
        "--dataset",
        str(file),
        "--requests",
        "2",
        "--max-tokens",
        "4",
        *lengths,
    ]
    assert main([*command, "--json", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    for word in words:
        assert word in error
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_output_longer_than_the_context(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--model", model, "--max-tokens", str(CONTEXT)]) == 2
    assert f"max_tokens = {CONTEXT}" in capsys.readouterr().err


def test_options_go_to_the_methods_that_have_them() -> None:
    configs = method_configs(["plain", "vegas", "aspire"], {"budget": 64, "refresh_layers": (1,), "max_num_seqs": 3})
    assert list(configs) == ["plain", "vegas", "aspire"]
    assert [config.budget for config in configs.values()] == [None, 64, 64]
    assert [config.refresh_layers for config in configs.values()] == [None, None, (1,)]
    assert {config.max_num_seqs for config in configs.values()} == {3}
    configs = method_configs(["plain", "vegas", "aspire", "hindsight"], {"draft_tokens": 3})
    assert [config.draft_tokens for config in configs.values()] == [None, 3, None, None]
    with pytest.raises(UserError, match="draft_tokens"):
        method_configs(["aspire"], {"draft_tokens": 3})
    with pytest.raises(UserError, match="refresh_layers"):
        method_configs(["vegas"], {"refresh_layers": (1,)})


def test_clock_counts_only_steps_without_prompt_rows() -> None:
    class Memory:
        def sample(self) -> None:
            pass

    request = Request("0", 0, [1], SamplingParams())
    seen: list[int] = []
    recording = Recording([request], PageAllocator(4, 4, True), None)
    clock = DecodeClock(Memory(), recording, seen.append)  # type: ignore[arg-type]
    clock.start()
    prompt, decode = Row(0, 1, RowKind.PREFILL, 3), Row(1, 1, RowKind.VERIFY, 4)
    clock(Step([Progress(request, 2, False)], StepPlan(0, (decode, prompt))))
    assert (clock.tokens, clock.seconds) == (0, 0.0)
    clock(Step([Progress(request, 3, False)], StepPlan(1, (decode,))))
    assert clock.tokens == 3
    assert clock.seconds > 0
    assert seen == [2, 5]


def test_only_the_prompts_stay_cached() -> None:
    pages = PageAllocator(20, 4, True)
    prompts = [list(range(10)), list(range(100, 109))]
    for key, prompt in enumerate(prompts):
        tokens = [*prompt, *range(50, 60)]  # and an output
        pages.open(key, tokens, 0)
        pages.reserve(key, len(tokens))
        pages.commit(key, tokens, len(tokens))
    for key in range(len(prompts)):
        pages.release(key)
    free_all_but(pages, prompts)
    pages.check()
    for prompt in prompts:
        assert pages.match_prefix([*prompt, *range(50, 60)], max_tokens=20) == 8
    assert pages.num_free == 20


def test_hindsight_verifies_exactly_when_a_draft_has_gone_wrong(model: str) -> None:
    prompts = [TEXT[i * 50 : i * 50 + 100 + i] for i in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 256, "block_size": 16}
    plain = LLM(model, method="plain", **options)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    truth = PlainContinuations()
    dear_reads = CostModel(fixed=1.0, per_token=0.0, per_kv=10.0)  # drafts always pay, as long as they are right
    policy = Hindsight(dear_reads, ReadModel(16, 3, 1), truth)
    llm = LLM(loaded=plain.model, budget=16, max_draft_tokens=5, policy_object=policy, **options)
    requests = [request for prompt in prompts for request in llm.inputs.requests(prompt, params)]
    truth.begin(requests, expected)
    outcomes: list[CycleOutcome] = []
    policy.observe_cycle = outcomes.append  # type: ignore[method-assign]
    llm.run([[request] for request in requests], [None] * 5, truth)
    assert [request.output_token_ids for request in requests] == expected
    emitted = {request.key: 1 for request in requests}  # by the prompt's last row
    for outcome in outcomes:
        assert outcome.accepted >= outcome.drafted - 1
        if outcome.accepted == outcome.drafted:  # nothing was wrong: as many as were allowed
            assert outcome.drafted == min(5, 40 - emitted[outcome.key] - 1)
        emitted[outcome.key] += outcome.accepted + 1
    assert any(outcome.accepted < outcome.drafted for outcome in outcomes)
    assert any(outcome.accepted > 0 for outcome in outcomes)


def test_bench_of_hindsight(model: str, tmp_path: Path) -> None:
    arguments = [
        "--prompt-tokens",
        "100",
        "--requests",
        "2",
        "--max-tokens",
        "10",
        "--budget",
        "16",
        "--method",
        "hindsight",
    ]
    report = bench(model, tmp_path / "out.json", *arguments)
    assert list(report["methods"]) == ["plain", "hindsight"]
    assert report["methods"]["hindsight"]["tokens_equal_plain"] is True


def test_seeds_and_repeats_take_turns(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt-tokens", "60-90", "--requests", "2", "--max-tokens", "6", "--budget", "16", "--ignore-eos"]
    report = bench(model, tmp_path / "o.json", *arguments, "--method", "vegas", "--seeds", "0,7", "--repeats", "2")
    assert [(run["seed"], run["repeat"], run["method"]) for run in report["runs"]] == [
        (seed, repeat, method) for seed in (0, 7) for repeat in (0, 1) for method in ("plain", "vegas")
    ]
    vegas = report["methods"]["vegas"]
    assert vegas["repeats"] == 4
    assert vegas["tokens_equal_plain"] is True
    assert vegas["requests_equal_plain"] == 8
    assert [request["seed"] for request in vegas["requests"]] == [0, 0, 7, 7]
    assert report["prefill"]["tokens"] == 2 * 150
    printed = capsys.readouterr().out
    assert "2 seeds x 2 repeats" in printed
    assert "no intervals" not in printed


def test_rows_left_out_are_reported(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": TEXT[:80]}, {"prompt": TEXT[:CONTEXT]}, {"prompt": TEXT[:90]}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--dataset", str(file), "--max-tokens", "4", "--budget", "16", "--method", "vegas"]
    report = bench(model, tmp_path / "o.json", *arguments)
    (reason, count) = next(iter(report["workload"]["skipped"].items()))
    assert "too long" in reason
    assert count == 1
    printed = capsys.readouterr().out
    assert "skipped: 1 rows too long" in printed
    assert "no intervals" in printed


def test_replayed_acceptance_is_marked_and_the_same_for_every_method(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *("--load-format", "dummy", "--dataset", "random", "--prompt-tokens", "100", "--requests", "3"),
        *("--max-tokens", "60", "--budget", "16", "--method", "vegas,magicdec-window,hindsight"),
    ]
    report = bench(model, tmp_path / "o.json", *arguments, "--replay-lengths", "6,3,12", "--seeds", "3")
    assert report["replayed"] is True
    assert report["replay"]["source"] == "lengths"
    assert {name: method["replayed"] for name, method in report["methods"].items()} == {
        "plain": False,
        "vegas": True,
        "magicdec-window": True,
        "hindsight": True,
    }
    assert [run["replayed"] for run in report["runs"]] == [False, True, True, True]
    methods = report["methods"]
    assert methods["plain"]["tokens_equal_plain"] is True
    assert methods["vegas"]["tokens_equal_plain"] is None
    assert all(request["output_tokens"] == 60 for m in methods.values() for request in m["requests"])
    # a position has one fate: what both methods drafted there, both have rejected or neither
    trace = synthetic_trace(6, 3, 12, 3, 76, 3)
    for name in ("vegas", "magicdec-window", "hindsight"):
        cycles, made = methods[name]["cycles"], [0, 0, 0]
        if name != "hindsight":  # which need not draft where it does not pay
            assert sum(cycles["drafted"]) > sum(cycles["accepted"]) > 10
        for request, drafted, accepted in zip(cycles["request"], cycles["drafted"], cycles["accepted"], strict=True):
            draft = trace.drafts[request][made[request]]
            left = 60 - (made[request] + 1)  # tokens to come
            assert accepted == min(draft.accepted, drafted, left)
            if name == "hindsight" and drafted:
                assert accepted >= drafted - 1
            made[request] += accepted + 1
    assert capsys.readouterr().out.count("replayed") >= 4


def test_replay_of_a_recorded_trace(model: str, tmp_path: Path) -> None:
    arguments = [
        *("--load-format", "dummy", "--dataset", "random", "--prompt-tokens", "60", "--requests", "2"),
        *("--max-tokens", "30", "--budget", "16", "--method", "vegas", "--replay", "smollm2-135m_5k_demo"),
    ]
    report = bench(model, tmp_path / "o.json", *arguments, "--replay-method", "refreshed_penultimate")
    assert report["replay"]["name"] == "smollm2-135m_5k_demo/refreshed_penultimate"
    assert report["methods"]["vegas"]["mean_accepted_length"] > 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replay", "x.npz"], "x.npz"),
        (["--replay", "smollm2-135m_5k_demo", "--replay-method", "window"], "window"),
        (["--replay-method", "window"], "without --replay"),
        (["--replay", "a", "--replay-lengths", "6,3,12"], "exclude"),
        (["--replay-lengths", "6"], "MEAN,MIN,MAX"),
        (["--replay-lengths", "2,3,12"], "2,3,12"),
        (["--replay-lengths", "6,3,12", "--max-draft-tokens", "40"], "drafts of 32"),
        (["--seeds", "1,1"], "--seeds"),
        (["--seeds", "x"], "--seeds"),
        (["--needles", "3"], "needles = 3 does nothing with dataset 'text'"),
        (["--dataset-format", "sharegpt"], "does nothing with dataset 'text'"),
        (["--dataset", "text", "--needles", "3"], "needles"),
        (["--dataset", "needles", "--dataset-format", "aime"], "aime"),
        (["--preset", "demo", "--needles", "3"], "--needles"),
    ],
)
def test_bad_options(options: list[str], words: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--model", model, *options]) == 2
    assert words in capsys.readouterr().err


def test_statistics() -> None:
    stats = SpeculationStats()
    stats.record_cycle(3, 3)
    stats.record_cycle(2, 0)
    assert acceptance_by_position(stats) == [0.5, 0.5, 1.0]
    assert distinct_token_ratio([1, 1, 1, 2]) == 0.5
    assert bootstrap_interval([1.0]) is None
    assert bootstrap_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    interval = bootstrap_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval is not None
    assert 1.0 <= interval[0] < 3.0 < interval[1] <= 5.0


def test_demo_is_eight_tasks_of_different_lengths() -> None:
    texts = [passage.text() for passage in DEMO]
    assert len(set(texts)) == len({len(text) for text in texts}) == 8
    assert isinstance(demo_dataset(), RowDataset)


@pytest.mark.model
def test_smollm2(tmp_path: Path) -> None:
    arguments = [
        "--method",
        "sparsespec",
        "--requests",
        "2",
        "--prompt-tokens",
        "300-400",
        "--max-tokens",
        "24",
        "--budget",
        "128",
        "--max-model-len",
        "1K",
    ]
    report = bench("smollm2-135m", tmp_path / "out.json", *arguments)
    check_report(report, ["plain", "sparsespec"], 2, 24)
    assert report["methods"]["sparsespec"]["mean_accepted_length"] > 1.5


@pytest.mark.model
def test_demo_prompts_are_4_to_6_thousand_tokens() -> None:
    loaded = load_tokenizer("smollm2-135m")
    smollm2 = InputProcessor(loaded.tokenizer, loaded.config.vocab_size, loaded.eos_token_ids, 0)
    lengths = [len(prompt) for prompt in demo_dataset().select(smollm2, None, 8000, 0).prompts]
    assert len(lengths) == 8
    assert 3800 <= min(lengths) <= max(lengths) <= 6200
    assert sum(lengths) < 38_000
