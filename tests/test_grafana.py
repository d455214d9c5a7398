"""The Grafana dashboard and the Prometheus example name only what a server really offers."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from live_server import live_server, wait_for
from serving_server import engine, served, served_model

FOLDER = Path(__file__).parent.parent / "deploy" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "aspire-llm.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
FUNCTIONS = {"sum", "max", "avg", "rate", "by", "on", "group_left", "histogram_quantile", "label_values"}
FROM_PROMETHEUS = {"instance"}  # a label that the scrape adds
NAME = re.compile(r"(?<![\w:$\"{])([a-z_]+(?::[a-z_0-9]+)?)(?=\{)")  # before its selector


@pytest.fixture(scope="module")
def offered() -> dict[str, set[str]]:
    """Sample names of /metrics, each with its labels: of a server whose drafts are accepted, and of one whose policy has a
    price (the first one's is a script, so that drafts come soon)."""
    with live_server() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.post("/v1/completions", json={"prompt": "one", "max_tokens": 8}).status_code == 200
        server.load(3)
        wait_for(lambda: "accepted_tokens_per_pos_total{" in client.get("/metrics").text, "an accepted draft")
        text = client.get("/metrics").text
    llm = engine(served_model(), method="aspire")
    with served(llm) as priced, httpx.Client(base_url=priced.url, timeout=60) as client:
        assert client.post("/v1/completions", json={"prompt": "one", "max_tokens": 8}).status_code == 200
        more = client.get("/metrics").text
    llm.shutdown()
    samples: dict[str, set[str]] = {}
    for family in (*text_string_to_metric_families(text), *text_string_to_metric_families(more)):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def labels_of(expression: str) -> set[str]:
    selected = re.findall(r"(\w+)=~?\"", expression)
    grouped = [label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")]
    return {*selected, *grouped}


@pytest.mark.parametrize("panel", [p for p in PANELS if p["type"] != "row"], ids=lambda panel: panel["title"])
def test_a_panel_names_what_there_is(panel: dict[str, Any], offered: dict[str, set[str]]) -> None:
    assert panel["description"].endswith(".")
    for target in panel["targets"]:
        names = NAME.findall(target["expr"])
        assert names, target["expr"]
        assert set(names) <= set(offered), f"no such metric: {set(names) - set(offered)}"
        known = set().union(*(offered[name] for name in names)) | FROM_PROMETHEUS
        assert labels_of(target["expr"]) <= known
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= known
        if "by (" in target["expr"]:
            assert shown <= labels_of(target["expr"]), "the legend shows a label that the sum has dropped"


def test_every_word_of_an_expression_is_known() -> None:
    """The check above sees every metric: what is left is functions, labels and variables."""
    for expression in EXPRESSIONS:
        bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\([a-z_]*\)", " ", expression)  # selectors, ranges, label lists
        words = set(re.findall(r"[a-z_:][a-z_:0-9]+", bare)) - set(NAME.findall(expression))
        assert words <= FUNCTIONS, words - FUNCTIONS
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression


def test_names_the_engine_promises_are_shown(offered: dict[str, set[str]]) -> None:
    shown = {name for expression in EXPRESSIONS for name in NAME.findall(expression)}
    for name in (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total"),
        *("vllm:time_to_first_token_seconds_bucket", "vllm:time_per_output_token_seconds_bucket"),
        *("vllm:e2e_request_latency_seconds_bucket", "vllm:spec_decode_num_drafts_total"),
        *("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
        *("vllm:spec_decode_num_accepted_tokens_per_pos_total", "vllm:num_preemptions_total"),
        *("aspire:rows_total", "aspire:draft_length_bucket", "aspire:step_seconds_bucket"),
        *("aspire:price_tokens_per_second", "aspire:step_predicted_ratio_bucket", "aspire:step_predicted_ratio_count"),
        *("aspire:refresh_predicted_seconds_total", "aspire:refresh_kv_tokens_read_total"),
    ):
        assert name in shown, name
        assert name in offered, name


def test_variables_and_layout() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval"} == variables
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"panels overlap: {a} {b}"


def test_scrape_example() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"][0]["targets"] == ["localhost:8000"]
