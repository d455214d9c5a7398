"""How finely to cut the context sets of drafts: attention of draft rows alone, by least blocks of a piece and pieces aimed at.

    PYTHONPATH=src python benchmarks/splits.py [--shape qwen3-8b] [--rows 6,32,64] [--sets 512,2048] [--out FILE.json]

More pieces fill the device better and cost a second pass that adds them up. Microseconds a layer (medians of graph replays
that go through every layer of a pool far larger than L2): of the attention kernel, of it and the pass, and how many pieces a KV head
makes. The table is last. Takes under a minute on a GPU, most of it compiling. Without one, under TRITON_INTERPRET=1, ask for little:
--shape tiny --rows 2 --sets 32 --length 96 --page 16 --programs 2,8 --min-blocks 1,2.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from aspire_llm.attention.triton.backend import Tuning
from aspire_llm.bench.kernels_attention import attention_case
from aspire_llm.bench.kernels_batch import TAIL, Rows, make_backend, make_batch, make_pool
from aspire_llm.bench.kernels_shape import Shape, find_shape
from aspire_llm.bench.kernels_timing import timings
from aspire_llm.cache.pool import KVPool
from aspire_llm.request import RowKind

REPEATS = 11


@dataclass(frozen=True, slots=True)
class Split:
    """One variant's time for one batch of draft rows. Seconds a layer."""

    rows: int
    set_size: int
    programs: int
    min_blocks: int
    pieces: int  # of one KV head, in the whole batch
    kernel_seconds: float
    seconds: float
    bytes: int  # of keys and values


def variants(base: Tuning, programs: Sequence[int], min_blocks: Sequence[int]) -> list[Tuning]:
    return [replace(base, programs=p, min_blocks=least) for p in programs for least in min_blocks]


def measure(shape: Shape, pool: KVPool, rows: Rows, tuning: Tuning, repeats: int = REPEATS) -> Split:
    device = pool.k[0].device
    batch = make_batch([rows], pool, -(-rows.length // pool.page_size) * pool.page_size)
    backend = make_backend("triton", shape, pool, batch, rows.length, tuning=tuning)
    backend.plan(batch)
    whole, kernel = (
        statistics.median(timings(attention_case("", "triton", shape, pool, [rows], tuning=tuning, only_kernel=only), device, repeats))
        for only in (False, True)
    )  # fmt: skip
    return Split(
        rows.count, rows.budget, tuning.programs, tuning.min_blocks, int(backend.num_pieces[0]), kernel, whole, rows.kv_bytes(shape)
    )  # fmt: skip


def lines(splits: Sequence[Split]) -> list[str]:
    """The table: the fastest variant of each batch is marked."""
    found = [
        f"{'rows':>4} {'set':>5} {'programs':>8} {'least':>5} {'pieces':>6} {'kernel us':>9} {'total us':>8} {'TB/s':>5}"
    ]
    for split in splits:
        alike = [s.seconds for s in splits if (s.rows, s.set_size) == (split.rows, split.set_size)]
        found.append(
            f"{split.rows:4} {split.set_size:5} {split.programs:8} {split.min_blocks:5} {split.pieces:6} "
            f"{split.kernel_seconds * 1e6:9.1f} {split.seconds * 1e6:8.1f} {split.bytes / split.seconds / 1e12:5.2f}"
            + (" *" if split.seconds == min(alike) else "")
        )
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", type=numbers, default=[6, 32, 64])
    parser.add_argument("--sets", type=numbers, default=[512, 2048])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--programs", type=numbers, help="pieces aimed at, over all KV heads")
    parser.add_argument("--min-blocks", type=numbers, default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.length < max(args.sets) + TAIL:
        parser.error(f"--length {args.length}: a set of {max(args.sets)} and a tail of {TAIL} do not fit")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = find_shape(args.shape, torch.bfloat16 if device.type == "cuda" else torch.float32)
    base = Tuning.default(shape.head_dim, device)
    programs = args.programs or [base.programs // 2, base.programs]
    pool = make_pool(shape, args.layers, max(args.rows) * -(-args.length // args.page), args.page, device)
    splits = []
    for size in args.sets:
        for count in args.rows:
            rows = Rows(RowKind.DRAFT, count, args.length, 1, size)
            for tuning in variants(base, programs, args.min_blocks):
                splits.append(measure(shape, pool, rows, tuning, args.repeats))
                if args.out:  # kept at once: a lease can end at any time
                    args.out.write_text(json.dumps([asdict(split) for split in splits], indent=1) + "\n")
    print("\n".join(lines(splits)))


if __name__ == "__main__":
    main()
