"""The results of the offline benchmark as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from rich import box
from rich.table import Table

from aspire_llm.bench import environment
from aspire_llm.bench.offline import REFERENCE, Offline, RequestRun, Run
from aspire_llm.bench.statistics import bootstrap_interval
from aspire_llm.engine.outputs import merged_stats
from aspire_llm.request import SpeculationStats

COLUMNS = (
    "tokens/s",
    "speed-up",
    "mean\naccepted\nlength",
    "drafts\naccepted",
    "tokens\nidentical",
    "distinct\ntokens",
    "peak\nmemory\nGiB",
)
REPETITIVE = 0.3  # a distinct-token ratio below this is a repetition loop, on which any drafter looks good


def offline_report(offline: Offline, command: str) -> dict[str, Any]:
    """{"model", "machine", "versions", "commit", "command", "methods": {name: …}}; speeds are medians over the repeats."""
    reference = offline.runs[REFERENCE]
    return {
        "model": offline.model,
        "machine": environment.machine(),
        "versions": environment.versions(),
        "commit": environment.commit(),
        "command": command,
        "methods": {
            method: method_report(runs, reference, offline.prefill_seconds) for method, runs in offline.runs.items()
        },
    }


def method_report(runs: Sequence[Run], reference: Sequence[Run], prefill_seconds: float) -> dict[str, Any]:
    """One method; `speedup` compares each repeat with the reference's of the same turn."""
    expected = [request.token_ids for request in reference[0].requests]
    equal = [all(run.requests[i].token_ids == tokens for run in runs) for i, tokens in enumerate(expected)]
    speeds = [run.tokens_per_s for run in runs]
    speedups = [
        run.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0
        for run, plain in zip(runs, reference, strict=True)
    ]
    stats = merged_stats([request.stats for request in runs[0].requests])
    return {
        "tokens_per_s": median(speeds),
        "speedup": median(speedups),
        "mean_accepted_length": stats.mean_acceptance_length,
        "acceptance_by_position": acceptance_by_position(stats),
        "tokens_equal_plain": all(equal),
        "distinct_token_ratio": mean(distinct_token_ratio(request.token_ids) for request in runs[0].requests),
        "peak_memory_bytes": max(run.peak_memory_bytes for run in runs),
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "tokens_per_s_interval": bootstrap_interval(speeds),  # 95 %, over repeats; null for one
        "speedup_interval": bootstrap_interval(speedups),
        "repeats": len(runs),
        "prefill_seconds": prefill_seconds,  # of all prompts, once, shared by the methods
        "requests": [
            request_report([run.requests[i] for run in runs], tokens_equal) for i, tokens_equal in enumerate(equal)
        ],
    }


def request_report(runs: Sequence[RequestRun], tokens_equal: bool) -> dict[str, Any]:
    """One request, in all repeats. Seconds are from its first token to its last."""
    first = runs[0]
    stats = first.stats
    seconds = median(run.seconds for run in runs)
    return {
        "prompt_tokens": first.prompt_tokens,
        "output_tokens": len(first.token_ids),
        "finish_reason": first.finish_reason,
        "cached_prompt_tokens": stats.num_cached_tokens,
        "steps": dict(stats.steps),
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "accepted_by_position": list(stats.accepted_per_position),
        "drafted_by_position": list(stats.drafted_per_position),
        "mean_accepted_length": stats.mean_acceptance_length,
        "distinct_token_ratio": distinct_token_ratio(first.token_ids),
        "seconds": seconds,
        "tokens_per_s": (len(first.token_ids) - 1) / seconds if seconds else 0.0,
        "tokens_equal_plain": tokens_equal,
    }


def acceptance_by_position(stats: SpeculationStats) -> list[float]:
    """[i]: share of the drafts at position i of a cycle that were accepted."""
    return [a / d for a, d in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True)]


def distinct_token_ratio(token_ids: Sequence[int]) -> float:
    """Different tokens / tokens: near 0 for text that repeats itself."""
    return len(set(token_ids)) / len(token_ids) if token_ids else 1.0


def offline_table(report: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("method", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, method in report["methods"].items():
        drafted = sum(request["draft_tokens"] for request in method["requests"])
        table.add_row(
            name,
            f"{method['tokens_per_s']:.1f}{_interval(method['tokens_per_s_interval'], '.3g')}",
            f"{method['speedup']:.2f}x{_interval(method['speedup_interval'], '.2f')}",
            f"{method['mean_accepted_length']:.2f}",
            f"{method['draft_acceptance_rate']:.0%}" if drafted else "-",
            "yes" if method["tokens_equal_plain"] else "NO",
            f"{method['distinct_token_ratio']:.2f}",
            f"{method['peak_memory_bytes'] / 2**30:.2f}",
        )
    return table


def offline_notes(offline: Offline) -> list[str]:
    """What a reader must know to read the table."""
    plain = offline.runs[REFERENCE][0]
    lengths = [request.prompt_tokens for request in plain.requests]
    outputs = sorted({len(request.token_ids) for request in plain.requests})
    size = f"{min(lengths)}-{max(lengths)} tokens" if min(lengths) != max(lengths) else f"{lengths[0]} tokens"
    out = f"{outputs[0]}-{outputs[-1]}" if len(outputs) > 1 else f"{outputs[0]}"
    notes = [f"{len(lengths)} requests decoded together; prompts of {size}, {out} tokens out each."]
    if offline.shared_prefill:
        notes.append(
            f"Prompts were prefilled once ({offline.prompt_tokens} tokens in {offline.prefill_seconds:.0f} s, "
            f"{offline.prompt_tokens / max(offline.prefill_seconds, 1e-9):.0f} tokens/s) and shared by all methods; "
            "tokens/s counts decoding only."
        )
    else:
        notes.append("Every method prefilled the prompts itself; tokens/s counts only steps without prompt tokens.")
    looping = sum(distinct_token_ratio(request.token_ids) < REPETITIVE for request in plain.requests)
    if looping:
        notes.append(
            f"{looping} of {len(lengths)} outputs repeat themselves (distinct tokens under {REPETITIVE}): "
            "easy to draft for, so their speed-up says little."
        )
    notes.append(f"Peak memory: {offline.memory_means} while the method ran.")
    return notes


def _interval(interval: tuple[float, float] | None, form: str) -> str:
    return f"\n[{interval[0]:{form}}, {interval[1]:{form}}]" if interval is not None else ""
