"""How much of free-running drafts is accepted: numbers of `bench accept`, from what a recorder measured.

Intervals are 95 %, by bootstrap over requests: the drafts of one request are alike, so requests are what varies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

RESAMPLES = 2000
SHOWN = (1, 2, 4, 8, 16, 32)  # draft positions in the table

Floats = NDArray[np.float64]


def acceptance(
    accepted: NDArray[np.int64], measured: NDArray[np.bool_], draft_tokens: int, seed: int = 0
) -> dict[str, Any]:
    """Of drafts of `draft_tokens` tokens from S starts of each of R requests.

    accepted [R, S]: right tokens before the first wrong one; measured [R, S]: there was such a draft. Every request counts
    the same, however many starts it has. Position p is counted from 0; its acceptance is the share of drafts whose tokens
    up to p are right, the conditional one that of those whose tokens before p are.
    """
    rows = [accepted[r][measured[r]] for r in range(len(accepted)) if measured[r].any()]
    lengths = np.array([1.0 + row.mean() for row in rows])  # [R]
    by_position = np.array([[(row > p).mean() for p in range(draft_tokens)] for row in rows])  # [R, K]
    intervals = resampled(by_position, seed)
    length_interval = resampled(lengths[:, None], seed)
    survival = by_position.mean(axis=0)
    before = np.concatenate([[1.0], survival[:-1]])
    return {
        "requests": len(rows),
        "drafts": int(measured.sum()),
        "mean_accepted_length": float(lengths.mean()),
        "mean_accepted_length_interval": length_interval[0] if length_interval is not None else None,
        "acceptance_by_position": survival.tolist(),
        "acceptance_by_position_interval": intervals if intervals is not None else [None] * draft_tokens,
        "conditional_by_position": [float(s / b) if b > 0 else None for s, b in zip(survival, before, strict=True)],
        "accepted_length_histogram": np.bincount(np.concatenate(rows) + 1).tolist(),
        "per_request": lengths.tolist(),
    }


def resampled(values: Floats, seed: int) -> list[list[float]] | None:
    """values [R, K]: for each k the 95 % interval of the mean over r; None for one request, which says nothing."""
    if len(values) < 2:
        return None
    picks = np.random.default_rng(seed).integers(0, len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[picks].mean(axis=1), [0.025, 0.975], axis=0)
    return [[float(a), float(b)] for a, b in zip(low, high, strict=True)]


def accept_table(rows: Sequence[dict[str, Any]], draft_tokens: int) -> Table:
    """rows: those of the JSON."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), title="accepted drafts, free-running")
    for column in ("drafts read", "budget", "context", "accepted length"):
        table.add_column(column, no_wrap=True)
    shown = [p for p in SHOWN if p <= draft_tokens]
    for position in shown:
        table.add_column(f"draft {position}", justify="right", no_wrap=True)
    for row in rows:
        low, high = row["prompt_tokens"]
        interval = row["mean_accepted_length_interval"]
        length = f"{row['mean_accepted_length']:.2f}" + (
            f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else " (one request: no interval)"
        )
        table.add_row(
            row["method"],
            str(row["budget"]),
            f"{low}-{high}" if low != high else str(low),
            length,
            *(f"{row['acceptance_by_position'][p - 1]:.0%}" for p in shown),
        )
    return table
