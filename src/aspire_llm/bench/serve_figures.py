"""What a run against a server measured, in numbers: JSON and tables. Times are in seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from rich import box
from rich.table import Table

from aspire_llm.bench.serve_client import FAULTS, OK, Outcome
from aspire_llm.bench.serve_server import speculation_of
from aspire_llm.bench.statistics import bootstrap_interval
from aspire_llm.errors import UserError

Latency = Callable[[Outcome], Iterable[float]]
LATENCIES: Mapping[str, Latency] = {
    "ttft": lambda outcome: [outcome.ttft] if outcome.ttft is not None else [],
    "tpot": lambda outcome: [outcome.tpot] if outcome.tpot is not None else [],
    "itl": lambda outcome: outcome.itl,
    "e2el": lambda outcome: [outcome.latency],
}
MEANINGS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency (per chunk)",
    "e2el": "end-to-end latency",
}
REPETITIVE = 0.3  # a ratio of different words or tokens below this is a repetition loop


def parse_goodput(text: str) -> dict[str, float]:
    """ "ttft:500,tpot:50", in milliseconds as vLLM has it; returned in seconds. Raises UserError."""
    limits: dict[str, float] = {}
    for part in text.replace(" ", ",").split(","):
        if not part:
            continue
        name, _, value = part.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in ("ttft", "tpot", "e2el") or not 0 < limit < float("inf"):
            raise UserError(f"--goodput {part}: must be ttft, tpot or e2el with milliseconds, such as ttft:500,tpot:50")
        limits[name] = limit / 1e3
    if not limits:
        raise UserError(f"--goodput {text!r} names no target")
    return limits


def figures(
    outcomes: Sequence[Outcome], goodput: Mapping[str, float] | None, split: Callable[[str], Sequence[Any]]
) -> dict[str, Any]:
    """split: a text's tokens, or words, to find repetition by."""
    good = [outcome for outcome in outcomes if outcome.ok]
    duration = max((outcome.end for outcome in outcomes), default=0.0) - min(
        (outcome.start for outcome in outcomes), default=0.0
    )
    output = sum(outcome.output_tokens for outcome in good)
    prompt = sum(outcome.prompt_tokens or 0 for outcome in good)

    def rate(count: float) -> float:
        return count / duration if duration else 0.0

    met = [outcome for outcome in good if goodput is not None and meets(outcome, goodput)]
    return {
        "duration": duration,
        "outcomes": dict(Counter(outcome.kind for outcome in outcomes)),
        "request_throughput": rate(len(good)),  # of requests that ended well, as all that follows
        "output_throughput": rate(output),
        "total_token_throughput": rate(output + prompt),
        "output_tokens": output,
        "prompt_tokens": prompt,
        "output_tokens_counted_by": "server"
        if all(o.tokens_counted for o in good)
        else "chunks, where it did not count",
        "goodput": None
        if goodput is None
        else {
            "limits": dict(goodput),
            "request_throughput": rate(len(met)),
            "share": len(met) / len(outcomes) if outcomes else 0.0,  # failed requests miss every target
        },
        "latencies": {name: spread([v for outcome in good for v in of(outcome)]) for name, of in LATENCIES.items()},
        "longest_wait_to_be_sent": max((outcome.waited for outcome in outcomes), default=0.0),
        "speculation": answered_speculation(good),
        "distinct_ratio": fmean(distinct(split(outcome.text)) for outcome in good) if good else None,
        "requests": [request_json(outcome, split) for outcome in outcomes],
    }


def meets(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Every target; a request of one token meets any time per token."""
    return all(value <= limit for name, limit in limits.items() for value in LATENCIES[name](outcome))


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """None where there is no value. The interval is the median's: 95 %, bootstrap."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "mean": fmean(ordered),
        "median": median(ordered),
        "median_interval": bootstrap_interval(ordered),
        "p95": percentile(ordered, 0.95),
        "p99": percentile(ordered, 0.99),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the neighbours, as numpy's default."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def answered_speculation(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Summed over the answers that tell; None where none does."""
    told = [outcome.speculation for outcome in outcomes if outcome.speculation is not None]
    try:
        histogram: list[int] = []
        for one in told:
            counts = [int(count) for count in one.get("acceptance_histogram") or []]
            histogram += [0] * (len(counts) - len(histogram))
            for i, count in enumerate(counts):
                histogram[i] += count
        steps, drafted, accepted = (
            sum(int(one[name]) for one in told)
            for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        )
    except (KeyError, TypeError, ValueError):  # a server with a form of its own
        return None
    return speculation_of(steps, drafted, accepted, histogram) | {"answers": len(told)} if told else None


def distinct(parts: Sequence[Any]) -> float:
    return len(set(parts)) / len(parts) if parts else 1.0


def request_json(outcome: Outcome, split: Callable[[str], Sequence[Any]]) -> dict[str, Any]:
    speculation = outcome.speculation or {}
    return {
        "outcome": outcome.kind,
        "detail": outcome.detail,
        "start": outcome.start,
        "latency": outcome.latency,
        "waited": outcome.waited,
        "ttft": outcome.ttft,
        "tpot": outcome.tpot,
        "chunks": len(outcome.itl) + 1 if outcome.ttft is not None else 0,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "finish_reason": outcome.finish_reason,
        "distinct_ratio": distinct(split(outcome.text)) if outcome.text else None,
        "mean_acceptance_length": speculation.get("mean_acceptance_length"),
    }


def serve_tables(report: Mapping[str, Any]) -> list[Table]:
    times = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="milliseconds", title_justify="left")
    times.add_column("", no_wrap=True)
    for column in ("median", "95 %", "mean", "p95", "p99"):
        times.add_column(column, justify="right", no_wrap=True)
    for name, meaning in MEANINGS.items():
        of = report["latencies"][name]
        if of is None:
            times.add_row(meaning, *["-"] * 5)
            continue
        interval = of["median_interval"]
        times.add_row(
            meaning,
            f"{of['median'] * 1e3:.1f}",
            f"{interval[0] * 1e3:.1f}-{interval[1] * 1e3:.1f}" if interval is not None else "-",
            *(f"{of[column] * 1e3:.1f}" for column in ("mean", "p95", "p99")),
        )
    ended = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    ended.add_column("requests")
    ended.add_column("", justify="right")
    ended.add_column("")
    for kind, count in sorted(report["outcomes"].items(), key=lambda item: (item[0] != OK, -item[1])):
        first = next((request["detail"] for request in report["requests"] if request["outcome"] == kind), "")
        ended.add_row(kind, str(count), "" if kind == OK else f"{FAULTS.get(kind, '')}: {first}".strip(": "))
    return [times, ended]


def serve_notes(report: Mapping[str, Any]) -> list[str]:
    """The rest, in words."""
    asked = sum(report["outcomes"].values())
    notes = [
        f"{asked} requests in {report['duration']:.1f} s: {report['request_throughput']:.3g} requests/s, "
        f"{report['output_throughput']:.1f} output tokens/s, {report['total_token_throughput']:.1f} tokens/s in all "
        f"(prompts of {report['prompt_tokens']} tokens together)."
    ]
    goodput = report["goodput"]
    if goodput is not None:
        limits = ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in goodput["limits"].items())
        notes.append(
            f"Goodput: {goodput['request_throughput']:.3g} requests/s, {goodput['share']:.0%} of all, within {limits}."
        )
    for key, whose in (("speculation", "answers"), ("counted_speculation", "the server's counters, all clients")):
        of = report[key]
        if of is not None and of["mean_acceptance_length"] is not None:
            notes.append(
                f"Speculation ({whose}): mean acceptance length {of['mean_acceptance_length']:.2f}, "
                f"{of['draft_acceptance_rate']:.0%} of {of['num_draft_tokens']} drafts accepted in {of['num_spec_steps']} "
                "verifications."
            )
    if report["speculation"] is None and report["counted_speculation"] is None:
        notes.append("The server tells nothing about speculation.")
    if report["output_tokens_counted_by"] != "server":
        notes.append("Some answers have no usage: their tokens are counted as chunks of text, which may hold several.")
    looping = sum(
        1
        for request in report["requests"]
        if (request["distinct_ratio"] or 1.0) < REPETITIVE and request["outcome"] == OK
    )
    if looping:
        notes.append(
            f"{looping} answers repeat themselves (different {report['distinct_of']} under {REPETITIVE}): easy to draft for."
        )
    return notes
