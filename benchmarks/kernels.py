"""Attention kernels on one GPU: each version built, checked against plain torch on fresh random data, then timed.

    PYTHONPATH=src python benchmarks/kernels.py --out DIR [--commit HASH] [--versions a,b|all]

The first version named is measured whole, the others in two cells. Shape: 32 query heads, 8 KV heads, D 128, bf16, pages
of 64. Bandwidth counts K and V bytes alone, each read once. Times are medians of graph replays that go through every layer
of a cache far larger than L2. Writes DIR/kernels.json as it goes; the table is last.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from aspire_llm.attention.backend import AttentionBatch
from aspire_llm.attention.triton.backend import TritonBackend, TritonPlan, Tuning
from aspire_llm.attention.triton.top_k import merge_sets, top_k
from aspire_llm.cache.pool import KVPool
from aspire_llm.request import RowKind

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
CARD = 4.45e12  # bytes/s, reads only (shared/FINDINGS.md)
BYTES_PER_POSITION = 2 * KV_HEADS * DIM * 2
CELLS = ((64, 8192), (32, 16384), (16, 32768), (6, 90000))
DEFAULT = Tuning()
VERSIONS: dict[str, Tuning] = {
    "default": DEFAULT,
    "programs 1056": replace(DEFAULT, programs=1056),
    "wide 1": replace(DEFAULT, wide_depth=1),
}


@dataclass(frozen=True)
class Rows:
    kind: RowKind
    count: int
    length: int  # of the request, the row's tokens included
    num_tokens: int = 1
    budget: int = 0  # DRAFT: size of the set; the tail is the last 32 positions

    @property
    def bytes(self) -> int:
        positions = self.budget + 32 if self.kind == RowKind.DRAFT else self.length
        return self.count * positions * BYTES_PER_POSITION


def make_batch(groups: list[Rows], pool: KVPool, max_len: int, weighted: bool = False, seed: int = 0) -> AttentionBatch:
    """A batch over randomly scattered pages; one layer's worth of sets serves every layer."""
    device = pool.k[0].device
    gen = torch.Generator(device=device).manual_seed(seed)
    rows = [group for group in groups for _ in range(group.count)]
    order = torch.randperm(pool.num_pages, generator=gen, device=device, dtype=torch.int64).int()
    table = torch.zeros(len(rows), -(-max_len // PAGE), dtype=torch.int32, device=device)
    width = max([group.budget for group in groups] + [1])
    sets = torch.zeros(1, len(rows), width, dtype=torch.int32, device=device)
    used = 0
    for i, row in enumerate(rows):
        pages = -(-row.length // PAGE)
        table[i, :pages] = order[used : used + pages]
        used += pages
        if row.budget:
            chosen = torch.randperm(row.length - 32, generator=gen, device=device)[: row.budget]
            sets[0, i, : row.budget] = chosen.sort().values.int()
    assert used <= pool.num_pages, "the pool is too small for this batch"
    num_tokens = [row.num_tokens for row in rows]
    starts = torch.tensor([row.length - row.num_tokens for row in rows], device=device)
    offsets = torch.tensor([0, *torch.tensor(num_tokens).cumsum(0).tolist()], dtype=torch.int32, device=device)
    token_rows = torch.repeat_interleave(
        torch.arange(len(rows), device=device), torch.tensor(num_tokens, device=device)
    )
    positions = starts[token_rows] + torch.arange(len(token_rows), device=device) - offsets[token_rows]
    weights = torch.zeros(len(token_rows), device=device)
    if weighted:
        weights[offsets[:-1].long()] += 0.5
        weights[offsets[1:].long() - 1] += 0.5
    layers = len(pool.k)
    return AttentionBatch(
        kinds=tuple(row.kind for row in rows),
        num_tokens=tuple(num_tokens),
        row_offsets=offsets,
        slots=torch.arange(len(rows), dtype=torch.int32, device=device),
        starts=starts.int(),
        positions=positions,
        page_table=table,
        sparse=torch.tensor([row.kind == RowKind.DRAFT for row in rows], device=device),
        sets=sets.expand(layers, -1, -1),
        set_lengths=torch.tensor([[row.budget for row in rows]] * layers, dtype=torch.int32, device=device),
        tail_starts=torch.tensor([row.length - 32 for row in rows], dtype=torch.int32, device=device),
        score_weights=weights,
        scored_rows=tuple(range(len(rows))) if weighted else (),
        num_scored_tokens=int(weights.count_nonzero()),
    )


def make_backend(pool: KVPool, batch: AttentionBatch, max_len: int, **options) -> TritonBackend:
    return TritonBackend(
        pool,
        num_heads=HEADS,
        scale=DIM**-0.5,
        windows=[None] * len(pool.k),
        max_tokens=batch.positions.shape[0],
        max_rows=batch.slots.shape[0],
        max_len=max_len,
        **options,
    )


def reference(pool: KVPool, batch: AttentionBatch, q: Tensor, layer: int, dense: bool) -> tuple[Tensor, Tensor]:
    """Float32 attention [T, heads, D], and scores [R, longest]."""
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    starts, offsets = batch.starts.tolist(), batch.row_offsets.tolist()
    longest = max(start + n for start, n in zip(starts, batch.num_tokens, strict=True))
    scores = torch.zeros(len(starts), longest, device=q.device)
    for i, (start, n) in enumerate(zip(starts, batch.num_tokens, strict=True)):
        seen = torch.arange(start + n, device=q.device)
        if batch.kinds[i] == RowKind.DRAFT and not dense:
            chosen = batch.sets[layer, i, : int(batch.set_lengths[layer, i])].long()
            seen = torch.cat([chosen, torch.arange(int(batch.tail_starts[i]), start + n, device=q.device)])
        places = batch.page_table[i, seen // PAGE].long() * PAGE + seen % PAGE
        k, v = (t[:, places].float().repeat_interleave(HEADS // KV_HEADS, 0) for t in (pool.k[layer], pool.v[layer]))
        tokens = slice(offsets[i], offsets[i + 1])
        logits = q[tokens].float().transpose(0, 1) @ k.transpose(1, 2) * DIM**-0.5
        logits.masked_fill_(seen[None, None, :] > batch.positions[tokens][None, :, None], -torch.inf)
        p = logits.softmax(-1)  # [heads, n, seen]
        out[tokens] = (p @ v).transpose(0, 1)
        scores[i, seen] = torch.einsum("hnp,n->p", p, batch.score_weights[tokens]) / HEADS
    return out, scores


def error(got: Tensor, want: Tensor) -> float:
    value = ((got.float() - want).norm() / want.norm()).item()
    return value if value == value else float("inf")


def check(pool: KVPool, tuning: Tuning, deterministic: bool = False) -> dict[str, float]:
    """Relative errors of a batch of every kind of row, with random data drawn anew."""
    torch.backends.cuda.matmul.allow_tf32 = False
    D, V, P = RowKind.DRAFT, RowKind.VERIFY, RowKind.PREFILL
    groups = [
        Rows(V, 2, 3001), Rows(V, 2, 2048, 8), Rows(V, 1, 9000, 17), Rows(V, 1, 4097, 20), Rows(V, 1, 700, 33),
        Rows(V, 1, 1), Rows(V, 2, 5000, 16), Rows(D, 3, 6000, 1, 512), Rows(D, 1, 5000, 1, 2048),
        Rows(D, 1, 3000, 8, 500), Rows(D, 1, 33, 1), Rows(P, 1, 1000, 300), Rows(P, 1, 200, 200),
    ]  # fmt: skip
    batch = make_batch(groups, pool, 9024, weighted=True, seed=torch.seed() % 2**31)
    backend = make_backend(
        pool, batch, 9024, tuning=tuning, deterministic=deterministic, refresh_layers=[1], score_layers=[1],
        max_scored_tokens=600,
    )  # fmt: skip
    q = torch.randn(batch.positions.shape[0], HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(q.shape[0], KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    backend.layer_scores.fill_(float("nan"))
    backend.score_ends.fill_(9024)
    plan = backend.plan(batch)
    errors = {}
    for layer in (0, 1):
        got = backend.run(plan, layer, q, k, v)
        want, scores = reference(pool, batch, q, layer, dense=layer == 1)
        errors[f"layer {layer}"] = error(got, want)
        if layer == 1:
            errors["scores"] = error(plan.scores[1][:, : scores.shape[1]], scores)
    return errors


def same_bits(pool: KVPool) -> bool:
    """Deterministic: every token of a 17-token verification has the bits it has alone and in a smaller batch."""
    batch = make_batch([Rows(RowKind.VERIFY, 3, 9000, 17)], pool, 9024)
    q = torch.randn(51, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    backend = make_backend(pool, batch, 9024, deterministic=True)
    whole = torch.empty_like(q)
    backend.attend(backend.plan(batch), 0, q, whole)
    equal = True
    for j in (0, 7, 16):
        position = 9000 - 17 + j
        one = replace(
            batch, kinds=batch.kinds[:1], num_tokens=(1,), slots=batch.slots[:1], sparse=batch.sparse[:1],
            row_offsets=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
            starts=torch.tensor([position], dtype=torch.int32, device="cuda"),
            positions=torch.tensor([position], device="cuda"),
        )  # fmt: skip
        out = torch.empty_like(q[:1])
        backend.attend(backend.plan(one), 0, q[j : j + 1].contiguous(), out)
        equal = equal and torch.equal(out[0], whole[j])
    return equal


def seconds(body: Callable[[], None], repeats: int = 1, replays: int = 11) -> float:
    """Median time of one `body`, from a graph of `repeats` of them."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            body()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / repeats)
    return statistics.median(times)


def attention_seconds(
    pool: KVPool, groups: list[Rows], tuning: Tuning, *, only_kernel: bool = False, deterministic: bool = False,
    weighted: bool = False, refresh: bool = False, after: Callable[[TritonPlan, int], None] | None = None,
) -> float:  # fmt: skip
    """Seconds a layer: the kernel, its combination, scores if weighted, and what follows them."""
    max_len = -(-max(group.length for group in groups) // PAGE) * PAGE
    batch = make_batch(groups, pool, max_len, weighted=weighted)
    layers = range(len(pool.k))
    backend = make_backend(
        pool, batch, max_len, tuning=tuning, deterministic=deterministic, refresh_layers=layers if refresh else (),
        score_layers=layers if weighted else (),
    )  # fmt: skip
    plan = backend.plan(batch)
    plan.layers_run.extend(layers)
    q = torch.randn(batch.positions.shape[0], HEADS, DIM, device="cuda", dtype=pool.k[0].dtype)
    out = torch.empty_like(q)

    def body() -> None:
        for layer in layers:
            if only_kernel:
                backend._attend(batch, layer, q, out, weighted)
            else:
                backend.attend(plan, layer, q, out)
            if after is not None:
                after(plan, layer)

    return seconds(body) / len(pool.k)


def cells(
    pool: KVPool, tuning: Tuning, quick: bool = False, deterministic: bool = False
) -> dict[str, dict[str, float]]:
    """TB/s of every kind of row alone, in every cell."""
    table: dict[str, dict[str, float]] = {}
    for count, length in CELLS[:: 3 if quick else 1]:
        cell = table[f"{count}x{length}"] = {}
        for n in (1, 8, 17):
            group = Rows(RowKind.VERIFY, count, length, n)
            cell[f"verify {n}"] = (
                group.bytes / attention_seconds(pool, [group], tuning, deterministic=deterministic) / 1e12
            )
    for budget in (512, 2048):
        group = Rows(RowKind.DRAFT, 64, 8192, 1, budget)
        taken = attention_seconds(pool, [group], tuning, deterministic=deterministic)
        table["64x8192"][f"draft {budget}"] = group.bytes / taken / 1e12
        taken = attention_seconds(pool, [group], tuning, only_kernel=True, deterministic=deterministic)
        table["64x8192"][f"draft {budget} (kernel)"] = group.bytes / taken / 1e12
    return table


def scored_cells(pool: KVPool, tuning: Tuning) -> dict[str, float]:
    """TB/s of K and V of VERIFY rows whose first and last token are scored, normalised scores included."""
    groups = {f"verify {n}": Rows(RowKind.VERIFY, 32, 16384, n) for n in (1, 8, 17)}
    return {
        name: group.bytes / attention_seconds(pool, [group], tuning, weighted=True) / 1e12
        for name, group in groups.items()
    }


def mixes(pool: KVPool, tuning: Tuning, alone: dict[str, float]) -> dict[str, dict[str, float]]:
    """Time of mixed launches over the sum of each part's bytes over the bandwidth it reached alone, at 64×8192."""
    D, V = RowKind.DRAFT, RowKind.VERIFY
    result = {}
    for name, groups in {
        "32 drafts (512), 32 verify 8": [Rows(D, 32, 8192, 1, 512), Rows(V, 32, 8192, 8)],
        "56 drafts (512), 8 verify 8": [Rows(D, 56, 8192, 1, 512), Rows(V, 8, 8192, 8)],
        "48 drafts (2048), 16 verify 17": [Rows(D, 48, 8192, 1, 2048), Rows(V, 16, 8192, 17)],
        "32 drafts (2048), 16 verify 1, 16 verify 17": [Rows(D, 32, 8192, 1, 2048), Rows(V, 16, 8192), Rows(V, 16, 8192, 17)],
        "8 drafts (512), 56 verify 17": [Rows(D, 8, 8192, 1, 512), Rows(V, 56, 8192, 17)],
    }.items():  # fmt: skip
        taken = attention_seconds(pool, groups, tuning)
        parts = 0.0
        for group in groups:
            key = f"draft {group.budget}" if group.kind == D else f"verify {group.num_tokens}"
            parts += group.bytes / (alone[key] * 1e12)
        apart = sum(attention_seconds(pool, [group], tuning) for group in groups)
        result[name] = {
            "us": taken * 1e6,
            "parts us": parts * 1e6,
            "ratio": taken / parts,
            "ratio to the same rows in launches of their own": taken / apart,
        }
    return result


def selection(pool: KVPool, tuning: Tuning) -> dict[str, float]:
    """Microseconds: a refresh layer of 32 draft rows × 32768 with scores and top-k, beyond its attention; and the pieces."""
    result: dict[str, float] = {}
    rows, length, k = 32, 32768, 256
    group = [Rows(RowKind.DRAFT, rows, length, 1, 16)]
    out = torch.zeros(rows, k, dtype=torch.int32, device="cuda")
    counts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    lengths = torch.full((rows,), length, dtype=torch.int32, device="cuda")

    def choose(plan: TritonPlan, layer: int) -> None:
        top_k(plan.scores[layer], lengths, k, n_sinks=4, n_recent=32, out=out, counts=counts)

    batch = make_batch(group, pool, length, weighted=True)
    backend = make_backend(pool, batch, length, tuning=tuning, refresh_layers=range(4))
    plan = backend.plan(batch)
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    backend.attend(plan, 0, q, torch.empty_like(q))
    result["normalising scores, 32x32768, alone"] = seconds(lambda: backend._score(batch, 0), 10) * 1e6
    plain = attention_seconds(pool, group, tuning, refresh=True)
    scored = attention_seconds(pool, group, tuning, refresh=True, weighted=True)
    chosen = attention_seconds(pool, group, tuning, refresh=True, weighted=True, after=choose)
    result["refresh layer, attention alone"] = plain * 1e6
    result["scores beyond attention"] = (scored - plain) * 1e6
    result["scores and top-k beyond attention"] = (chosen - plain) * 1e6
    for rows, length, k in ((32, 32768, 256), (32, 32768, 2048), (64, 8192, 512), (8, 131072, 2048)):
        scores = torch.rand(rows, length, device="cuda") ** 8 / length
        lengths_all = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        out = torch.zeros(rows, k, dtype=torch.int32, device="cuda")
        counts = torch.zeros(rows, dtype=torch.int32, device="cuda")

        def ours(scores=scores, lengths=lengths_all, k=k, out=out, counts=counts) -> None:
            top_k(scores, lengths, k, out=out, counts=counts)

        def theirs(scores=scores, k=k) -> None:
            scores.topk(k, sorted=False)

        ours()
        assert torch.equal(out.long().sort(1).values, scores.topk(k).indices.sort(1).values), "top-k is wrong"
        result[f"top-{k} of {rows}x{length}"] = seconds(ours, 10) * 1e6
        result[f"torch.topk {k} of {rows}x{length}"] = seconds(theirs, 10) * 1e6
    for width in (256, 1024):
        a = torch.arange(width, dtype=torch.int32, device="cuda").expand(36, 64, -1).contiguous() * 3
        b = torch.arange(width, dtype=torch.int32, device="cuda").expand(1, 64, -1).contiguous() * 2
        a_len = torch.full((36, 64), width, dtype=torch.int32, device="cuda")
        merged = torch.zeros(36, 64, 2 * width, dtype=torch.int32, device="cuda")
        merged_len = torch.zeros(36, 64, dtype=torch.int32, device="cuda")
        slots = torch.arange(64, dtype=torch.int32, device="cuda")
        source, limits = (
            torch.zeros(36, dtype=torch.int32, device="cuda"),
            torch.full((64,), 2**30, device="cuda").int(),
        )

        def merge(
            a=a, b=b, a_len=a_len, merged=merged, merged_len=merged_len, slots=slots, source=source, limits=limits
        ) -> None:
            merge_sets(a, a_len, b, a_len[:1], source, slots, limits, out=merged, out_lengths=merged_len)

        result[f"merge {width}+{width}, 36 layers x 64 rows"] = seconds(merge, 10) * 1e6
    batch = make_batch([Rows(RowKind.VERIFY, 64, 8192, 8)], pool, 8192)
    many = KVPool(36, KV_HEADS, DIM, 1, PAGE, torch.bfloat16, torch.device("cuda"))
    backend = TritonBackend(
        many, num_heads=HEADS, scale=1.0, windows=[None] * 36, max_tokens=512, max_rows=64, max_len=8192, tuning=tuning
    )
    batch = replace(batch, set_lengths=torch.zeros(36, 64, dtype=torch.int32, device="cuda"))
    result["plan, 36 layers x 64 rows of 8"] = seconds(lambda: backend.plan(batch) and None, 10) * 1e6
    batch = make_batch([Rows(RowKind.VERIFY, 64, 8192, 8)], pool, 8192)
    backend = make_backend(pool, batch, 8192, tuning=tuning)
    backend.plan(batch)
    k = torch.randn(512, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    result["store 512 tokens"] = seconds(lambda: backend.store(0, k, k), 10) * 1e6
    return result


def warm(name: str) -> None:
    """Compile a version's kernels into Triton's cache, so that versions compile side by side."""
    pool = KVPool(2, KV_HEADS, DIM, 1024, PAGE, torch.bfloat16, torch.device("cuda"))
    for tensor in (*pool.k, *pool.v):
        tensor.normal_()
    check(pool, VERSIONS[name.removesuffix(" deterministic")], name.endswith(" deterministic"))


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
    report: dict = {
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

    pool = KVPool(4, KV_HEADS, DIM, 17000, PAGE, torch.bfloat16, torch.device("cuda"))
    for tensor in (*pool.k, *pool.v):
        tensor.normal_()
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
        attempt(("errors", name), lambda tuning=tuning: check(pool, tuning))
        attempt(("TB_s", name), lambda tuning=tuning, i=i: cells(pool, tuning, quick=i > 0))
        if i == 0:
            attempt(("mixes",), lambda tuning=tuning, name=name: mixes(pool, tuning, report["TB_s"][name]["64x8192"]))
            attempt(("selection_us",), lambda tuning=tuning: selection(pool, tuning))
            attempt(("scored_32x16384",), lambda tuning=tuning: scored_cells(pool, tuning))
            attempt(("deterministic_errors",), lambda tuning=tuning: check(pool, tuning, deterministic=True))
            attempt(("deterministic_same_bits",), lambda: same_bits(pool))
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
