"""The paper's Table 1, replayed: model shapes × contexts × methods, steady decoding of a full batch on one GPU.

Usage: python benchmarks/table.py SECONDS [SHAPE,… [BATCHxCONTEXT,… [recorded,drawn,realised [REPEATS]]]]

Dummy weights; K/V of the prompts are random and put into the prefix cache by hand; accept decisions and draft confidences
are REPLAYED: `recorded` from the shipped traces of the method's own context set (six workloads in turn), `drawn` from lengths
drawn for each request, whose mean is scaled to what that context set was measured to reach: those are lengths of drafts of
32, of which shorter ones realise less; `realised` draws longer ones, such that `aspire` with drafts of up to 32 realises the
paper's lengths at an H200's costs (simulated: 11.8 and 12.5 in the two cells of the table). All methods run the same batch,
requests and KV cache; they take turns, A B C A B C, and every repeat is another seed (other requests of the traces). Methods
of one context set share a runner, so nothing differs between them but the policy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
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

from aspire_llm import LLM
from aspire_llm.bench.measure import free_all_but
from aspire_llm.bench.replay import ReplaySampler
from aspire_llm.config import METHODS
from aspire_llm.engine.garbage import keep_collections_short
from aspire_llm.policy.trace import Trace, shipped_traces
from aspire_llm.policy.trace_synthetic import synthetic_trace

PLAIN = "plain"
COMPARED = (PLAIN, "magicdec-window", "vegas", "sparsespec", "aspire-fsm", "aspire-ema", "aspire")
CELLS = ((32, 16384), (16, 32768), (6, 90000))
BUDGET = 512
WINDOW_TOKENS = 128  # new tokens a request, mean, in a measured stretch
SKIPPED = 48  # steps before it, in which policies learn
OUTPUT = 640  # most tokens of a request; none gets there
# Mean accepted drafts of a context set over those of `refreshed` with the profile's layer: FINDINGS, 0.5B and 1.5B at 28,000
# tokens, three workloads each.
RELATIVE_ACCEPTANCE = {"window": 0.47, "verified": 0.79, "refreshed": 1.0}
# mean, least and largest mean accepted length of requests, of drafts of 32; the paper's are 11.5, 2.56 and 20. With the second,
# `aspire` realises 11.5 in the simulator at an H200's costs, in each of CELLS.
DRAWN = {"drawn": (11.5, 2.56, 20.0), "realised": (21.7, 2.56, 32.0)}
LONG = "qwen2.5"  # the shipped traces recorded at 28,000 tokens


def recorded_traces(context: str) -> dict[str, Trace]:
    """The shipped 28K traces of a context set; of `refreshed`, with the layer that the profile chose."""
    found = shipped_traces(None if context == "refreshed" else context)
    return {name: trace for name, trace in found.items() if name.startswith(LONG)}


def drawn_trace(context: str, batch: int, seed: int, mode: str = "drawn") -> Trace:
    """Requests whose mean accepted lengths are drawn, accepted drafts scaled to what the context set reaches."""
    scale = RELATIVE_ACCEPTANCE[context]
    mean, low, high = (1.0 + (length - 1.0) * scale for length in DRAWN[mode])
    return synthetic_trace(mean, low, high, requests=batch, positions=4 * OUTPUT, seed=seed, draft_tokens=32)


def engines(shape: str, cells: Sequence[tuple[int, int]], longest_draft: int, part: Report) -> dict[str, LLM]:
    """One LLM a method, over one model and one KV cache, and over one runner for each context set."""
    layers = SHAPES[shape]["num_hidden_layers"]
    bytes_per_token = 2 * layers * SHAPES[shape]["num_key_value_heads"] * SHAPES[shape]["head_dim"] * (2 if GPU else 4)
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": max(length for _, length in cells) + OUTPUT + 64,
        "max_num_seqs": max(batch for batch, _ in cells),
        "kv_cache_memory": kv_memory(bytes_per_token, cells, OUTPUT),
        "max_num_batched_tokens": 2048,
        "profile": "none",
    }
    started: dict[str, float] = {}
    began = time.perf_counter()
    plain = LLM(model_folder(shape), method=PLAIN, **{**options, "profile": None})
    started[PLAIN] = time.perf_counter() - began
    made = {PLAIN: plain}
    for context, first in (("refreshed", "aspire"), ("verified", "vegas"), ("window", "magicdec-window")):
        began = time.perf_counter()
        extra: dict[str, Any] = {"refresh_layers": (refresh_layer(shape),)} if context == "refreshed" else {}
        with part.part(f"start of {shape}, {context}"):
            base = LLM(
                plain.config.model,
                loaded=plain.model,
                cache=plain.cache,
                method=first,
                budget=BUDGET,
                max_draft_tokens=longest_draft,
                **extra,
                **options,
            )
            made[first] = base
            for method in COMPARED:
                preset = METHODS[method]
                if preset.context == context and method != first:
                    made[method] = other_policy(base, preset.policy, preset.draft_tokens)
        started[context] = time.perf_counter() - began
    fill(plain)  # last: calibration leaves zeros behind
    keep_collections_short()
    part.data.setdefault("start_up_s", {})[shape] = {k: round(v, 1) for k, v in started.items()}
    cost = made["aspire"].engine.cost if "aspire" in made else None
    if cost is not None:
        part.data.setdefault("calibrated_cost", {})[shape] = {
            name: getattr(cost, name)
            for name in ("fixed", "per_token", "per_kv", "free_tokens", "per_check", "verify_step")
        }
    say(f"{shape}: start-up " + ", ".join(f"{k} {v:.1f} s" for k, v in started.items()))
    return {method: made[method] for method in COMPARED if method in made}


def replay(llm: LLM, trace: Trace) -> None:
    llm.engine.runner.sampler = ReplaySampler(trace, llm.config.max_num_seqs, llm.model.decoder.device)  # type: ignore[assignment]


def run_cell(
    llms: Mapping[str, LLM],
    cell: tuple[int, int],
    mode: str,
    repeats: int,
    window: int,
    deadline: Deadline,
    reference: Sequence[dict[str, Any]] = (),
) -> dict[str, list[dict[str, Any]]]:
    """Runs by method, in order of the repeats. reference: plain's runs, where they are known already."""
    batch, length = cell
    base = llms[PLAIN]
    base.reset_prefix_cache()
    prompts = cached_prompts(base, batch, length, batch)
    traces = {c: recorded_traces(c) for c in {METHODS[m].context for m in llms} if c} if mode == "recorded" else {}
    names = [method for method in llms if method != PLAIN or not reference]
    runs: dict[str, list[dict[str, Any]]] = {PLAIN: list(reference)} if reference else {}

    def run(method: str, seed: int, tokens: int, skip: int) -> dict[str, Any]:
        llm = llms[method]
        context = METHODS[method].context
        if context is not None:
            trace = requests_of(traces[context], batch, seed) if traces else drawn_trace(context, batch, seed, mode)
            replay(llm, trace)
        free_all_but(base.cache.pages, prompts)
        return decode_steadily(llm, prompts, tokens, skip=skip, longest=OUTPUT).row()

    for method in names:  # warm-up: kernels, policies' priors; also how long a run takes
        run(method, 1000, max(2, window // 4), 2)
    slowest = 0.0
    for repeat in range(repeats):
        if repeat and deadline.left < slowest:
            say(f"   no time for repeat {repeat + 1} of {repeats}")
            break
        began = time.perf_counter()
        for method in names:
            runs.setdefault(method, []).append(run(method, repeat, window, SKIPPED))
        slowest = max(slowest, time.perf_counter() - began)
    return runs


def vllm_tokens_per_s(shape: str, cell: tuple[int, int]) -> float | None:
    """Median of `vllm_decode.py`, if it was run for the shape: vllm-SHAPE.json of the results."""
    path = Path(__file__).parent / "results" / "h200" / f"vllm-{shape}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())["cells"].get(f"{cell[0]}x{cell[1]}")
    return median(found["tokens_per_s"]) if found else None


def summarise(runs: Mapping[str, Sequence[dict[str, Any]]], vllm: float | None) -> dict[str, Any]:
    rows = {}
    for method, of_method in runs.items():
        speeds = [run["tokens_per_s"] for run in of_method]
        ratios = [
            run["tokens_per_s"] / plain["tokens_per_s"] for run, plain in zip(of_method, runs[PLAIN], strict=False)
        ]
        rows[method] = {
            "tokens_per_s": summary(speeds),
            "speedup": summary(ratios),
            "mean_accepted_length": summary([run["mean_accepted_length"] for run in of_method]),
            "mean_draft_length": summary([run["mean_draft_length"] for run in of_method]),
            "step_ms": summary([run["step_ms"] for run in of_method]),
            "over_vllm": summary(speeds)["median"] / vllm if vllm else None,
            "runs": list(of_method),
        }
    return rows


def print_rows(where: str, rows: Mapping[str, Any]) -> None:
    for method, row in rows.items():
        over = row["over_vllm"]
        say(
            f"{where:42} {method:16} {shown(row['tokens_per_s'], 0):>20} tok/s  {shown(row['speedup']):>18}x"
            f"  accepted {shown(row['mean_accepted_length']):>20}  draft {row['mean_draft_length']['median']:5.2f}"
            f"  step {row['step_ms']['median']:6.2f} ms" + (f"  {over:.2f}x vLLM" if over else "")
        )


def cell_of(text: str) -> tuple[int, int]:
    batch, length = map(int, text.split("x"))
    return batch, length


def main() -> None:
    given = [*sys.argv[1:], *[""] * 5]
    deadline = Deadline(float(given[0] or 600))
    shapes = given[1].split(",") if given[1] else ["qwen3-8b", "qwen3-1.7b", "deepseek-r1-distill-llama-8b"]
    cells = [cell_of(c) for c in given[2].split(",")] if given[2] else list(CELLS)
    modes = given[3].split(",") if given[3] else ["recorded"]
    repeats = int(given[4] or 3)
    window = WINDOW_TOKENS if GPU else 24
    report = Report("table-" + "-".join([*shapes, *modes]))
    report.data["note"] = (
        "REPLAYED acceptance, dummy weights, random K/V; over_vllm: over the medians of vllm-SHAPE.json, not of this run"
    )
    report.data["settings"] = {
        "budget": BUDGET,
        "window_tokens": window,
        "repeats": repeats,
        "refresh_layers": {s: refresh_layer(s) for s in shapes},
    }
    tables: list[tuple[str, dict[str, Any]]] = []
    for number, shape in enumerate(shapes):
        if number and deadline.left < 60:
            say(f"no time for {shape}")
            continue
        limit = deadline.share(len(shapes) - number)
        llms: dict[str, LLM] = {}
        with report.part(f"start of {shape}"):
            llms = engines(shape, cells, 32 if "realised" in modes else 16, report)
        if not llms:
            continue
        jobs = [(mode, cell) for mode in modes for cell in cells]
        plain_runs: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for i, (mode, cell) in enumerate(jobs):
            if i and limit.left < 5:
                say(f"no time for {shape} {mode} {cell}")
                continue
            with report.part(f"{shape} {cell[0]}x{cell[1]} {mode}"):
                runs = run_cell(llms, cell, mode, repeats, window, limit.share(len(jobs) - i), plain_runs.get(cell, ()))
                plain_runs.setdefault(cell, list(runs[PLAIN]))
                rows = summarise(runs, vllm_tokens_per_s(shape, cell))
                report.data.setdefault("cells", {}).setdefault(shape, {}).setdefault(f"{cell[0]}x{cell[1]}", {})[
                    mode
                ] = rows
                tables.append((f"{shape} {cell[0]}x{cell[1]} {mode}", rows))
                print_rows(*tables[-1])
        del llms
        if GPU:
            torch.cuda.empty_cache()
    say("\nREPLAYED acceptance; medians and 95 % intervals")
    for table in tables:
        print_rows(*table)
    report.write()


if __name__ == "__main__":
    main()
