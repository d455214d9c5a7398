"""One thing changed at a time, replayed: what each part of the method is worth at one shape and batch.

Usage: python benchmarks/ablations.py SECONDS [SHAPE [BATCHxCONTEXT [REPEATS]]]   on a GPU
       python benchmarks/ablations.py simulate [OUT.md]                            the same through the simulator, no GPU

Accept decisions are REPLAYED: recorded traces of the context set in question, and, for drafts longer than those recorded,
lengths drawn for each request. On a GPU the variants take turns, and those of one context set share a runner. The simulated
part takes its step costs from the coefficients that the engine calibrated on an H200.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import (
    GPU,
    Deadline,
    Report,
    cached_prompts,
    decode_steadily,
    fill,
    kv_memory,
    other_policy,
    requests_of,
    say,
    shown,
    summary,
)
from shapes import SHAPES, model_folder, refresh_layer
from table import BUDGET, OUTPUT, WINDOW_TOKENS, drawn_trace, recorded_traces, replay

from aspire_llm import LLM
from aspire_llm.bench.measure import free_all_but
from aspire_llm.engine.garbage import keep_collections_short
from aspire_llm.policy.cost import ReadModel
from aspire_llm.policy.simulator import Replay, SimulatedCost, SimulatedRun, bootstrap_interval, run_policy
from aspire_llm.policy.trace import Draft, Trace, shipped_traces

RECORDED, PENULTIMATE, DRAWN = "recorded", "recorded, penultimate layer", "drawn"


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    context: str | None  # None: plain decoding
    policy: str
    draft_tokens: int | None = None  # of policies of a fixed length
    max_draft_tokens: int = 16
    acceptance: str = RECORDED


PLAIN = Variant("plain", None, "autoregressive")
VARIANTS = (
    PLAIN,
    Variant("aspire", "refreshed", "confidence"),
    Variant("policy: ema", "refreshed", "ema"),
    Variant("policy: fsm", "refreshed", "fsm"),
    Variant("policy: fixed 4, mixed", "refreshed", "staggered", 4),
    Variant("policy: fixed 4, lock-step", "refreshed", "lockstep", 4),
    Variant("policy: fixed 8, mixed", "refreshed", "staggered", 8),
    Variant("policy: fixed 8, lock-step", "refreshed", "lockstep", 8),
    Variant("refresh off (verified)", "verified", "confidence"),
    Variant("profile off (penultimate layer)", "refreshed", "confidence", acceptance=PENULTIMATE),
    Variant("drawn lengths, at most 16 drafts", "refreshed", "confidence", acceptance=DRAWN),
    Variant("drawn lengths, at most 32 drafts", "refreshed", "confidence", max_draft_tokens=32, acceptance=DRAWN),
)
QUESTIONS = (  # (what, with, without)
    ("mixed steps, drafts of 4", "policy: fixed 4, mixed", "policy: fixed 4, lock-step"),
    ("mixed steps, drafts of 8", "policy: fixed 8, mixed", "policy: fixed 8, lock-step"),
    ("refresh", "aspire", "refresh off (verified)"),
    ("profiled layer instead of the penultimate", "aspire", "profile off (penultimate layer)"),
    ("confidence instead of ema", "aspire", "policy: ema"),
    ("confidence instead of fsm", "aspire", "policy: fsm"),
    ("confidence instead of fixed 8", "aspire", "policy: fixed 8, mixed"),
    ("ema instead of fixed 8", "policy: ema", "policy: fixed 8, mixed"),
    ("32 drafts instead of 16", "drawn lengths, at most 32 drafts", "drawn lengths, at most 16 drafts"),
)
SIMULATED_CELLS = ((32, 16384), (6, 90000))
# benchmarks/results/h200/methods.json: Qwen3-8B shape, calibrated at start-up
H200_COST = SimulatedCost(fixed=5.938e-3, per_token=3.172e-5, per_kv=2.918e-8)


def trace_for(variant: Variant, batch: int, seed: int) -> Trace:
    assert variant.context is not None
    if variant.acceptance == DRAWN:
        return drawn_trace(variant.context, batch, seed)
    if variant.acceptance == PENULTIMATE:
        found = shipped_traces("refreshed_penultimate")
        return requests_of({name: found[name] for name in recorded_traces("refreshed")}, batch, seed)
    return requests_of(recorded_traces(variant.context), batch, seed)


def shortened(trace: Trace, longest: int) -> Trace:
    """The trace as if no draft had been longer than `longest`."""
    drafts = tuple(
        tuple(Draft(min(draft.accepted, longest), draft.confidences[:longest]) for draft in request)
        for request in trace.drafts
    )
    return replace(trace, drafts=drafts)


# ---- on a GPU


def engines(shape: str, cell: tuple[int, int], report: Report) -> dict[str, LLM]:
    """By variant; those of one context set and draft limit share a runner."""
    numbers = SHAPES[shape]
    bytes_per_token = (
        2 * numbers["num_hidden_layers"] * numbers["num_key_value_heads"] * numbers["head_dim"] * (2 if GPU else 4)
    )
    options: dict[str, Any] = {
        "load_format": "dummy", "max_model_len": cell[1] + OUTPUT + 64, "max_num_seqs": cell[0], "max_num_batched_tokens": 2048,
        "kv_cache_memory": kv_memory(bytes_per_token, [cell], OUTPUT),
    }  # fmt: skip
    base = LLM(model_folder(shape), method="plain", **options)
    made = {PLAIN.name: base}
    first: dict[tuple[str | None, int], LLM] = {}
    cost = None
    for variant in VARIANTS[1:]:
        with report.part(f"start of {variant.name}"):
            key = variant.context, variant.max_draft_tokens
            if key not in first:
                extra: dict[str, Any] = (
                    {"refresh_layers": (refresh_layer(shape),)} if variant.context == "refreshed" else {}
                )
                method = "aspire" if variant.context == "refreshed" else "vegas"
                first[key] = LLM(
                    base.config.model, loaded=base.model, cache=base.cache, method=method, policy="confidence", budget=BUDGET,
                    max_draft_tokens=variant.max_draft_tokens, profile="none", **extra, **options,
                )  # fmt: skip
                cost = cost or first[key].engine.cost
            made[variant.name] = other_policy(
                first[key], variant.policy, variant.draft_tokens, cost=first[key].engine.cost
            )
    fill(base)  # last: calibration leaves zeros behind
    keep_collections_short()
    return made


def measure(deadline: Deadline, shape: str, cell: tuple[int, int], repeats: int) -> None:
    report = Report("ablations")
    report.data["note"] = "REPLAYED acceptance, dummy weights, random K/V"
    report.data["settings"] = {
        "shape": shape,
        "cell": list(cell),
        "budget": BUDGET,
        "refresh_layer": refresh_layer(shape),
    }
    llms: dict[str, LLM] = {}
    with report.part("start"):
        llms = engines(shape, cell, report)
    if PLAIN.name not in llms:
        return
    base = llms[PLAIN.name]
    say(f"start-up {report.data['seconds']['start']} s, {deadline.left:.0f} s left")
    prompts = cached_prompts(base, *cell, cell[0])
    window = WINDOW_TOKENS if GPU else 24
    runs: dict[str, list[dict[str, Any]]] = {}
    chosen = [variant for variant in VARIANTS if variant.name in llms]

    def run(variant: Variant, seed: int, tokens: int, skip: int) -> dict[str, Any]:
        llm = llms[variant.name]
        if variant.context is not None:
            replay(llm, trace_for(variant, cell[0], seed))
        free_all_but(base.cache.pages, prompts)
        return decode_steadily(llm, prompts, tokens, skip=skip, longest=OUTPUT).row()

    for variant in chosen:
        with report.part(f"warm-up of {variant.name}"):
            run(variant, 1000, max(2, window // 4), 2)
    slowest = 0.0
    for repeat in range(repeats):
        if repeat and deadline.left < slowest:
            say(f"no time for repeat {repeat + 1} of {repeats}")
            break
        began = time.perf_counter()
        for variant in chosen:
            with report.part(f"{variant.name}, repeat {repeat + 1}"):
                runs.setdefault(variant.name, []).append(run(variant, repeat, window, 24))
        slowest = max(slowest, time.perf_counter() - began)
    with report.part("summary"):
        rows = {name: gpu_row(of_variant, runs[PLAIN.name]) for name, of_variant in runs.items()}
        report.data["variants"] = rows
        report.data["questions"] = {
            what: gains(runs[a], runs[b]) for what, a, b in QUESTIONS if a in runs and b in runs
        }
        say(f"\nREPLAYED, {shape}, {cell[0]} x {cell[1]}; medians and 95 % intervals")
        for name, row in rows.items():
            say(
                f"{name:34} {shown(row['tokens_per_s'], 0):>20} tok/s {shown(row['speedup']):>18}x  "
                f"accepted {row['mean_accepted_length']['median']:5.2f} of {row['mean_draft_length']['median']:5.2f} + 1"
            )
        for what, gain in report.data["questions"].items():
            say(f"{what:46} {shown(gain, 3)}x")


def gpu_row(of_variant: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens_per_s": summary([run["tokens_per_s"] for run in of_variant]),
        "speedup": gains(of_variant, plain),
        "mean_accepted_length": summary([run["mean_accepted_length"] for run in of_variant]),
        "mean_draft_length": summary([run["mean_draft_length"] for run in of_variant]),
        "runs": list(of_variant),
    }


def gains(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return summary([a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, theirs, strict=False)])


# ---- simulated


def simulate_cell(
    cell: tuple[int, int], cost: SimulatedCost, layers: int, tokens: int = 256
) -> dict[str, SimulatedRun]:
    batch, length = cell
    runs = {}
    for variant in VARIANTS:
        drawn_from = variant if variant.context is not None else VARIANTS[1]
        trace = shortened(trace_for(drawn_from, 48, 0), variant.max_draft_tokens)
        reads = ReadModel(BUDGET, layers, 1 if variant.context == "refreshed" else 0)
        own = replace(cost, context_length=length, reads=reads)
        # 48 requests: eight of each workload, as often as fills the batch twice
        settings = Replay(batch_size=batch, late=True, tokens=tokens, repeats=max(1, 2 * batch // 48 + 1))
        spec = variant.policy if variant.draft_tokens is None else f"{variant.policy}:{variant.draft_tokens}"
        runs[variant.name] = run_policy(trace, spec, own, settings, max_verify_tokens=128)
    return runs


def simulated_markdown(results: Mapping[tuple[int, int], Mapping[str, SimulatedRun]]) -> str:
    lines = [
        "| variant | " + " | ".join(f"{b}×{n}, tokens/s | speed-up [95 %] | accepted length" for b, n in results) + " |"
    ]
    lines.append("| --- |" + " --- | --- | --- |" * len(results))
    for variant in VARIANTS:
        cells = []
        for runs in results.values():
            run, plain = runs[variant.name], runs[PLAIN.name]
            low, high = bootstrap_interval(run, plain)
            drafted = max(1, run.num_cycles)
            cells.append(
                f"{run.tokens_per_s:.0f} | {run.tokens_per_s / plain.tokens_per_s:.2f} [{low:.2f}, {high:.2f}] | {1 + run.num_accepted_tokens / drafted:.2f}"
            )
        lines.append(f"| {variant.name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| what | " + " | ".join(f"{b}×{n} [95 %]" for b, n in results) + " |",
        "| --- |" + " --- |" * len(results),
    ]
    for what, with_it, without in QUESTIONS:
        cells = []
        for runs in results.values():
            a, b = runs[with_it], runs[without]
            low, high = bootstrap_interval(a, b)
            cells.append(f"{a.tokens_per_s / b.tokens_per_s:.3f}x [{low:.3f}, {high:.3f}]")
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["simulate"]:
        results = {
            cell: simulate_cell(cell, H200_COST, SHAPES["qwen3-8b"]["num_hidden_layers"]) for cell in SIMULATED_CELLS
        }
        text = simulated_markdown(results)
        say(text)
        if len(sys.argv) > 2:
            Path(sys.argv[2]).write_text(text + "\n")
        return
    given = [*sys.argv[1:], *[""] * 4]
    batch, length = map(int, (given[2] or "32x16384").split("x"))
    measure(Deadline(float(given[0] or 600)), given[1] or "qwen3-8b", (batch, length), int(given[3] or 3))


if __name__ == "__main__":
    main()
