"""Sections of `bench accept` and `bench accuracy` results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aspire_llm.bench.report.charts import Bar, Panel, bars, panels
from aspire_llm.bench.report.parts import Picture, Section, Table, marked, number, with_interval
from aspire_llm.bench.report.svg import Drawing, Scale, axes, ticks

POSITIONS = (1, 2, 4, 8, 16, 32)
PARTINGS = ("requests differing", "tokens differing", "median margin", "largest margin")


def accept_section(data: Mapping[str, Any]) -> Section:
    rows, replayed = data["rows"], bool(data.get("replayed"))
    positions = [p for p in POSITIONS if p <= data["draft_tokens"]]
    table = Table(
        "Accepted drafts, free-running",
        ("drafts read", "budget", "context", "accepted length [95 %]", *(f"draft {p}" for p in positions), "requests"),
        [
            [
                str(row["method"]),
                str(row["budget"]),
                _span(row["prompt_tokens"]),
                with_interval(row["mean_accepted_length"], row["mean_accepted_length_interval"], ".2f"),
                *(number(row["acceptance_by_position"][p - 1], ".0%") for p in positions),
                str(row["requests"]),
            ]
            for row in rows
        ],
        replayed,
    )
    shown = [
        Bar(
            _row_name(row),
            float(row["mean_accepted_length"]),
            row["mean_accepted_length_interval"],
            "bar",
            f"{row['mean_accepted_length']:.2f}",
        )
        for row in rows
    ]
    lengths = Picture(
        f"Mean accepted length of drafts of {data['draft_tokens']}, with 95 % intervals",
        "Mean accepted lengths: " + "; ".join(f"{bar.name} {bar.shown}" for bar in shown) + ".",
        bars(shown),
        replayed,
    )
    survival = Picture(
        "Drafts right up to a position",
        "Share of drafts right up to the last position: "
        + "; ".join(f"{_row_name(row)} {row['acceptance_by_position'][-1]:.0%}" for row in rows)
        + ".",
        panels([_survival(row, data["draft_tokens"]) for row in rows], height=110.0),
        replayed,
    )
    notes = [f"From {data['starts']} positions of each request's plain output; intervals over requests."]
    for cell in data.get("left_out") or []:
        notes.append(f"Left out: {cell['method']}, budget {cell['budget']}: {cell['reason']}.")
    notes += _skipped(data)
    name = f"Acceptance: {data['model']} · {data['workload']['dataset']}"
    return Section(name, replayed, notes, [table], [lengths, survival])


def _row_name(row: Mapping[str, Any]) -> str:
    return f"{row['method']}, {row['budget']} of {_span(row['prompt_tokens'])}"


def _span(lengths: Sequence[int]) -> str:
    return f"{lengths[0]}-{lengths[1]}" if lengths[0] != lengths[1] else str(lengths[0])


def _survival(row: Mapping[str, Any], most: int) -> Panel:
    shares, intervals = row["acceptance_by_position"], row["acceptance_by_position_interval"]

    def draw(drawing: Drawing, left: float, top: float, width: float, height: float) -> None:
        x, y = Scale(1, max(2, most), left, left + width), Scale(0.0, 1.0, top + height, top)
        axes(
            drawing,
            x,
            y,
            [t for t in ticks(1, max(2, most), 6) if t == int(t)],
            ticks(0, 1, 4),
            "draft position",
            "share",
        )
        known = [(i + 1, interval) for i, interval in enumerate(intervals) if interval]
        if known:
            upper = [(x(p), y(interval[1])) for p, interval in known]
            drawing.area([*upper, *((x(p), y(interval[0])) for p, interval in reversed(known))], "band")
        drawing.path([(x(i + 1), y(share)) for i, share in enumerate(shares)], "line")

    return Panel(_row_name(row), draw)


def accuracy_section(data: Mapping[str, Any]) -> Section:
    methods, reference, replayed = data["methods"], data["reference"], bool(data.get("replayed"))
    names = list(next(iter(methods.values()))["scores"])
    rows = []
    for name, method in methods.items():
        scores = []
        for score in (method["scores"][each] for each in names):
            if score is None:
                scores.append("-")
                continue
            shown = with_interval(score["mean"], score["interval"], ".2f")
            if name != reference:
                shown += f"; {score['difference']:+.2f}"
                if score["difference_interval"]:
                    shown += f" [{score['difference_interval'][0]:+.2f}, {score['difference_interval'][1]:+.2f}]"
            scores.append(shown)
        rows.append(
            [
                marked(name, replayed),
                *scores,
                f"{method['requests_differing']} of {data['workload']['requests']}",
                f"{method['tokens_differing']} of {method['tokens']}",
                number(method["margin_median"], ".4f"),
                number(method["margin_max"], ".4f"),
            ]
        )
    table = Table(
        "Scores in points [95 %], and the difference to the reference",
        ("method", *(name.replace("_", " ") for name in names), *PARTINGS),
        rows,
        replayed,
    )
    workload = data["workload"]
    notes = [
        f"{workload['requests']} prompts, {workload['with_answers']} with answers; {data['dtype']} on {data['device']}; "
        f"greedy. Reference: {reference}. A margin is the reference's log-probability of its own token less that of the "
        "other's, where outputs part."
    ]
    name = f"Accuracy: {data['model']} · {workload['dataset']}"
    return Section(name, replayed, notes + _skipped(data), [table])


def _skipped(data: Mapping[str, Any]) -> list[str]:
    skipped = data["workload"].get("skipped") or {}
    return ["Left out: " + ", ".join(f"{n} {reason}" for reason, n in skipped.items()) + "."] if skipped else []
