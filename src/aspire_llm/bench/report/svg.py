"""Just enough SVG for the report's pictures. Colours are classes that the page's style sheet gives, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

CHARACTER = 6.6  # width of a label's character at 12 px, on the safe side


@dataclass(slots=True)
class Drawing:
    """Elements one over the other. Sizes in px at the picture's own width."""

    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, style: str, tip: str | None = None) -> None:
        inner = f"<title>{escape(tip)}</title>" if tip is not None else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{max(height, 0.0):.1f}" '
            f'class="{style}">{inner}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>')

    def path(self, points: Iterable[tuple[float, float]], style: str) -> None:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{joined}" class="{style}"/>')

    def area(self, points: Iterable[tuple[float, float]], style: str) -> None:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{joined}" class="{style}"/>')

    def dot(self, x: float, y: float, radius: float, style: str, tip: str | None = None) -> None:
        inner = f"<title>{escape(tip)}</title>" if tip is not None else ""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{style}">{inner}</circle>')

    def text(self, x: float, y: float, words: str, style: str = "label", anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def svg(self, alternative: str, style: str) -> str:
        """alternative: what the picture says, in words."""
        return (
            f'<svg class="{style}" viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" role="img" '
            f'aria-label="{escape(alternative, quote=True)}">{"".join(self.parts)}</svg>'
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to places: linear, or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, self.low) / self.low) / (math.log(self.high / self.low) or 1.0)
        else:
            share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + (self.end - self.start) * share


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from low to high, at most so many: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1.0, 2.0, 5.0, 10.0) if s * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from low to high."""
    return [10.0**e for e in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


def axes(
    drawing: Drawing, x: Scale, y: Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_name: str, y_name: str
) -> None:
    """Lines, numbers and names. The y scale runs upwards: its start is below its end."""
    for value in y_ticks:
        drawing.line(x.start, y(value), x.end, y(value), "grid")
        drawing.text(x.start - 6, y(value) + 4, short(value), "tick", "end")
    for value in x_ticks:
        drawing.line(x(value), y.start, x(value), y.start + 4, "axis")
        drawing.text(x(value), y.start + 16, short(value), "tick", "middle")
    drawing.line(x.start, y.start, x.end, y.start, "axis")
    drawing.text((x.start + x.end) / 2, y.start + 32, x_name, "tick", "middle")
    drawing.text(x.start - 34, y.end - 8, y_name, "tick")


def short(value: float) -> str:
    """A number in few characters: 1.5, 20, 3k, 4M, 1e-06."""
    if value == 0:
        return "0"
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def fitted(words: str, room: float) -> str:
    """Words cut to so many px."""
    most = max(3, int(room / CHARACTER))
    return words if len(words) <= most else words[: most - 1] + "…"
