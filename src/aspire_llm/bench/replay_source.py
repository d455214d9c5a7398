"""Where replayed acceptance comes from: a recorded trace, or accepted lengths that are drawn for each request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aspire_llm.errors import UserError
from aspire_llm.policy.trace import Trace, default_method, read_traces, shipped_files
from aspire_llm.policy.trace_synthetic import synthetic_trace

DRAFT_TOKENS = 32  # of synthetic traces: accepted lengths are means of drafts of so many


class ReplaySource(Protocol):
    def trace(self, seed: int, requests: int, positions: int) -> Trace:
        """A trace for `requests` requests of `positions` output tokens; request i of a batch takes the trace's request
        i mod its requests."""
        ...

    def describe(self) -> dict[str, Any]:
        """For the JSON."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedSource:
    """A recorded trace, the same for every seed."""

    recorded: Trace

    def trace(self, seed: int, requests: int, positions: int) -> Trace:
        return self.recorded

    def describe(self) -> dict[str, Any]:
        return {
            "source": "trace",
            "name": f"{self.recorded.name}/{self.recorded.method}",
            "mean": None,
            "low": None,
            "high": None,
            "draft_tokens": self.recorded.max_draft,
        }


@dataclass(frozen=True, slots=True)
class LengthsSource:
    """Accepted lengths: their mean over the requests, and the bounds of each request's mean."""

    mean: float
    low: float
    high: float

    def trace(self, seed: int, requests: int, positions: int) -> Trace:
        return synthetic_trace(self.mean, self.low, self.high, requests, positions, seed, DRAFT_TOKENS)

    def describe(self) -> dict[str, Any]:
        return {
            "source": "lengths",
            "name": f"accepted lengths of mean {self.mean:g}, {self.low:g}-{self.high:g}",
            "mean": self.mean,
            "low": self.low,
            "high": self.high,
            "draft_tokens": DRAFT_TOKENS,
        }


def recorded_source(name: str, method: str | None = None) -> RecordedSource:
    """name: a trace file, or a shipped trace. method: the drafting context in it; None: the project's own. Raises UserError."""
    if Path(name).exists():
        methods = read_traces(name)
    else:
        shipped = {file.name.removesuffix(".npz"): file for file in shipped_files()}
        if name not in shipped:
            raise UserError(f"trace {name!r}: no such file, nor shipped; shipped are {', '.join(shipped)}", "replay")
        methods = read_traces(shipped[name])
    chosen = method or default_method(methods)
    if chosen not in methods:
        raise UserError(f"trace {name!r} has no method {chosen!r}; it has {', '.join(methods)}", "replay")
    return RecordedSource(methods[chosen])


def lengths_source(text: str) -> LengthsSource:
    """From "MEAN,MIN,MAX". Raises UserError."""
    try:
        mean, low, high = map(float, text.split(","))
    except ValueError:
        raise UserError(f"replayed lengths {text!r}: must be MEAN,MIN,MAX, such as 11.5,2.56,20", "replay") from None
    synthetic_trace(mean, low, high, 1, 1, 0, DRAFT_TOKENS)  # raises for numbers that do not fit together
    return LengthsSource(mean, low, high)
