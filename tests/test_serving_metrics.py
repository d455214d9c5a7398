"""Metrics: they add up to what was asked for, under names that dashboards know; plain and as Prometheus reads them."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aspire_llm import LLM, SamplingParams
from aspire_llm.engine.engine import Step
from aspire_llm.engine.metrics import Counter, EngineMetrics, Gauge, Histogram, Metric, Vector
from aspire_llm.policy.base import Priced
from aspire_llm.request import RowKind
from serving_server import NAME, engine, served, served_model
from tiny import FixedCost

MODEL = served_model()
# CONVENTIONS: names that existing dashboards ask for
EXPECTED = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "aspire:draft_length_bucket",
    "aspire:step_seconds_bucket",
    "aspire:rows_total",
    "aspire:row_tokens_total",
    "aspire:kv_tokens_read_total",
    "aspire:steps_total",
    "aspire:price_tokens_per_second",
    "aspire:refresh_kv_tokens_read_total",
    "aspire:refresh_predicted_seconds_total",
    "aspire:step_predicted_ratio_bucket",
    "aspire:http_requests_total",
    "process_open_fds",
    "process_resident_memory_bytes",
}


def value(metrics: list[Metric], name: str, **labels: str) -> float:
    [found] = [m for m in metrics if m.name == name and m.labels == labels]
    assert isinstance(found, Counter | Gauge)
    return found.value


def histogram(metrics: list[Metric], name: str) -> Histogram:
    [found] = [m for m in metrics if m.name == name]
    assert isinstance(found, Histogram)
    counts = list(found.buckets.values())
    assert counts == sorted(counts)
    assert counts[-1] == found.count
    assert list(found.buckets)[-1] == "+Inf"
    return found


def local_engine(**options: Any) -> LLM:
    settings: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory": 8 << 20, "block_size": 16}
    return LLM(NAME, loaded=MODEL, cost=FixedCost(1.0, 0.01, 0.05), **{**settings, **options})


def test_counts_are_those_of_the_outputs() -> None:
    llm = local_engine(method="sparsespec", draft_tokens=4, budget=32)
    chance = random.Random(0)
    prompts = ["".join(chance.choices("abcdefgh ", k=200)) for _ in range(3)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    outputs += llm.generate(prompts[0], params)  # its prompt is cached by now
    found = llm.get_metrics()
    total = {
        name: sum(o.metrics.speculative_decoding[name] for o in outputs if o.metrics)
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    }
    assert total["num_draft_tokens"] > total["num_accepted_draft_tokens"] > 0
    assert value(found, "vllm:spec_decode_num_drafts") == total["num_spec_steps"]
    assert value(found, "vllm:spec_decode_num_draft_tokens") == total["num_draft_tokens"]
    assert value(found, "vllm:spec_decode_num_accepted_tokens") == total["num_accepted_draft_tokens"]
    [per_position] = [m for m in found if isinstance(m, Vector)]
    assert sum(per_position.values) == total["num_accepted_draft_tokens"]
    assert per_position.values == sorted(per_position.values, reverse=True)
    assert value(found, "vllm:prompt_tokens") == 800
    assert value(found, "vllm:generation_tokens") == 120
    assert value(found, "vllm:request_success", finished_reason="length") == 4
    assert value(found, "vllm:request_success", finished_reason="stop") == 0
    assert value(found, "vllm:prefix_cache_queries") == 800
    assert (
        value(found, "vllm:prefix_cache_hits") == sum(o.metrics.num_cached_tokens for o in outputs if o.metrics) >= 192
    )
    for kind in ("prefill", "draft", "verify"):
        assert value(found, "aspire:rows", kind=kind) == sum(o.metrics.steps[kind] for o in outputs if o.metrics)
    assert value(found, "aspire:row_tokens", kind="draft") == value(found, "aspire:rows", kind="draft")
    assert value(found, "aspire:kv_tokens_read", kind="verify") > 0
    assert histogram(found, "vllm:time_to_first_token_seconds").count == 4
    assert histogram(found, "vllm:e2e_request_latency_seconds").count == 4
    assert histogram(found, "vllm:time_per_output_token_seconds").count == 120 - 4  # per token
    chunks = histogram(found, "vllm:inter_token_latency_seconds").count
    assert chunks == histogram(found, "aspire:draft_length").count < 116  # several tokens a chunk
    assert histogram(found, "aspire:draft_length").sum == total["num_draft_tokens"]
    assert histogram(found, "vllm:request_generation_tokens").sum == 120
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert value(found, gauge) == 0


def test_predicted_and_measured_time_of_steps() -> None:
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory": 8 << 20, "block_size": 16}
    llm = LLM(NAME, loaded=MODEL, method="aspire", calibrate=False, **options)
    llm.generate("x" * 30, SamplingParams(max_tokens=20, ignore_eos=True))
    found = llm.get_metrics()
    measured = value(found, "aspire:step_measured_seconds")
    assert measured == pytest.approx(histogram(found, "aspire:step_seconds").sum)
    assert measured / 100 < value(found, "aspire:step_predicted_seconds") < measured * 100
    assert histogram(found, "aspire:step_seconds").count == value(found, "aspire:steps")
    residuals = histogram(found, "aspire:step_predicted_ratio")
    assert residuals.count == value(found, "aspire:steps")
    assert residuals.sum > 0
    plain = local_engine(method="plain").get_metrics()
    assert not [m for m in plain if m.name == "aspire:step_predicted_seconds"]  # nothing predicts there


def test_what_refreshing_costs_and_what_a_draft_must_bring() -> None:
    """A refresh layer reads all there is before a draft: of two layers it is half of that, priced by the KV token."""
    llm = local_engine(method="aspire", budget=32, refresh_layers=(1,))
    cost = llm.engine.cost
    assert cost is not None
    read = 0

    def count(step: Step) -> None:
        nonlocal read
        assert step.plan is not None
        # nothing is late here: a draft at position p reads p + 1 tokens, and stands right before its row's reach
        read += sum(row.reach for row in step.plan.rows if row.kind is RowKind.DRAFT)

    llm.generate(["y" * 300, "z" * 100], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), on_step=count)
    found = llm.get_metrics()
    drafts = value(found, "aspire:rows", kind="draft")
    assert drafts > 0
    assert 100 * drafts < read < 340 * drafts
    assert value(found, "aspire:refresh_kv_tokens_read") == pytest.approx(read / 2)
    assert value(found, "aspire:refresh_predicted_seconds") == pytest.approx(cost.per_kv * read / 2)
    # what the backend counted is that, and at most the budget and the tail in the other layer
    all_reads = value(found, "aspire:kv_tokens_read", kind="draft")
    assert read / 2 < all_reads <= read / 2 + drafts * (32 + 16) / 2
    policy = llm.engine.scheduler.policy
    assert isinstance(policy, Priced)
    assert value(found, "aspire:price_tokens_per_second") == policy.price == 0.0  # nobody is left
    [request] = llm.inputs.requests("x" * 200, SamplingParams(max_tokens=40, ignore_eos=True))
    llm.engine.add(request)
    for _ in range(4):
        llm.metrics.on_step(llm.engine.step())
    # at least plain decoding's tokens a second: a draft that brings fewer is not made
    assert value(llm.get_metrics(), "aspire:price_tokens_per_second") >= 1 / (1.0 + 0.01 + 0.05 * 250)
    llm.engine.abort(request)
    without = {metric.name for metric in local_engine(method="vegas").get_metrics()}
    assert not without & {"aspire:price_tokens_per_second", "aspire:step_predicted_ratio"}


def test_preemptions_and_aborts_are_counted() -> None:
    llm = local_engine(method="plain", kv_cache_memory=40 * 16 * 2 * 2 * 2 * 8 * 4, max_model_len=320, max_num_seqs=4)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    llm.generate(["a" * 100, "b" * 100, "c" * 100, "d" * 100], params)
    found = llm.get_metrics()
    assert value(found, "vllm:num_preemptions") == llm.engine.scheduler.num_preemptions > 0
    assert value(found, "vllm:prompt_tokens") == 400  # once each, however often they came back
    assert histogram(found, "vllm:time_to_first_token_seconds").count == 4
    [request] = llm.inputs.requests("x" * 20, params)
    llm.engine.add(request)
    for _ in range(3):
        llm.metrics.on_step(llm.engine.step())
    running = llm.get_metrics()
    assert value(running, "vllm:num_requests_running") == 1
    assert value(running, "vllm:kv_cache_usage_perc") > 0
    llm.engine.abort(request)
    found = llm.get_metrics()
    assert value(found, "vllm:request_success", finished_reason="abort") == 1
    assert value(found, "vllm:num_requests_running") == 0


def test_prometheus_reads_all_of_it() -> None:
    llm = engine(MODEL, method="aspire")
    with served(llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        empty = client.get("/metrics")
        assert empty.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        for _ in range(2):
            client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 30, "ignore_eos": True})
        text = client.get("/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        names = {s.name for s in samples}
        vector = {"vllm:spec_decode_num_accepted_tokens_per_pos_total"}  # has no positions before the first draft
        assert EXPECTED - vector <= names
        for sample in samples:
            if sample.name.startswith(("vllm:", "aspire:")) and not sample.name.startswith("aspire:http"):
                assert sample.labels["model_name"] == NAME
        [tokens] = [s.value for s in samples if s.name == "vllm:generation_tokens_total"]
        assert tokens == 60
        [posts] = [s.value for s in samples if s.labels.get("path") == "/v1/completions" and s.name.endswith("_total")]
        assert posts == 2
        server.assert_idle()
    llm.shutdown()


def test_snapshots_are_of_one_moment() -> None:
    """Taken while steps are counted: a histogram's parts agree, and no counter falls."""
    llm = local_engine(method="sparsespec")
    seen = 0.0

    def look(_: object) -> None:
        nonlocal seen
        now = value(llm.get_metrics(), "vllm:generation_tokens")
        assert now >= seen
        seen = now

    llm.generate(["x" * 20] * 3, SamplingParams(max_tokens=20), on_step=look)
    assert seen > 0
    assert isinstance(llm.metrics, EngineMetrics)
