"""The analyses as pictures, from their reports. matplotlib is an extra: see `require_matplotlib`."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping
from typing import Any

from aspire_llm.errors import UserError

SIZE = (9.0, 6.5)  # inches
DPI = 120


def require_matplotlib() -> None:
    """UserError where plots cannot be made."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("plots need matplotlib: pip install 'aspire-llm[plots]', or leave out --out")


def plot_heterogeneity(report: Mapping[str, Any]) -> bytes:
    """Accepted length by request (boxes), and along each request's output (lines, mean of 5 starts)."""
    figure = _figure()
    above, below = figure.subplots(2, 1)
    requests = report["requests"]
    above.boxplot([r["accepted_length"] for r in requests], showmeans=True)
    above.set_xticks(range(1, len(requests) + 1), [str(r["request"]) for r in requests])
    above.set(xlabel="request", ylabel="accepted length", title="Between requests")
    for r in requests:
        lengths = r["accepted_length"]
        smooth = [sum(part) / len(part) for i in range(len(lengths)) if (part := lengths[max(0, i - 2) : i + 3])]
        below.plot(r["starts"], smooth, label=str(r["request"]))
    below.set(xlabel="output position", ylabel="accepted length", title="Within requests (mean of 5 starts)")
    below.legend(title="request", ncols=2, fontsize="small")
    return _png(figure)


def plot_staleness(report: Mapping[str, Any]) -> bytes:
    figure = _figure()
    left, right = figure.subplots(1, 2)
    for name, of in report["contexts"].items():
        label = f"{name} (accepted length {of['mean_accepted_length']:.2f})"
        left.plot(report["draft_position"], of["conditional"], marker="o", label=label)
        right.plot(report["draft_position"], of["survival"], marker="o", label=label)
    left.set(xlabel="draft position", ylabel="acceptance, if all before were right", title="Acceptance by position")
    right.set(xlabel="draft position", ylabel="all right up to here", title="Survival", ylim=(0, 1))
    left.legend(fontsize="small")
    return _png(figure)


def plot_recall(report: Mapping[str, Any]) -> bytes:
    figure = _figure()
    left, right = figure.subplots(1, 2)
    left.plot(
        report["over_time"]["lag"], report["over_time"]["recall"], marker="o", label="positions later, same layer"
    )
    left.plot(
        report["across_layers"]["distance"], report["across_layers"]["recall"], label="layers away, same position"
    )
    left.set(
        xlabel="distance",
        ylabel=f"recall of the top {report['k']}",
        title="Reuse over time and across layers",
        ylim=(0, 1),
    )
    left.legend(fontsize="small")
    image = right.imshow(report["across_layers"]["by_layers"], vmin=0, vmax=1, origin="lower")
    labels = [str(layer) for layer in report["layers"]]
    shown = range(0, len(labels), max(1, len(labels) // 10))
    right.set_xticks(shown, [labels[i] for i in shown])
    right.set_yticks(shown, [labels[i] for i in shown])
    right.set(xlabel="layer", ylabel="layer", title="Recall between layers")
    figure.colorbar(image, ax=right, shrink=0.6)
    return _png(figure)


def plot_simulation(report: Mapping[str, Any]) -> bytes:
    """Speed-up over plain decoding, a group of bars for each trace."""
    figure = _figure()
    axes = figure.subplots()
    traces = report["traces"]
    policies = list(next(iter(traces.values()))["policies"])
    width = 0.8 / len(policies)
    for i, policy in enumerate(policies):
        heights = [trace["policies"][policy]["speedup"] for trace in traces.values()]
        axes.bar([x + i * width for x in range(len(traces))], heights, width, label=policy)
    axes.set_xticks(
        [x + 0.4 - width / 2 for x in range(len(traces))], list(traces), rotation=30, ha="right", fontsize="small"
    )
    axes.set(ylabel="speed-up over plain decoding")
    axes.legend(fontsize="small")
    return _png(figure)


def _figure() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=SIZE, dpi=DPI, layout="constrained")


def _png(figure: Any) -> bytes:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
