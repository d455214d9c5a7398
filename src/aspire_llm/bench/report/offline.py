"""Sections of `bench offline` results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from aspire_llm.bench.report.charts import Bar, Dots, Panel, bars, dots, histogram, panels, thinned
from aspire_llm.bench.report.lanes import LEGEND, Cell, draw_lanes, lane_cells
from aspire_llm.bench.report.parts import Picture, Section, Table, marked, number, with_interval, yes_no
from aspire_llm.bench.report.svg import Drawing, Scale

PLAIN = "plain"
LANES_OF = "aspire"  # whose stretch is shown, where it is there
REPETITIVE = 0.3
MOST_DOTS = 500
RARELY = 0.1  # share of draft rows under which a stretch shows little
WINDOW = 15  # cycles in the running mean of draft lengths

Methods = Mapping[str, Mapping[str, Any]]


def offline_section(data: Mapping[str, Any]) -> Section:
    """data: as docs/benchmarks.md describes it; records (cycles, swim_lane, …) may be missing."""
    methods: Methods = data["methods"]
    replayed = any_replayed(data)
    pictures = [speedups(methods)]
    for picture in (accepted_lengths(methods), draft_lengths(methods), lanes(methods), cost_fit(methods)):
        if picture is not None:
            pictures.append(picture)
    workload = data.get("workload") or {}
    name = " · ".join(str(part) for part in (data.get("model"), workload.get("dataset")) if part)
    return Section(f"Throughput: {name}", replayed, list(notes(data)), [method_table(methods)], pictures)


def any_replayed(data: Mapping[str, Any]) -> bool:
    return bool(data.get("replayed")) or any(method.get("replayed") for method in data["methods"].values())


def named(name: str, method: Mapping[str, Any]) -> str:
    return marked(name, bool(method.get("replayed")))


def notes(data: Mapping[str, Any]) -> Sequence[str]:
    workload = data.get("workload") or {}
    said = []
    if workload.get("requests"):
        tokens = [n for seed in workload.get("prompt_tokens") or [] for n in seed]
        lengths = f", prompts of {min(tokens)} to {max(tokens)} tokens" if tokens else ""
        generation = workload.get("generation")
        said.append(
            f"{workload['requests']} requests decoded together{lengths}, at most {workload['max_tokens']} tokens out"
            + (f" (generation: {generation})." if generation else ".")
        )
    if workload.get("skipped"):
        said.append("Left out: " + ", ".join(f"{n} {reason}" for reason, n in workload["skipped"].items()) + ".")
    replay = data.get("replay")
    if replay:
        about = f" ({replay['name']})" if replay.get("name") else ""
        said.append(
            f"Replayed: all of the work is real, but a trace{about} decided which drafts were accepted. Tokens are not the "
            "model's answer, so their equality says nothing."
        )
    if data.get("seeds"):
        said.append(f"Seeds: {', '.join(map(str, data['seeds']))}; {data.get('repeats', 1)} repeats each, in turn.")
    if data.get("note"):
        said.append(str(data["note"]))
    looping = [
        named(name, method)
        for name, method in data["methods"].items()
        if method.get("distinct_token_ratio") is not None and method["distinct_token_ratio"] < REPETITIVE
    ]
    if looping:
        said.append(
            f"Output repeats itself (distinct tokens under {REPETITIVE}), easy to draft for: {', '.join(looping)}."
        )
    return said


def method_table(methods: Methods) -> Table:
    rows = []
    for name, method in methods.items():
        output = method.get("output_tokens")
        memory = method.get("peak_memory_bytes")
        rows.append(
            [
                named(name, method),
                with_interval(method["tokens_per_s"], method.get("tokens_per_s_interval"), ".4g"),
                with_interval(method.get("speedup"), method.get("speedup_interval"), ".2f"),
                number(method.get("mean_accepted_length"), ".2f"),
                number(method.get("draft_acceptance_rate") or None, ".0%"),  # 0: it never drafted
                "-" if method.get("replayed") else yes_no(method.get("tokens_equal_plain")),
                number(method.get("distinct_token_ratio"), ".2f"),
                f"{output[0]}-{output[1]}" if output else "-",
                str(method.get("repeats", "-")),
                number(memory / 2**30 if memory is not None else None, ".2f"),
            ]
        )
    columns = ("method", "tokens/s [95 %]", "speed-up [95 %]", "mean accepted length", "drafts accepted")
    more = ("tokens identical", "distinct tokens", "output tokens", "runs", "peak memory, GiB")
    return Table("Methods", [*columns, *more], rows, any(method.get("replayed") for method in methods.values()))


def speedups(methods: Methods) -> Picture:
    shown = [
        Bar(
            named(name, method),
            float(method["speedup"]),
            method.get("speedup_interval"),
            "bar plain" if name == PLAIN else "bar",
            f"{method['speedup']:.2f}×",
        )
        for name, method in methods.items()
        if method.get("speedup") is not None
    ]
    replayed = any(method.get("replayed") for method in methods.values())
    said = "; ".join(f"{bar.name} {bar.shown}" for bar in shown)
    return Picture(
        "Speed-up over plain decoding, with 95 % intervals",
        f"Bars of speed-up over plain decoding: {said}.",
        bars(shown, mark=1.0),
        replayed,
    )


def accepted_lengths(methods: Methods) -> Picture | None:
    """Share of the cycles by accepted length, a panel for each method that drafted."""
    found = {}
    for name, method in methods.items():
        counts = list(method.get("accepted_length_histogram") or [])
        if sum(counts[1:]):
            found[named(name, method)] = [count / sum(counts) for count in counts[1:]]
    if not found:
        return None
    longest = max(map(len, found.values()))
    high = max(max(shares) for shares in found.values()) * 1.08
    shown = [
        histogram(
            name, shares + [0.0] * (longest - len(shares)), 1, "accepted length (bonus token counts)", "share", high
        )
        for name, shares in found.items()
    ]
    means = {
        name: sum((i + 1) * share for i, share in enumerate(shares)) / sum(shares) for name, shares in found.items()
    }
    replayed = _any(methods, "accepted_length_histogram")
    return Picture(
        "Accepted lengths",
        "Histograms of accepted length; means: "
        + "; ".join(f"{name} {mean:.2f}" for name, mean in means.items())
        + ".",
        panels(shown),
        replayed,
    )


def draft_lengths(methods: Methods) -> Picture | None:
    """Draft length of each cycle over the steps of the recorded run, and its running mean."""
    found = {}
    for name, method in methods.items():
        cycles = method.get("cycles") or {}
        points = [
            (float(step), float(drafted))
            for step, drafted in zip(cycles.get("step", []), cycles.get("drafted", []), strict=True)
        ]
        if any(drafted for _, drafted in points):
            found[named(name, method)] = points
    if not found:
        return None
    last = max(points[-1][0] for points in found.values()) or 1.0
    most = max(drafted for points in found.values() for _, drafted in points) + 1.0
    shown = [
        dots(
            name,
            Dots(thinned(points, MOST_DOTS), thinned(smooth(points), 200)),
            (0.0, last),
            (0.0, most),
            "step",
            "drafts",
        )
        for name, points in found.items()
    ]
    replayed = _any(methods, "cycles")
    means = "; ".join(f"{name} {fmean(drafted for _, drafted in points):.1f}" for name, points in found.items())
    return Picture(
        "Draft length over time (a dot for each verification; line: running mean)",
        f"Draft length of each cycle against the step; means: {means}.",
        panels(shown),
        replayed,
    )


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Running mean over `WINDOW` cycles."""
    half = WINDOW // 2
    return [(points[i][0], fmean(y for _, y in points[max(0, i - half) : i + half + 1])) for i in range(len(points))]


def lanes(methods: Methods) -> Picture | None:
    drafting = {name: lane_cells(method["swim_lane"]) for name, method in methods.items() if method.get("swim_lane")}
    drafting = {name: cells for name, cells in drafting.items() if any(cell.kind == "draft" for cell in cells)}
    if not drafting:
        return None
    name = LANES_OF if LANES_OF in drafting else max(drafting, key=lambda each: draft_share(drafting[each]))
    if draft_share(drafting[name]) < RARELY:
        name = max(drafting, key=lambda each: draft_share(drafting[each]))
    cells: list[Cell] = drafting[name]
    replayed = bool(methods[name].get("replayed"))
    verified = [cell for cell in cells if cell.kind == "verify"]
    drafted, accepted = sum(cell.tokens - 1 for cell in verified), sum(cell.accepted for cell in verified)
    return Picture(
        f"A stretch of one run: {name}",
        f"Lanes of {1 + max(cell.lane for cell in cells)} requests over steps: each drafts and verifies at its own pace; "
        f"{accepted} of {drafted} drafts accepted in {len(verified)} verifications.",
        lambda width: draw_lanes(cells, width),
        replayed,
        LEGEND,
    )


def draft_share(cells: Sequence[Cell]) -> float:
    return sum(cell.kind == "draft" for cell in cells) / len(cells)


def cost_fit(methods: Methods) -> Picture | None:
    """Predicted against measured step times, without steps that had prompts."""
    shown: list[Panel] = []
    said: list[str] = []
    for name, method in methods.items():
        times = method.get("step_times") or {}
        points = [
            (float(measured) * 1e3, float(predicted) * 1e3)
            for measured, predicted, prefill in zip(
                *(times.get(column, []) for column in ("measured", "predicted", "prefill")), strict=True
            )
            if predicted and measured and not prefill
        ]
        if len(points) < 2:
            continue
        low, high = min(min(point) for point in points) / 1.3, max(max(point) for point in points) * 1.3
        within = sum(abs(predicted / measured - 1) <= 0.1 for measured, predicted in points) / len(points)
        title = f"{named(name, method)}: {within:.0%} within 10 %"
        said.append(f"{title} of {len(points)} steps")
        shown.append(
            dots(
                title, Dots(thinned(points, MOST_DOTS)), (low, high), (low, high), "measured, ms", "predicted, ms",
                log=high / low > 30, before=_diagonal(low, high),
            )
        )  # fmt: skip
    if not shown:
        return None
    replayed = _any(methods, "step_times")
    return Picture(
        "Cost model: predicted against measured step time (band: within 10 %)",
        "Predicted against measured step times: " + "; ".join(said) + ".",
        panels(shown, height=200.0),
        replayed,
    )


def _diagonal(low: float, high: float) -> Any:
    def draw(drawing: Drawing, x: Scale, y: Scale) -> None:
        edge = high / 1.1
        drawing.area(
            [(x(low), y(low)), (x(low), y(low * 1.1)), (x(edge), y(high)), (x(high), y(high)), (x(high), y(high * 0.9)),
             (x(low / 0.9), y(low))], "band",
        )  # fmt: skip
        drawing.line(x(low), y(low), x(high), y(high), "axis")

    return draw


def _any(methods: Methods, record: str) -> bool:
    return any(method.get("replayed") and method.get(record) for method in methods.values())
