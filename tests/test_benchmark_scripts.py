"""The logic of the scripts in benchmarks/: what they measure on a GPU must be right before it is fast."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from aspire_llm import LLM, SamplingParams
from aspire_llm.policy.trace import Draft, Trace
from aspire_llm.request import TokenLogprobs
from tiny import prompts_of, tiny_model

SCRIPTS = str(Path(__file__).parent.parent / "benchmarks")
sys.path.append(SCRIPTS)  # only while they are imported: some share their names with packages
from ablations import QUESTIONS, VARIANTS, shortened  # noqa: E402
from common import Report, cached_prompts, decode_steadily, kv_memory, other_policy, requests_of  # noqa: E402
from real_text import differences  # noqa: E402
from table import COMPARED, drawn_trace, recorded_traces, replay  # noqa: E402

sys.path.remove(SCRIPTS)


def marked_trace(name: str, mark: float, requests: int = 3, starts: int = 4) -> Trace:
    """Every draft says whose it is: confidence = mark + request / 10, accepted = start."""
    drafts = tuple(tuple(Draft(s, (mark + r / 10,) * 8) for s in range(starts)) for r in range(requests))
    return Trace(name, "window", 0, 4, drafts)


def test_small_batches_have_requests_of_every_workload():
    traces = {"b": marked_trace("b", 2.0), "a": marked_trace("a", 1.0, starts=6)}
    first, second = requests_of(traces, 4, 0), requests_of(traces, 4, 1)
    sources = [request[0].confidences[0] for request in first.drafts]
    assert sources == [1.0, 2.0, 1.1, 2.1]  # in turn from a and b, another request of each every time
    assert [r[0].confidences[0] for r in second.drafts] == [1.2, 2.2, 1.0, 2.0]  # another seed, other requests
    assert all(
        sorted(d.accepted for d in request) == [0, 1, 2, 3] for request in first.drafts
    )  # cut to the shortest, turned


def test_the_same_seed_takes_the_same_requests_of_another_context_set():
    window, refreshed = (recorded_traces(context) for context in ("window", "refreshed"))
    assert window.keys() == refreshed.keys()
    assert len(window) == 6
    chosen = requests_of(refreshed, 9, 3)
    better = sum(d.accepted for r in chosen.drafts for d in r) / sum(
        d.accepted for r in requests_of(window, 9, 3).drafts for d in r
    )
    assert better > 1.2  # the context set that the profile chose is accepted more
    with pytest.raises(ValueError, match="do not mix"):
        requests_of({"a": marked_trace("a", 1.0), "b": next(iter(window.values()))}, 2, 0)


def test_drawn_acceptance_is_scaled_by_the_context_set():
    means = {}
    for context in ("window", "verified", "refreshed"):
        drafts = [d.accepted for r in drawn_trace(context, 12, 0).drafts for d in r]
        means[context] = sum(drafts) / len(drafts)
    assert means["window"] < means["verified"] < means["refreshed"]
    assert means["refreshed"] == pytest.approx(10.5, rel=0.15)
    assert means["window"] == pytest.approx(0.47 * 10.5, rel=0.15)


def test_a_shortened_trace_accepts_no_more_than_it_drafts():
    trace = shortened(Trace("t", "window", 0, 1, ((Draft(7, (0.9,) * 8), Draft(2, (0.5,) * 8)),)), 4)
    assert trace.max_draft == 4
    assert [d.accepted for d in trace.drafts[0]] == [4, 2]


def test_every_question_compares_two_variants():
    names = {variant.name for variant in VARIANTS}
    assert len(names) == len(VARIANTS)
    assert {name for _, *pair in QUESTIONS for name in pair} <= names
    assert COMPARED[0] == "plain"


def logprobs(*rows: dict[int, float]) -> list[TokenLogprobs]:
    return [TokenLogprobs(*next(iter(row.items())), 1, tuple(row.items())) for row in rows]


def test_a_difference_is_explained_by_a_near_tie_only():
    known = logprobs({5: -0.1, 6: -3.0}, {7: -0.7, 8: -0.75, 2: -0.8}, {9: -0.2, 4: -2.0, 1: -9.0})
    plain = [5, 7, 9]
    assert differences([plain], [plain], [known]) == []
    cases = {
        (5, 8, 1): (1, 0.05, True),  # the runner-up of a near-tie
        (5, 2, 1): (1, 0.1, True),  # the third of one
        (5, 3, 1): (1, None, False),  # another token altogether
        (5, 7, 4): (2, 1.8, False),  # the runner-up, by far
    }
    for other, (at, margin, explained) in cases.items():
        (found,) = differences([plain], [list(other)], [known])
        assert (found["request"], found["at"], found["explained"]) == (0, at, explained)
        assert found["margin"] == (None if margin is None else pytest.approx(margin))
    cut = differences([plain], [plain[:2]], [known])
    assert [(d["at"], d["margin"], d["explained"]) for d in cut] == [(2, None, False)]


@pytest.fixture(scope="module")
def lockstep() -> LLM:
    model = tiny_model()
    options = {"max_model_len": 256, "max_num_seqs": 4, "block_size": 4, "max_num_batched_tokens": 64}
    memory = kv_memory(model.config.kv_bytes_per_token(model.decoder.dtype), [(3, 40)], 100, page=4)
    return LLM("tiny", loaded=model, method="vegas", draft_tokens=3, budget=24, kv_cache_memory=memory, **options)


def test_a_steady_stretch_holds_whole_cycles(lockstep):
    prompts = cached_prompts(lockstep, 3, 40, seed=0)
    real = lockstep.engine.runner.sampler
    replay(lockstep, Trace("all right", "verified", 0, 1, ((Draft(8, (0.9,) * 8),),)))
    found = decode_steadily(lockstep, prompts, 16, skip=5, longest=100)
    lockstep.engine.runner.sampler = real
    assert found.tokens >= 3 * 16
    assert found.tokens == 3 * found.steps  # three drafts and a verification bring each request four tokens
    assert found.steps % 4 == 0
    assert found.step_tokens == found.steps // 4 * 3 * (3 + 4)
    assert (found.mean_accepted_length, found.mean_draft_length) == (4.0, 3.0)
    assert not lockstep.engine.has_work


def test_a_request_that_ends_spoils_the_stretch(lockstep):
    with pytest.raises(RuntimeError, match="a request ended"):
        decode_steadily(lockstep, prompts_of([10, 12]), 50, skip=0, longest=8)
    assert not lockstep.engine.has_work


def test_another_policy_over_the_same_runner_decodes_the_same(lockstep):
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    other = other_policy(lockstep, "staggered", 5)
    assert other.engine.runner is lockstep.engine.runner
    prompts = prompts_of([30, 7, 18])
    first, second = (llm.generate(prompts, params) for llm in (lockstep, other))
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]
    longest = [max(o.metrics.speculative_decoding["num_spec_tokens"] for o in outputs) for outputs in (first, second)]
    assert longest == [3, 5]


def test_a_report_outlives_a_part_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    report = Report("some")
    with report.part("bad"):
        raise RuntimeError("no room")
    with report.part("good"):
        report.data["answer"] = 42
    written = json.loads((tmp_path / "some.json").read_text())
    assert written["failed"] == {"bad": "RuntimeError: no room"}
    assert written["answer"] == 42
    assert set(written["seconds"]) == {"bad", "good"}
    assert "no room" in capsys.readouterr().err
