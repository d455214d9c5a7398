"""Attention kernels on one GPU: each version built, checked against plain torch on fresh random data, then timed.

    PYTHONPATH=src python benchmarks/kernels.py --out DIR [--commit HASH] [--versions a,b|all]

The first version named is measured whole, the others in two cells. Shape: 32 query heads, 8 KV heads, D 128, bf16, pages
of 64. Bandwidth counts K and V bytes alone, each read once. Times are medians of graph replays that go through every layer
of a cache far larger than L2. Writes DIR/kernels.json as it goes; the table is last. For every kernel of a step against the
device's own roofline: `aspire-llm bench kernels`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

from aspire_llm.attention.triton.backend import Tuning
from aspire_llm.attention.triton.top_k import top_k
from aspire_llm.bench.kernels_attention import (
    attention_case,
    merge_case,
    plan_case,
    repeated,
    store_case,
    top_k_case,
)
from aspire_llm.bench.kernels_batch import Rows, make_backend, make_batch, make_pool
from aspire_llm.bench.kernels_check import check, same_bits
from aspire_llm.bench.kernels_shape import SHAPES
from aspire_llm.bench.kernels_timing import Case, timings
from aspire_llm.cache.pool import KVPool
from aspire_llm.request import RowKind

SHAPE, PAGE = SHAPES["qwen3-8b"], 64
CARD = 4.45e12  # bytes/s, reads only (shared/FINDINGS.md)
CELLS = ((64, 8192), (32, 16384), (16, 32768), (6, 90000))
DEFAULT = Tuning()
VERSIONS: dict[str, Tuning] = {
    "default": DEFAULT,
    "programs 1056": replace(DEFAULT, programs=1056),
    "wide 1": replace(DEFAULT, wide_depth=1),
}
D, V = RowKind.DRAFT, RowKind.VERIFY


def seconds(case: Case) -> float:
    return statistics.median(timings(case, torch.device("cuda"), 11))


def attention_seconds(pool: KVPool, groups: Sequence[Rows], tuning: Tuning, **options: Any) -> float:
    """Seconds a layer."""
    return seconds(attention_case("", "triton", SHAPE, pool, groups, tuning=tuning, **options))


def bandwidth(pool: KVPool, rows: Rows, tuning: Tuning, **options: Any) -> float:
    """TB/s of K and V."""
    return rows.kv_bytes(SHAPE) / attention_seconds(pool, [rows], tuning, **options) / 1e12


def cells(
    pool: KVPool, tuning: Tuning, quick: bool = False, deterministic: bool = False
) -> dict[str, dict[str, float]]:
    """TB/s of every kind of row alone, in every cell."""
    table = {}
    for count, length in CELLS[:: 3 if quick else 1]:
        table[f"{count}x{length}"] = {
            f"verify {n}": bandwidth(pool, Rows(V, count, length, n), tuning, deterministic=deterministic)
            for n in (1, 8, 17)
        }
    for budget in (512, 2048):
        rows, cell = Rows(D, 64, 8192, 1, budget), table["64x8192"]
        cell[f"draft {budget}"] = bandwidth(pool, rows, tuning, deterministic=deterministic)
        cell[f"draft {budget} (kernel)"] = bandwidth(pool, rows, tuning, only_kernel=True, deterministic=deterministic)
    return table


def scored_cells(pool: KVPool, tuning: Tuning) -> dict[str, float]:
    """TB/s of K and V of VERIFY rows whose first and last token are scored, normalised scores included."""
    return {f"verify {n}": bandwidth(pool, Rows(V, 32, 16384, n), tuning, weighted=True) for n in (1, 8, 17)}


def mixes(pool: KVPool, tuning: Tuning, alone: dict[str, float]) -> dict[str, dict[str, float]]:
    """Time of mixed launches over the sum of each part's bytes over the bandwidth it reached alone, at 64×8192."""
    result = {}
    for name, groups in {
        "32 drafts (512), 32 verify 8": [Rows(D, 32, 8192, 1, 512), Rows(V, 32, 8192, 8)],
        "56 drafts (512), 8 verify 8": [Rows(D, 56, 8192, 1, 512), Rows(V, 8, 8192, 8)],
        "48 drafts (2048), 16 verify 17": [Rows(D, 48, 8192, 1, 2048), Rows(V, 16, 8192, 17)],
        "32 drafts (2048), 16 verify 1, 16 verify 17": [Rows(D, 32, 8192, 1, 2048), Rows(V, 16, 8192), Rows(V, 16, 8192, 17)],
        "8 drafts (512), 56 verify 17": [Rows(D, 8, 8192, 1, 512), Rows(V, 56, 8192, 17)],
    }.items():  # fmt: skip
        taken = attention_seconds(pool, groups, tuning)
        parts = sum(
            rows.kv_bytes(SHAPE)
            / (alone[f"draft {rows.budget}" if rows.kind is D else f"verify {rows.num_tokens}"] * 1e12)
            for rows in groups
        )
        apart = sum(attention_seconds(pool, [rows], tuning) for rows in groups)
        result[name] = {
            "us": taken * 1e6,
            "parts us": parts * 1e6,
            "ratio": taken / parts,
            "ratio to the same rows in launches of their own": taken / apart,
        }
    return result


def selection(pool: KVPool, tuning: Tuning) -> dict[str, float]:
    """Microseconds: a refresh layer of 32 draft rows × 32768 with scores and top-k, beyond its attention; and the pieces."""
    device = torch.device("cuda")
    count, length, k = 32, 32768, 256
    rows = Rows(D, count, length, 1, 16)
    out = torch.zeros(count, k, dtype=torch.int32, device=device)
    counts = torch.zeros(count, dtype=torch.int32, device=device)
    lengths = torch.full((count,), length, dtype=torch.int32, device=device)

    def choose(plan: Any, layer: int) -> None:
        top_k(plan.scores[layer], lengths, k, n_sinks=4, n_recent=32, out=out, counts=counts)

    result = {f"normalising scores, {count}x{length}, alone": normalising_seconds(pool, rows, tuning) * 1e6}
    plain = attention_seconds(pool, [rows], tuning, refresh=True)
    scored = attention_seconds(pool, [rows], tuning, refresh=True, weighted=True)
    chosen = attention_seconds(pool, [rows], tuning, refresh=True, weighted=True, after=choose)
    result["refresh layer, attention alone"] = plain * 1e6
    result["scores beyond attention"] = (scored - plain) * 1e6
    result["scores and top-k beyond attention"] = (chosen - plain) * 1e6
    for count, length, k in ((32, 32768, 256), (32, 32768, 2048), (64, 8192, 512), (8, 131072, 2048)):
        ours = top_k_case("", "triton", count, length, k, device, forced=False)
        scores = torch.rand(count, length, device=device) ** 8 / length
        theirs = repeated(Case("", "", scores.nbytes, 0, lambda s=scores, k=k: s.topk(k, sorted=False)), device)
        check_top_k(scores, k)
        result[f"top-{k} of {count}x{length}"] = seconds(ours) * 1e6
        result[f"torch.topk {k} of {count}x{length}"] = seconds(theirs) * 1e6
    for width in (256, 1024):
        result[f"merge {width}+{width}, 36 layers x 64 rows"] = seconds(merge_case("", width, 36, 64, device)) * 1e6
    step = Rows(V, 64, 8192, 8)
    result["plan, 36 layers x 64 rows of 8"] = (
        seconds(plan_case("", "triton", SHAPE, pool, step, 36, tuning=tuning)) * 1e6
    )
    result["store 512 tokens"] = seconds(store_case("", "triton", SHAPE, pool, step, tuning=tuning)) * 1e6
    return result


def normalising_seconds(pool: KVPool, rows: Rows, tuning: Tuning) -> float:
    """The launch that turns what attention stored into scores."""
    batch = make_batch([rows], pool, rows.length, weighted=True)
    backend = make_backend("triton", SHAPE, pool, batch, rows.length, tuning=tuning, refresh_layers=range(4))
    q = torch.randn(rows.count, SHAPE.num_heads, SHAPE.head_dim, device="cuda", dtype=SHAPE.dtype)
    backend.attend(backend.plan(batch), 0, q, torch.empty_like(q))
    return seconds(repeated(Case("", "", 0, 0, lambda: backend._score(batch, 0, q)), q.device))


def check_top_k(scores: torch.Tensor, k: int) -> None:
    out = torch.zeros(scores.shape[0], k, dtype=torch.int32, device=scores.device)
    counts = torch.zeros(scores.shape[0], dtype=torch.int32, device=scores.device)
    top_k(scores, torch.full_like(counts, scores.shape[1]), k, out=out, counts=counts)
    assert torch.equal(out.long().sort(1).values, scores.topk(k).indices.sort(1).values), "top-k is wrong"


def warm(name: str) -> None:
    """Compile a version's kernels into Triton's cache, so that versions compile side by side."""
    pool = make_pool(SHAPE, 2, 1024, PAGE, torch.device("cuda"))
    tuning = VERSIONS[name.removesuffix(" deterministic")]
    check("triton", SHAPE, pool, tuning=tuning, deterministic=name.endswith(" deterministic"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--versions", default="default")
    parser.add_argument("--warm", default="")
    args = parser.parse_args()
    if args.warm:
        warm(args.warm)
        return
    begin = time.time()
    names = list(VERSIONS) if args.versions == "all" else args.versions.split(",")
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit,
        "command": " ".join(sys.argv),
        "card_TB_s": CARD / 1e12,
        "errors": {},
        "TB_s": {},
    }
    compiled = {
        (t.block_n, t.narrow_depth, t.wide_depth, t.warps): name for name, t in VERSIONS.items() if name in names
    }
    jobs = [*compiled.values(), "default deterministic"]
    with concurrent.futures.ThreadPoolExecutor(12) as executor:
        command = [sys.executable, __file__, "--out", str(args.out), "--warm"]
        for job, done in zip(
            jobs,
            executor.map(lambda job: subprocess.run([*command, job], capture_output=True, text=True), jobs),
            strict=True,
        ):
            if done.returncode:
                print(f"{job}: {done.stderr[-1500:]}")
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)

    pool = make_pool(SHAPE, 4, 17000, PAGE, torch.device("cuda"))
    args.out.mkdir(parents=True, exist_ok=True)

    def attempt(keys: tuple[str, ...], body: Callable[[], object]) -> None:
        """Put what `body` returns at `keys` of the report; print and keep it at once, since a lease can end at any time."""
        try:
            value = body()
        except Exception as problem:
            value = f"{type(problem).__name__}: {str(problem)[-600:]}"
        place = report
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        print(f"[{time.time() - begin:.0f} s] {' '.join(keys)}: {compact(value)}", flush=True)
        (args.out / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")

    for i, name in enumerate(names):
        tuning = VERSIONS[name]
        attempt(("errors", name), lambda tuning=tuning: check("triton", SHAPE, pool, tuning=tuning))
        attempt(("TB_s", name), lambda tuning=tuning, i=i: cells(pool, tuning, quick=i > 0))
        if i == 0:
            attempt(("mixes",), lambda tuning=tuning, name=name: mixes(pool, tuning, report["TB_s"][name]["64x8192"]))
            attempt(("selection_us",), lambda tuning=tuning: selection(pool, tuning))
            attempt(("scored_32x16384",), lambda tuning=tuning: scored_cells(pool, tuning))
            attempt(
                ("deterministic_errors",),
                lambda tuning=tuning: check("triton", SHAPE, pool, tuning=tuning, deterministic=True),
            )
            attempt(("deterministic_same_bits",), lambda: same_bits(SHAPE, pool))
            attempt(("deterministic_TB_s",), lambda tuning=tuning: cells(pool, tuning, quick=True, deterministic=True))
    print(f"\nall done in {time.time() - begin:.0f} s; TB/s of K and V")
    for name, table in report["TB_s"].items():
        print(f"{name}: {compact(table)}")


def compact(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key} {compact(item)}" for key, item in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
