"""Sections of `bench serve` results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aspire_llm.bench.report.charts import Bar, bars
from aspire_llm.bench.report.parts import Picture, Section, Table, number

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency (per chunk)",
    "e2el": "end-to-end latency",
}


def serve_section(data: Mapping[str, Any]) -> Section:
    server, load, replayed = data["server"], data["load"], bool(data.get("replayed"))
    rate = load["request_rate"]
    arrivals = f"{rate:g} requests/s (Poisson)" if rate is not None else "all at once"
    limit = load["max_concurrency"]
    notes = [
        f"{sum(data['outcomes'].values())} requests to {server['endpoint']} of {server['base_url']}, {arrivals}"
        + (f", at most {limit} under way" if limit is not None else "")
        + f"; {data['duration']:.1f} s.",
    ]
    failed = {kind: count for kind, count in data["outcomes"].items() if kind != "ok"}
    if failed:
        notes.append("NOT ok: " + ", ".join(f"{count} {kind}" for kind, count in failed.items()) + ".")
    if data["output_tokens_counted_by"] != "server":
        notes.append(f"Output tokens are counted by {data['output_tokens_counted_by']}.")
    title = f"Server under load: {server['model']} · {data['workload']['dataset']}"
    tables = [throughput(data, replayed), latencies(data, replayed)]
    if speculation(data):
        tables.append(Table("Speculation", ("", *SPECULATION), speculation(data), replayed))
    return Section(title, replayed, notes, tables, [picture] if (picture := latency_picture(data, replayed)) else [])


def throughput(data: Mapping[str, Any], replayed: bool) -> Table:
    goodput = data.get("goodput")
    rows = [
        ["requests ended well", f"{data['outcomes'].get('ok', 0)} of {sum(data['outcomes'].values())}"],
        ["requests/s", number(data["request_throughput"])],
        ["output tokens/s", number(data["output_throughput"], ".4g")],
        ["tokens/s, prompts included", number(data["total_token_throughput"], ".4g")],
    ]
    if goodput:
        limits = ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in goodput["limits"].items())
        rows.append(
            [f"goodput within {limits}", f"{goodput['request_throughput']:.3g} requests/s, {goodput['share']:.0%}"]
        )
    if data.get("distinct_ratio") is not None:
        rows.append([f"distinct {data.get('distinct_of', 'tokens')}", number(data["distinct_ratio"], ".2f")])
    return Table("Throughput", ("", "value"), rows, replayed)


def latencies(data: Mapping[str, Any], replayed: bool) -> Table:
    rows = []
    for name, meaning in LATENCIES.items():
        of = data["latencies"].get(name)
        if of is None:
            rows.append([meaning, *["-"] * 6])
            continue
        interval = of["median_interval"]
        rows.append(
            [
                meaning,
                f"{of['median'] * 1e3:.1f}",
                f"{interval[0] * 1e3:.1f}-{interval[1] * 1e3:.1f}" if interval else "-",
                *(f"{of[column] * 1e3:.1f}" for column in ("mean", "p95", "p99")),
                str(of["count"]),
            ]
        )
    return Table("Latencies, ms", ("", "median", "95 %", "mean", "p95", "p99", "values"), rows, replayed)


SPECULATION = ("mean acceptance length", "drafts accepted", "drafts", "verifications")


def speculation(data: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for key, whose in (("speculation", "told in answers"), ("counted_speculation", "the server's counters")):
        of = data.get(key)
        if of:
            rows.append(
                [
                    whose,
                    number(of["mean_acceptance_length"], ".2f"),
                    number(of["draft_acceptance_rate"], ".0%"),
                    str(of["num_draft_tokens"]),
                    str(of["num_spec_steps"]),
                ]
            )
    return rows


def latency_picture(data: Mapping[str, Any], replayed: bool) -> Picture | None:
    """Time to first token of each quarter of the requests, as they were sent: does a queue grow?"""
    done = sorted((r["start"], r["ttft"]) for r in data["requests"] if r["outcome"] == "ok" and r["ttft"] is not None)
    parts = min(8, len(done) // 2)
    if parts < 2:
        return None
    shown = []
    for i in range(parts):
        part = done[i * len(done) // parts : (i + 1) * len(done) // parts]
        values = sorted(ttft * 1e3 for _, ttft in part)
        middle = values[len(values) // 2]
        name = f"sent at {part[0][0]:.1f}-{part[-1][0]:.1f} s"
        shown.append(Bar(name, middle, (values[0], values[-1]), "bar", f"{middle:.0f} ms"))
    said = "; ".join(f"{bar.name} {bar.shown}" for bar in shown)
    return Picture(
        "Time to first token by when a request was sent (median; line: least to most)",
        f"Median times to first token: {said}.",
        bars(shown),
        replayed,
    )
