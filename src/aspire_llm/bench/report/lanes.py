"""Swim lanes: what each request did in each step of a stretch of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aspire_llm.bench.report.charts import NARROW
from aspire_llm.bench.report.svg import Drawing

MOST_LANES = 16
LANE, GAP = 26.0, 6.0
LEGEND = (
    ("draft", "draft: one token under the sparse view"),
    ("verify", "verification: full view (bar to the right: accepted and rejected drafts)"),
    ("accepted", "accepted"),
    ("rejected", "rejected"),
    ("prefill", "prefill"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    step: int
    lane: int
    kind: str
    tokens: int
    accepted: int


def lane_cells(of: Mapping[str, Any]) -> list[Cell]:
    """Columns of a result's `swim_lane` as cells; steps from 0, one lane for each of the first requests."""
    columns = [of[name] for name in ("step", "request", "kind", "tokens", "accepted")]
    if not columns[0]:
        return []
    first = min(columns[0])
    requests = sorted(set(columns[1]))[:MOST_LANES]
    lanes = {request: lane for lane, request in enumerate(requests)}
    return [
        Cell(int(step) - first, lanes[request], str(kind), int(tokens), int(accepted))
        for step, request, kind, tokens, accepted in zip(*columns, strict=True)
        if request in lanes
    ]


def draw_lanes(cells: Sequence[Cell], width: float) -> Drawing:
    """As many steps as fit: 14 px each."""
    gutter = 34.0
    steps = min(1 + max(cell.step for cell in cells), int((width - gutter) / (14.0 if width >= NARROW else 11.0)))
    each = (width - gutter) / steps
    lanes = 1 + max(cell.lane for cell in cells)
    drawing = Drawing(width, lanes * (LANE + GAP) + 34)
    for lane in range(lanes):
        drawing.text(gutter - 8, lane * (LANE + GAP) + LANE - 7, str(lane), "tick", "end")
        drawing.line(gutter, (lane + 1) * (LANE + GAP) - GAP, width, (lane + 1) * (LANE + GAP) - GAP, "grid")
    for cell in cells:
        if cell.step < steps:
            _draw_cell(drawing, cell, gutter + cell.step * each, cell.lane * (LANE + GAP), each - 1.5)
    bottom = lanes * (LANE + GAP) + 10
    for step in range(0, steps, 10):
        drawing.text(gutter + step * each, bottom, str(step), "tick")
    drawing.text(gutter + steps * each / 2, bottom + 18, "step of the stretch (lanes: requests)", "tick", "middle")
    return drawing


def _draw_cell(drawing: Drawing, cell: Cell, x: float, y: float, width: float) -> None:
    if cell.kind == "draft":
        drawing.rect(x, y + LANE * 0.5, width, LANE * 0.5, "draft", "draft")
    elif cell.kind == "prefill":
        drawing.rect(x, y, width, LANE, "prefill", f"prefill of {cell.tokens} tokens")
    elif cell.kind == "verify":
        drafts = max(0, cell.tokens - 1)
        tip = f"verification of {drafts} drafts, {cell.accepted} accepted"
        drawing.rect(x, y, width, LANE, "verify", tip)
        if drafts:
            share = cell.accepted / drafts
            drawing.rect(x + width * 0.5, y + 2, width * 0.5 - 1, (LANE - 4) * (1 - share), "rejected")
            drawing.rect(
                x + width * 0.5, y + 2 + (LANE - 4) * (1 - share), width * 0.5 - 1, (LANE - 4) * share, "accepted"
            )
    else:
        raise ValueError(f"a row of kind {cell.kind!r}")
