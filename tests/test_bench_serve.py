"""`bench serve`: against our own server, and against one that answers badly. No request may go missing."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire_llm.bench.serve_client import Outcome
from aspire_llm.bench.serve_figures import figures, parse_goodput, percentile
from aspire_llm.bench.serve_load import Load
from aspire_llm.bench.serve_server import counted_speculation, differences, parse_counters, root_of
from aspire_llm.bench.serve_stream import Answer, EventDecoder, StreamError
from aspire_llm.cli import main
from aspire_llm.cli.commands.bench.serve import command_line
from aspire_llm.errors import UserError
from bad_server import bad_server
from saved_model import save_tiny_model
from serving_server import Served, engine, served, served_model

STREAM = 'data: {"a": "x\u2028y\x0bz"}\n\n: comment\r\n\r\nevent: e\r\ndata: one\r\ndata:two\r\n\r\ndata: [DONE]\n\n'.encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_how_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    decoder = EventDecoder()
    events = [e for a, b in itertools.pairwise(edges) for e in decoder.feed(STREAM[a:b])]
    assert events == ['{"a": "x\u2028y\x0bz"}', "one\ntwo", "[DONE]"]


def test_an_answer_of_a_chat() -> None:
    answer = Answer()
    for now, delta in enumerate(
        [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "hm"},
            {"content": "yes"},
            {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        ]
    ):
        answer.add(json.dumps({"choices": [{"delta": delta, "finish_reason": None}], "usage": None}), now)
    assert not answer.complete
    answer.add(json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]}), 9)
    answer.add(json.dumps({"choices": [], "metrics": {"speculative_decoding": {"num_spec_steps": 2}}}), 10)
    assert (answer.text, answer.text_times, answer.finished_at) == ("hmyesf{}", [1, 2, 3], 9)
    assert answer.speculation == {"num_spec_steps": 2}
    with pytest.raises(StreamError):
        answer.add("{", 11)


def outcome(index: int = 0, **changes: Any) -> Outcome:
    settings: dict[str, Any] = {
        "index": index,
        "kind": "ok",
        "detail": "",
        "start": 0.0,
        "end": 1.0,
        "waited": 0.0,
        "ttft": 0.2,
        "itl": (0.4, 0.4),
        "text": "a b a b",
        "prompt_tokens": 10,
        "output_tokens": 5,
        "tokens_counted": True,
        "finish_reason": "stop",
        "speculation": None,
    }
    return Outcome(**{**settings, **changes})


def test_figures_of_known_outcomes() -> None:
    outcomes = [
        outcome(0),
        outcome(1, start=1.0, end=3.0, ttft=1.0, output_tokens=11),
        outcome(2, kind="timeout", end=4.0, output_tokens=3, ttft=0.1),
        outcome(3, start=2.0, end=2.5, ttft=0.5, itl=(), output_tokens=1),
    ]
    found = figures(outcomes, {"ttft": 0.6, "tpot": 0.25}, str.split)
    assert found["duration"] == 4.0
    assert found["outcomes"] == {"ok": 3, "timeout": 1}
    assert found["request_throughput"] == 3 / 4
    assert found["output_throughput"] == 17 / 4  # what a failed request said does not count
    assert found["total_token_throughput"] == 47 / 4
    latencies = found["latencies"]
    assert latencies["ttft"]["median"] == 0.5
    low, high = latencies["ttft"]["median_interval"]
    assert 0.2 <= low <= 0.5 <= high <= 1.0
    assert latencies["tpot"]["count"] == 2  # one token has none
    assert latencies["tpot"]["median"] == pytest.approx((0.8 / 4 + 1.0 / 10) / 2)  # a token, not a chunk
    assert latencies["itl"]["count"] == 4
    assert latencies["e2el"]["p99"] == pytest.approx(percentile([0.5, 1.0, 2.0], 0.99))
    assert found["goodput"]["share"] == 2 / 4  # one is too late, one failed
    assert found["goodput"]["request_throughput"] == 2 / 4
    assert found["distinct_ratio"] == 0.5
    assert len(found["requests"]) == 4
    assert figures([], None, str.split)["latencies"]["ttft"] is None


def test_goodput_targets() -> None:
    assert parse_goodput("ttft:500,tpot:50") == {"ttft": 0.5, "tpot": 0.05}
    assert parse_goodput("e2el:1000 ttft:2") == {"e2el": 1.0, "ttft": 0.002}
    for wrong in ("itl:5", "ttft", "ttft:0", "ttft:x", "tpot:nan", ","):
        with pytest.raises(UserError, match="goodput"):
            parse_goodput(wrong)


def test_poisson_arrivals() -> None:
    times = Load(20.0, None, 1.0, seed=3).arrivals(2000)
    assert times[0] == 0.0
    assert times == sorted(times)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.25)  # as an exponential's
    assert times == Load(20.0, 4, 9.0, seed=3).arrivals(2000)
    assert times != Load(20.0, None, 1.0, seed=4).arrivals(2000)
    assert Load(None, None, 1.0).arrivals(3) == [0.0] * 3


COUNTERS = """# HELP x
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a}} \\"b"}} {0}.0
vllm:spec_decode_num_drafts_total{{engine="1",model_name="a"}} 1
vllm:spec_decode_num_draft_tokens_total{{model_name="a"}} {1}
vllm:spec_decode_num_accepted_tokens_total {2}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {3}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {4}
vllm:spec_decode_num_drafts_created{{model_name="a"}} 1.7e+09
other_total 7
"""


def test_counters_of_the_server() -> None:
    before, after = (parse_counters(COUNTERS.format(*n)) for n in ((5, 20, 8, 1, 2), (15, 60, 33, 4, 9)))
    found = counted_speculation(differences(before, after))
    assert found == {
        "num_spec_steps": 10,
        "num_draft_tokens": 40,
        "num_accepted_draft_tokens": 25,
        "mean_acceptance_length": 3.5,
        "draft_acceptance_rate": 25 / 40,
        "acceptance_histogram": [7, 3],
    }
    assert differences(after, before) is None  # began again
    assert differences(None, after) is None
    assert parse_counters("up 1\n") is None
    assert counted_speculation(differences({}, parse_counters("vllm:num_preemptions_total 1"))) is None


def test_base_urls() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert root_of(url) == "http://h:1"
    assert root_of("https://h/prefix/v1") == "https://h/prefix"
    for wrong in ("h:1", "ftp://h", "http://", "http://[", ""):
        with pytest.raises(UserError, match="base-url"):
            root_of(wrong)


def rows(path: Path, *contents: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(content) + "\n" for content in contents))
    return str(path)


def bench(url: str, dataset: str, out: Path, *options: str) -> dict[str, Any]:
    command = ["bench", "serve", "--base-url", url, "--dataset", dataset, "--json", str(out), *options]
    assert main(command) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    assert sum(report["outcomes"].values()) == len(report["requests"]) == report["workload"]["requests"]
    return report


FAULTS = {
    "429": "http 429",
    "500": "http 500",
    "html": "http 502",
    "nothing": "no answer",
    "silent": "timeout",
    "whole": "not a stream",
    "half": "truncated",
    "cut": "truncated",
    "garbage": "malformed",
    "list": "malformed",
    "odd choices": "malformed",
    "error": "error event",
    "error first": "error event",
    "empty": "empty",
    "no usage": "ok",
    "good": "ok",
}


def test_every_fault_is_counted_by_its_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = rows(tmp_path / "p.jsonl", *({"prompt": script} for script in FAULTS))
    with bad_server() as server:
        options = ["--num-prompts", str(len(FAULTS)), "--request-timeout", "1", "--num-warmups", "0"]
        report = bench(server.url, dataset, tmp_path / "out.json", *options)
    # rows keep an order of their own: a request is known by what it was asked
    asked = {body["prompt"] for body in server.bodies}
    assert asked == set(FAULTS)
    kinds: dict[str, int] = {}
    for kind in FAULTS.values():
        kinds[kind] = kinds.get(kind, 0) + 1
    assert report["outcomes"] == kinds
    details = {request["outcome"]: request["detail"] for request in report["requests"]}
    assert details["http 429"] == "because of 429"
    assert details["http 502"] == "<h1>Bad Gateway</h1>"
    assert details["timeout"] == "after 1 s"
    assert "fell over" in str(report["requests"])
    assert report["latencies"]["ttft"]["count"] == 2
    assert report["output_tokens"] == 6 + 2  # where the server does not count, chunks are
    assert report["output_tokens_counted_by"] != "server"
    printed = capsys.readouterr().out
    for kind in kinds:
        assert kind in printed
    assert "nothing about speculation" in printed


def test_nothing_but_failures_is_an_error_with_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = rows(tmp_path / "p.jsonl", {"prompt": "500"}, {"prompt": "half"})
    out = tmp_path / "out.json"
    with bad_server() as server:
        command = ["bench", "serve", "--base-url", server.url, "--dataset", dataset, "--json", str(out)]
        assert main([*command, "--num-prompts", "2"]) == 2
    assert "no request succeeded" in capsys.readouterr().err.splitlines()[-1]
    assert json.loads(out.read_text())["outcomes"] == {"http 500": 1, "truncated": 1}


def test_times_and_concurrency(tmp_path: Path) -> None:
    dataset = rows(tmp_path / "p.jsonl", *[{"prompt": "good"}] * 9)
    with bad_server() as server:
        report = bench(
            server.url,
            dataset,
            tmp_path / "out.json",
            "--num-prompts",
            "9",
            "--max-concurrency",
            "3",
            "--num-warmups",
            "2",
        )
    assert len(server.bodies) == 11
    assert server.most == 3
    assert report["warm_ups"] == {"requests": 2, "ok": 2}
    assert report["load"] == {"request_rate": None, "max_concurrency": 3, "request_timeout": 600.0}
    for request in report["requests"]:
        assert request["chunks"] == 2
        assert 0 < request["ttft"] < request["latency"]
        assert request["latency"] >= 0.05  # the pause between the chunks
        assert request["tpot"] == pytest.approx((request["latency"] - request["ttft"]) / 5)  # six tokens in two chunks
    assert report["longest_wait_to_be_sent"] > 0.1  # all were due at once, and three went at a time


def test_what_is_sent(tmp_path: Path) -> None:
    with bad_server(counters=[]) as server:
        bench(server.url, rows(tmp_path / "p.jsonl", {"prompt": "good"}), tmp_path / "o", "--num-warmups", "0")
        plain = server.bodies.pop()
        chat = rows(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "hello"}]})
        options = ["--ignore-eos", "--max-tokens", "7", "--temperature", "0.5", "--seed", "3", "--num-warmups", "0"]
        bench(server.url, chat, tmp_path / "o", *options)
        sampled = server.bodies.pop()
    common = {"model": "bad", "stream": True, "stream_options": {"include_usage": True}}
    assert plain == {**common, "prompt": "good", "max_tokens": 128, "temperature": 0.0}
    messages = [{"role": "user", "content": "hello"}]
    more = {"max_tokens": 7, "temperature": 0.5, "ignore_eos": True, "seed": 3}
    assert sampled == {**common, "messages": messages, **more}


def test_counters_that_fall_or_are_missing_are_no_speculation(tmp_path: Path) -> None:
    dataset = rows(tmp_path / "p.jsonl", {"prompt": "good"})
    texts = [COUNTERS.format(5, 20, 8, 1, 2), COUNTERS.format(9, 40, 18, 5, 6)]
    with bad_server(counters=texts[:]) as server:
        report = bench(server.url, dataset, tmp_path / "o")
        assert report["counted_speculation"]["mean_acceptance_length"] == 1 + 10 / 4
        server.counters = texts[::-1]
        assert bench(server.url, dataset, tmp_path / "o")["counted_speculation"] is None
        server.counters = texts[:1]
        assert bench(server.url, dataset, tmp_path / "o")["counters"] is None


def test_the_key_is_sent_and_stays_out_of_the_results(tmp_path: Path) -> None:
    dataset = rows(tmp_path / "p.jsonl", {"prompt": "good"})
    with bad_server(key="sk-hidden") as server:
        bench(server.url, dataset, tmp_path / "o", "--api-key", "sk-hidden")
    assert "sk-hidden" not in (tmp_path / "o").read_text()
    line = command_line(["bench", "serve", "--api-key", "sk-1", "--api-key=sk-2", "--model", "m"])
    assert "sk-" not in line
    assert line.endswith("--model m")


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["bench", "serve", *options]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def test_servers_that_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = rows(tmp_path / "p.jsonl", {"prompt": "good"})
    with bad_server(key="sk-a", models=["a", "b"]) as server:
        url = ["--base-url", server.url, "--dataset", dataset]
        assert "401" in refused(capsys, *url)
        assert "a, b" in refused(capsys, *url, "--api-key", "sk-a")
        assert "--num-prompts" not in refused(capsys, *url, "--api-key", "sk-a", "--model", "a", "--num-prompts", "5")
    assert "no server" in refused(capsys, *url)  # it has gone


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--base-url", "nonsense"], ("--base-url", "nonsense")),
        (["--request-rate", "0"], ("--request-rate", "0")),
        (["--request-rate", "fast"], ("--request-rate", "fast")),
        (["--max-concurrency", "0"], ("--max-concurrency", "0")),
        (["--num-prompts", "x"], ("--num-prompts", "x")),
        (["--endpoint", "/v1/embeddings"], ("/v1/embeddings", "/v1/completions")),
        (["--goodput", "itl:4"], ("--goodput", "itl:4", "tpot")),
        (["--request-timeout", "-1"], ("--request-timeout", "-1")),
        (["--temperature", "-1"], ("--temperature", "-1")),
        (["--dataset", "no-such-file"], ("no-such-file",)),
        (["--tokenizer", "no/such/model"], ("no/such/model",)),
        (["--max-tokens", "0"], ("--max-tokens", "0")),
        (["--num-warmups", "-1"], ("--num-warmups", "-1")),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_options(
    options: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = refused(capsys, *options)
    for word in words:
        assert word in line


@pytest.fixture(scope="module")
def ours() -> Iterator[Served]:
    llm = engine(served_model())
    with served(llm) as server:
        yield server
    llm.shutdown()


def test_our_server_with_speculation(ours: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [{"prompt": f"{word} and so on, " * 12} for word in ("one", "two", "three", "four", "five", "six")]
    options = [
        "--num-prompts",
        "6",
        "--max-tokens",
        "40",
        "--ignore-eos",
        "--request-rate",
        "40",
        "--goodput",
        "e2el:60000",
    ]
    report = bench(ours.url + "/v1", rows(tmp_path / "p.jsonl", *texts), tmp_path / "o", *options)
    assert report["outcomes"] == {"ok": 6}
    assert report["server"]["model"] == "tiny"
    assert report["server"]["max_model_len"] == 1024
    assert report["output_tokens"] == 6 * 40
    assert report["output_tokens_counted_by"] == "server"
    assert report["goodput"]["share"] == 1.0
    told, counted = report["speculation"], report["counted_speculation"]
    assert told["num_draft_tokens"] > 0
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert told[name] == counted[name]  # the warm-up is in neither
    assert told["mean_acceptance_length"] == pytest.approx(counted["mean_acceptance_length"])
    assert report["counters"]["vllm:generation_tokens"] == 6 * 40
    assert "Speculation (answers)" in " ".join(capsys.readouterr().out.split())
    ours.assert_idle()


def test_our_server_by_chat_and_its_own_errors(ours: Served, tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("hello", "refuse", "x" * 3000)]
    options = ["--num-prompts", "3", "--max-tokens", "8", "--ignore-eos", "--num-warmups", "0"]
    report = bench(ours.url, rows(tmp_path / "c.jsonl", *chats), tmp_path / "o", *options)
    assert report["server"]["endpoint"] == "/v1/chat/completions"
    assert report["outcomes"] == {"ok": 1, "http 400": 2}


def test_texts_need_a_tokenizer(ours: Served, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "--base-url", ours.url, "--dataset", "random", "--prompt-tokens", "50")
    assert "--tokenizer" in line


def test_texts_are_cut_in_tokens_by_a_tokenizer(tmp_path: Path) -> None:
    model = str(save_tiny_model(tmp_path / "model"))
    options = ["--tokenizer", model, "--prompt-tokens", "20", "--num-prompts", "3", "--num-warmups", "0"]
    with bad_server() as server:
        report = bench(server.url, "random", tmp_path / "o", *options)
        tokens = [body["prompt"] for body in server.bodies]
        assert [len(prompt) for prompt in tokens] == [20] * 3
        assert len({tuple(prompt) for prompt in tokens}) == 3
        assert report["distinct_of"] == "tokens"
        server.bodies.clear()
        bench(server.url, "text", tmp_path / "o", *options, "--endpoint", "/v1/chat/completions")
        said = [body["messages"][0]["content"] for body in server.bodies]
        assert all(isinstance(text, str) and text for text in said)


def test_conversations_for_completions_need_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = rows(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "hello"}]})
    with bad_server() as server:
        line = refused(capsys, "--base-url", server.url, "--dataset", chat, "--endpoint", "/v1/completions")
    assert "--tokenizer" in line


def test_prompts_leave_room_for_the_output(ours: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = rows(tmp_path / "p.jsonl", {"prompt": "x"})
    assert "1024" in refused(capsys, "--base-url", ours.url, "--dataset", dataset, "--max-tokens", "1024")
    few = rows(tmp_path / "q.jsonl", {"prompt": "x"}, {"prompt": "y"})
    assert "2" in refused(capsys, "--base-url", ours.url, "--dataset", few, "--num-prompts", "3")


def test_cancelled_runs_leave_nothing(ours: Served) -> None:
    """Ctrl-C in the client frees the server."""
    import httpx

    from aspire_llm.bench.serve_load import send_all

    async def run() -> None:
        async with httpx.AsyncClient(base_url=ours.url) as client:
            bodies = [{"model": "tiny", "prompt": "abc", "max_tokens": 900, "stream": True, "ignore_eos": True}] * 3
            async with asyncio.timeout(0.3):
                await send_all(client, "/v1/completions", bodies, Load(None, None, 60.0))

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    ours.assert_idle()
