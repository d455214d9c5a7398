"""Pictures of any numbers: bars, histograms, dots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aspire_llm.bench.report.svg import Drawing, Scale, axes, fitted, log_ticks, ticks

T = TypeVar("T")
ROW = 30.0
NARROW = 480.0  # a picture under this width is for a phone
PANEL_HEIGHT = 150.0


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    value: float
    interval: Sequence[float] | None = None
    style: str = "bar"
    shown: str = ""  # the value in words


def bars(items: Sequence[Bar], *, mark: float | None = None, most: float | None = None) -> Callable[[float], Drawing]:
    """Horizontal bars, names beside them (above them where it is narrow). mark: a line across at this value. most: the end
    of the scale, where the values do not say."""
    ends = [*(bar.value for bar in items), *(bar.interval[1] for bar in items if bar.interval), mark or 0.0]
    high = most if most is not None else max(ends) * 1.05 or 1.0

    def draw(width: float) -> Drawing:
        above = width < NARROW
        longest = max((len(bar.name) for bar in items), default=0)
        gutter = 4.0 if above else min(0.42 * width, longest * 6.8 + 12)
        room = max((len(bar.shown) for bar in items), default=0) * 6.6 + 10
        x = Scale(0.0, high, gutter, width - room)
        row = ROW + 16 if above else ROW
        drawing = Drawing(width, row * len(items) + 26)
        for value in ticks(0.0, high, 4 if above else 7):
            drawing.line(x(value), 0, x(value), row * len(items), "grid")
            drawing.text(x(value), row * len(items) + 18, f"{value:g}", "tick", "middle")
        for i, bar in enumerate(items):
            top = i * row + (20 if above else 5)
            if above:
                drawing.text(gutter, top - 5, fitted(bar.name, width))
            else:
                drawing.text(gutter - 8, top + 14, fitted(bar.name, gutter - 8), "label", "end")
            drawing.rect(x.start, top, x(min(bar.value, high)) - x.start, 20, bar.style, f"{bar.name}: {bar.shown}")
            end = min(bar.value, high)
            if bar.interval:
                low, up = (min(value, high) for value in bar.interval)
                drawing.line(x(low), top + 10, x(up), top + 10, "whisker")
                for value in (low, up):
                    drawing.line(x(value), top + 5, x(value), top + 15, "whisker")
                end = max(end, up)
            drawing.text(x(end) + 6, top + 14, bar.shown)
        if mark is not None:
            drawing.line(x(mark), 0, x(mark), row * len(items), "mark")
        return drawing

    return draw


@dataclass(frozen=True, slots=True)
class Panel:
    """A small picture of its own within a larger one: draw(drawing, left, top, width, height)."""

    title: str
    draw: Callable[[Drawing, float, float, float, float], None]


def panels(items: Sequence[Panel], *, columns: int = 2, height: float = PANEL_HEIGHT) -> Callable[[float], Drawing]:
    """Panels side by side, below each other where it is narrow."""

    def draw(width: float) -> Drawing:
        beside = 1 if width < NARROW else min(columns, max(1, len(items)))
        each = width / beside
        rows = -(-len(items) // beside)
        whole = height + 80
        drawing = Drawing(width, rows * whole)
        for i, panel in enumerate(items):
            left, top = i % beside * each, i // beside * whole
            drawing.text(left + 40, top + 14, fitted(panel.title, each - 50), "name")
            panel.draw(drawing, left + 40, top + 38, each - 60, height)
        return drawing

    return draw


def histogram(title: str, shares: Sequence[float], first: int, x_name: str, y_name: str, high: float) -> Panel:
    """shares[i]: of the value first + i."""

    def draw(drawing: Drawing, left: float, top: float, width: float, height: float) -> None:
        x = Scale(first - 0.5, first + len(shares) - 0.5, left, left + width)
        y = Scale(0.0, high, top + height, top)
        some = [value for value in ticks(first, first + len(shares) - 1, int(width / 36)) if value == int(value)]
        axes(drawing, x, y, some, ticks(0.0, high, 4), x_name, y_name)
        step = width / max(1, len(shares))
        for i, share in enumerate(shares):
            tip = f"{first + i}: {share:.1%}"
            drawing.rect(x(first + i) - step * 0.42, y(share), step * 0.84, y(0.0) - y(share), "bar", tip)

    return Panel(title, draw)


@dataclass(frozen=True, slots=True)
class Dots:
    """points: (x, y). line: joined points over them."""

    points: Sequence[tuple[float, float]]
    line: Sequence[tuple[float, float]] = ()


def dots(
    title: str,
    of: Dots,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    x_name: str,
    y_name: str,
    *,
    log: bool = False,
    before: Callable[[Drawing, Scale, Scale], None] | None = None,
) -> Panel:
    """before: draws what lies under the dots."""

    def draw(drawing: Drawing, left: float, top: float, width: float, height: float) -> None:
        x = Scale(*x_range, left, left + width, log)
        y = Scale(*y_range, top + height, top, log)
        if log:
            x_ticks, y_ticks = log_ticks(*x_range), log_ticks(*y_range)
        else:
            x_ticks, y_ticks = ticks(*x_range, int(width / 60)), ticks(*y_range, 4)
        axes(drawing, x, y, x_ticks, y_ticks, x_name, y_name)
        if before is not None:
            before(drawing, x, y)
        for px, py in of.points:
            drawing.dot(x(px), y(py), 2.0, "dot")
        if of.line:
            drawing.path([(x(px), y(py)) for px, py in of.line], "line")

    return Panel(title, draw)


def thinned(items: Sequence[T], most: int) -> list[T]:
    """At most so many of them, evenly taken."""
    if len(items) <= most:
        return list(items)
    return [items[i * len(items) // most] for i in range(most)]
