"""The results of the offline benchmark as JSON (its schema is in docs/benchmarks.md) and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from rich import box
from rich.table import Table

from aspire_llm.bench import environment
from aspire_llm.bench.measure import RequestRun
from aspire_llm.bench.offline import REFERENCE, Batch, Offline, Setting, Turn
from aspire_llm.bench.recording import columns, summed
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


def offline_report(offline: Offline, command: str, started: str) -> dict[str, Any]:
    """started: the time, ISO 8601. Speeds are medians over the runs."""
    plan = offline.plan
    first = next(iter(offline.batches))
    report: dict[str, Any] = {
        "kind": "offline",
        "replayed": offline.replayed,
        "replay": replay_report(offline),
        "environment": environment.report(command, started),
        "model": offline.model,
        "dtype": offline.dtype,
        "device": offline.device,
        "workload": {
            "dataset": offline.dataset.name,
            "format": offline.dataset.format,
            "requests": len(first.selection.samples),
            "prompt_tokens": [list(map(len, batch.prompts)) for batch in offline.batches],
            "max_tokens": plan.params.max_tokens,
            "ignore_eos": plan.params.ignore_eos,
            "generation": "fixed" if plan.params.ignore_eos else "until the model ends",
            "skipped": skipped(offline.batches),
        },
        "seeds": list(plan.seeds),
        "repeats": plan.repeats,
        "prefill": {
            "tokens": offline.prompt_tokens,
            "seconds": offline.prefill_seconds,
            "shared": offline.shared_prefill,
        },
        "runs": [run_report(offline, order) for order in range(len(offline.turns))],
    }
    report["methods"] = {method: method_report(offline, method, report["runs"]) for method in offline.settings}
    return report


def replay_report(offline: Offline) -> dict[str, Any] | None:
    if offline.plan.replay is None:
        return None
    means = []
    for batch in offline.batches:
        assert batch.trace is not None
        drafts = [batch.trace.drafts[i % batch.trace.num_requests] for i in range(len(batch.prompts))]
        means.append([1.0 + mean(draft.accepted for draft in request) for request in drafts])
    return {**offline.plan.replay.describe(), "accepted_per_request": means}


def skipped(batches: Sequence[Batch]) -> dict[str, int]:
    """Rows that were looked at and left out, over all seeds."""
    total: dict[str, int] = {}
    for batch in batches:
        for reason, n in batch.selection.skipped.items():
            total[reason] = total.get(reason, 0) + n
    return total


def plain_turn(offline: Offline, turn: Turn) -> Turn:
    """Plain decoding's of the same seed and repeat."""
    (plain,) = (t for t in offline.of(REFERENCE) if (t.seed, t.repeat) == (turn.seed, turn.repeat))
    return plain


def run_report(offline: Offline, order: int) -> dict[str, Any]:
    turn = offline.turns[order]
    run, plain = turn.run, plain_turn(offline, turn).run
    equal = tokens_equal(offline, turn)
    stats = merged_stats([request.stats for request in run.requests])
    return {
        "method": turn.method,
        "seed": turn.seed,
        "repeat": turn.repeat,
        "order": order,
        "replayed": is_replayed(offline, turn.method),
        "tokens": run.tokens,
        "seconds": run.seconds,
        "tokens_per_s": run.tokens_per_s,
        "speedup": run.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0,
        "tokens_equal_plain": None if equal is None else all(equal),
        "requests_equal_plain": None if equal is None else sum(equal),
        "distinct_token_ratio": mean(distinct_token_ratio(request.token_ids) for request in run.requests),
        "peak_memory_bytes": run.peak_memory_bytes,
        "output_tokens": [len(request.token_ids) for request in run.requests],
        "mean_accepted_length": stats.mean_acceptance_length,
    }


def is_replayed(offline: Offline, method: str) -> bool:
    """A trace made the accept decisions of this method's drafts."""
    return offline.replayed and offline.settings[method].context is not None


def tokens_equal(offline: Offline, turn: Turn) -> list[bool] | None:
    """Of each request, whether it got the tokens of plain decoding (its first run with this seed); None where acceptance
    was replayed, which says nothing of tokens."""
    if is_replayed(offline, turn.method):
        return None
    expected = next(t for t in offline.of(REFERENCE) if t.seed == turn.seed).run.requests
    return [mine.token_ids == theirs.token_ids for mine, theirs in zip(turn.run.requests, expected, strict=True)]


def method_report(offline: Offline, method: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One method, over all of its runs."""
    turns, mine = offline.of(method), [run for run in runs if run["method"] == method]
    setting = offline.settings[method]
    stats = merged_stats([request.stats for turn in turns for request in turn.run.requests])
    speeds, speedups = [run["tokens_per_s"] for run in mine], [run["speedup"] for run in mine]
    equal = [tokens_equal(offline, turn) for turn in turns]
    outputs = [n for run in mine for n in run["output_tokens"]]
    recordings = [turn.run.recording for turn in turns]
    peak = max(run["peak_memory_bytes"] for run in mine)
    return {
        "replayed": is_replayed(offline, method),
        "context": setting.context,
        "policy": setting.policy,
        "budget": setting.budget,
        "max_draft_tokens": setting.max_draft_tokens,
        "refresh_layers": list(setting.refresh_layers),
        "tokens_per_s": median(speeds),
        "tokens_per_s_interval": bootstrap_interval(speeds),  # 95 %, over runs; null for one
        "speedup": median(speedups),
        "speedup_interval": bootstrap_interval(speedups),
        "mean_accepted_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_by_position": acceptance_by_position(stats),
        "accepted_length_histogram": summed([r.cycles.accepted_length_histogram() for r in recordings]),
        "draft_length_histogram": summed([r.cycles.draft_length_histogram() for r in recordings]),
        "tokens_equal_plain": None if equal[0] is None else all(all(e) for e in equal if e is not None),
        # of the requests of every run, in all of them together
        "requests_equal_plain": None if equal[0] is None else sum(sum(e) for e in equal if e is not None),
        "distinct_token_ratio": mean(run["distinct_token_ratio"] for run in mine),
        "output_tokens": [min(outputs), max(outputs)],
        "repeats": len(turns),
        "prefill_seconds": offline.prefill_seconds,  # of all prompts, once, shared by the methods
        "peak_memory_bytes": peak,
        "memory": {
            "what": offline.memory_means,
            "peak_bytes": peak,
            "weights_bytes": offline.weights_bytes,
            "kv_cache_bytes": offline.kv_cache_bytes,
            "kv_cache_peak_usage": max(r.kv_cache_peak_usage for r in recordings),
        },
        "recorded_run": mine[0]["order"],
        "cycles": columns(recordings[0].cycles),
        "swim_lane": columns(recordings[0].lane),
        "step_times": columns(recordings[0].times),
        "cost": cost_report(setting),
        "requests": [
            {"seed": batch.seed, **request}
            for batch in offline.batches
            for request in batch_report(offline, turns, batch)
        ],
    }


def cost_report(setting: Setting) -> dict[str, Any] | None:
    cost = setting.cost
    if cost is None:
        return None
    return {
        "fixed": cost.fixed,
        "per_token": cost.per_token,
        "per_kv": cost.per_kv,
        "free_tokens": cost.free_tokens,
        "per_check": cost.per_check,
        "verify_step": cost.verify_step,
        "within_10_percent": cost.share_within(0.1),
    }


def batch_report(offline: Offline, turns: Sequence[Turn], batch: Batch) -> list[dict[str, Any]]:
    """Every request of a batch, over the repeats."""
    repeats = [turn for turn in turns if turn.seed == batch.seed]
    equal = [tokens_equal(offline, turn) for turn in repeats]
    return [
        request_report(
            [turn.run.requests[i] for turn in repeats],
            None if equal[0] is None else all(e[i] for e in equal if e is not None),
        )
        for i in range(len(batch.prompts))
    ]


def request_report(runs: Sequence[RequestRun], tokens_equal: bool | None) -> dict[str, Any]:
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
    title = f"replayed acceptance: {report['replay']['name']}" if report["replayed"] else None
    one = len(report["runs"]) == len(report["methods"])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, title=title)
    if one:
        table.caption = "One run of each method, so no intervals; --repeats 5 gives them."
        table.caption_justify = "left"
    table.add_column("method", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, method in report["methods"].items():
        drafted = sum(request["draft_tokens"] for request in method["requests"])
        equal = {None: "replayed", True: "yes", False: "NO"}[method["tokens_equal_plain"]]
        table.add_row(
            name,
            f"{method['tokens_per_s']:.1f}{_interval(method['tokens_per_s_interval'], '.3g')}",
            f"{method['speedup']:.2f}x{_interval(method['speedup_interval'], '.2f')}",
            f"{method['mean_accepted_length']:.2f}",
            f"{method['draft_acceptance_rate']:.0%}" if drafted else "-",
            equal,
            f"{method['distinct_token_ratio']:.2f}",
            f"{method['peak_memory_bytes'] / 2**30:.2f}",
        )
    return table


def offline_notes(report: dict[str, Any]) -> list[str]:
    """What a reader must know to read the table."""
    workload, prefill, plain = report["workload"], report["prefill"], report["methods"][REFERENCE]
    lengths = [n for batch in workload["prompt_tokens"] for n in batch]
    low, high = plain["output_tokens"]
    size = f"{min(lengths)}-{max(lengths)} tokens" if min(lengths) != max(lengths) else f"{lengths[0]} tokens"
    out = f"{low}-{high}" if low != high else f"{low}"
    notes = [f"{workload['requests']} requests decoded together; prompts of {size}, {out} tokens out each."]
    if workload["skipped"]:
        left_out = ", ".join(f"{n} {reason}" for reason, n in workload["skipped"].items())
        notes.append(f"skipped: {left_out}.")
    seeds = len(report["seeds"])
    if seeds > 1 or report["repeats"] > 1:
        notes.append(
            f"{seeds} seed{'s' * (seeds > 1)} x {report['repeats']} repeats, methods in turn; medians with 95 % bootstrap "
            "intervals, speed-ups over plain's run of the same turn."
        )
    if seeds > 1 and not report["replayed"] and same_prompts(report):
        notes.append("Every seed chose the same prompts, so that seeds are only more repeats here.")
    if prefill["shared"]:
        rate = prefill["tokens"] / max(prefill["seconds"], 1e-9)
        notes.append(
            f"Prompts were prefilled once ({prefill['tokens']} tokens in {prefill['seconds']:.0f} s, {rate:.0f} tokens/s) and "
            "shared by all methods; tokens/s counts decoding only."
        )
    else:
        notes.append("Every method prefilled the prompts itself; tokens/s counts only steps without prompt tokens.")
    looping = sum(request["distinct_token_ratio"] < REPETITIVE for request in plain["requests"])
    if looping and not report["replayed"]:  # of dummy weights nobody expects a text
        notes.append(
            f"{looping} of {len(plain['requests'])} outputs repeat themselves (distinct tokens under {REPETITIVE}): "
            "easy to draft for, so their speed-up says little."
        )
    if report["replayed"]:
        notes.append("Replayed: the engine did all of its work, but a trace decided which drafts were accepted.")
    notes.append(f"Peak memory: {plain['memory']['what']} while the method ran.")
    return notes


def same_prompts(report: dict[str, Any]) -> bool:
    """Whether the seeds gave the same prompts, as far as their lengths and plain decoding's outputs tell."""
    by_seed = [
        [
            (request["prompt_tokens"], request["output_tokens"], request["distinct_token_ratio"])
            for request in report["methods"][REFERENCE]["requests"]
            if request["seed"] == seed
        ]
        for seed in report["seeds"]
    ]
    return all(batch == by_seed[0] for batch in by_seed)


def _interval(interval: tuple[float, float] | None, form: str) -> str:
    return f"\n[{interval[0]:{form}}, {interval[1]:{form}}]" if interval is not None else ""
