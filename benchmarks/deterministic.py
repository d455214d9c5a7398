"""`--deterministic` on one GPU: whether bits depend on the batch, and what that costs.

Usage: python benchmarks/deterministic.py [SECONDS [PART,…]] with parts bits, times, engine, steps, tiles; those after the first
begin only while time is left. JSON goes to $OUT/deterministic.json, or to the folder of results here. On a CPU, with
TRITON_INTERPRET=1, the same on tiny shapes: a trial of the script, as the interpreter's products round by where they stand.

- bits: products of the Qwen3-8B shape, norms and element-wise steps: the rows of a step of 700 tokens against shorter steps,
  other places in the step and other neighbours.
- times: the products against cuBLAS, with weights read from memory.
- engine: a small random model; plain decoding, and speculation of every kind, in other batches and chunks.
- steps: plain decoding at the Qwen3-8B shape with and without.
- tiles: the products with other tiles than the kernel's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from common import GPU, Deadline, Report, cached_prompts, decode_steadily, fill, say
from shapes import SHAPES, model_folder

from aspire_llm import LLM, SamplingParams
from aspire_llm.bench.kernels_timing import Case, timings
from aspire_llm.models.deterministic import DeterministicOps, Tile
from aspire_llm.models.kernels import TritonOps
from aspire_llm.models.ops import Ops

DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
SHAPE = "qwen3-8b" if GPU else "tiny"
COLD_BYTES = 1 << 30 if GPU else 1
COUNTS = (1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 127, 128, 129, 200, 256, 511, 512, 513) if GPU else (1, 5)
LONGEST = 700 if GPU else 9
TIMED = (1, 16, 64, 128, 512) if GPU else (1, 4)
REPEATS = 20 if GPU else 1
CELLS = ((64, 8192), (32, 16384)) if GPU else ((1, 64),)
TILES = {
    "128x64": Tile(tokens=64), "64x128": Tile(rows=64), "256x128": Tile(rows=256, warps=8),
    "128x128, 128 columns": Tile(columns=128), "128x256": Tile(tokens=256, warps=8),
}  # fmt: skip


def product_sizes() -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of the products of a layer, and of the head."""
    shape = SHAPES[SHAPE]
    hidden, wide, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    return {
        "qkv": (queries + 2 * keys, hidden), "o": (hidden, queries), "gate_up": (2 * wide, hidden),
        "down": (hidden, wide), "head": (shape["vocab_size"], hidden),
    }  # fmt: skip


def draw(*size: int, std: float = 1.0) -> torch.Tensor:
    return torch.empty(size, dtype=DTYPE, device=DEVICE).normal_(0.0, std)


def differing(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """Numbers whose bits depend on the step: function of x [T, n] against that of shorter and permuted steps."""
    whole = function(x.clone())
    count = 0
    for tokens in COUNTS:
        for first in (0, 5, len(x) - tokens):
            at = slice(first, first + tokens)
            if first + tokens <= len(x):
                count += int((function(x[at].clone()) != whole[at]).sum())
    order = torch.randperm(len(x), device=DEVICE)
    return count + int((function(x[order]) != whole[order]).sum())


def bits(report: dict[str, Any]) -> None:
    ops = DeterministicOps(DEVICE)
    rows: dict[str, Any] = {}
    for name, (n, k) in product_sizes().items():
        weight, bias = draw(n, k, std=0.02), draw(n)
        x = draw(LONGEST, k)
        exact = F.linear(x[:16].float(), weight[:1024].float())
        error = (ops.linear(x[:16], weight)[:, :1024].float() - exact).norm() / exact.norm()
        rows[name] = {
            "differing": differing(lambda t, w=weight: ops.linear(t, w), x),  # type: ignore[misc]
            "differing_with_bias": differing(lambda t, w=weight, b=bias: ops.linear(t, w, b), x),  # type: ignore[misc]
            "differing_of_cublas": differing(lambda t, w=weight: F.linear(t, w), x),  # type: ignore[misc]
            "relative_error": float(error),
        }
        del weight
        say(f"bits {name:8} {rows[name]}")
    shape = SHAPES[SHAPE]
    heads, dim = shape["num_attention_heads"] + shape["num_key_value_heads"], shape["head_dim"]
    hidden, weight = draw(LONGEST, shape["hidden_size"]), draw(shape["hidden_size"])
    norm, turn = draw(dim), draw(1, 1, dim // 2)

    def norm_rope(x: torch.Tensor) -> torch.Tensor:
        qk = x.view(-1, heads, dim)
        cos = sin = turn.expand(len(x), 1, dim // 2).contiguous()
        return torch.cat(ops.norm_rope(qk, shape["num_attention_heads"], norm, norm, cos, sin, 1e-6), dim=1)

    for name, function, x in (
        ("add and norm", lambda x: ops.add_norm(x, x.clone(), weight, 1e-6)[0], hidden),
        ("norm and rope", norm_rope, draw(LONGEST, heads * dim)),
        ("silu and product", ops.silu_mul, draw(LONGEST, 2 * shape["intermediate_size"])),
    ):
        rows[name] = {"differing": differing(function, x)}  # type: ignore[arg-type]
        say(f"bits {name:8} {rows[name]}")
    report["bits"] = rows


def product_us(ops: Ops, name: str, tokens: int) -> float:
    """Copies of the weight take turns, so that each is read from memory."""
    n, k = product_sizes()[name]
    weights = [draw(n, k, std=0.02) for _ in range(-(-COLD_BYTES // (n * k * DTYPE.itemsize)))]
    x = draw(tokens, k)

    def body() -> None:
        for weight in weights:
            ops.linear(x, weight)

    case = Case(name, "product", weights[0].nbytes, 2 * tokens * n * k, body, calls=len(weights))
    return 1e6 * median(timings(case, DEVICE, REPEATS))


def times(report: dict[str, Any]) -> None:
    report["times_us"] = rows = {}
    for name, (n, k) in product_sizes().items():
        for tokens in TIMED:
            ours = product_us(DeterministicOps(DEVICE), name, tokens)
            theirs = product_us(TritonOps(), name, tokens)  # cuBLAS
            rate = n * k * DTYPE.itemsize / ours / 1e6
            rows[f"{name} {tokens}"] = {"deterministic": ours, "cublas": theirs, "weights_TB_s": rate}
            say(f"times {name:8} {tokens:4} tokens {ours:8.1f} us, cuBLAS {theirs:8.1f}  ({rate:.2f} TB/s of weights)")


def tiles(report: dict[str, Any]) -> None:
    report["tiles_us"] = rows = {}
    n, k = product_sizes()["down"]
    weight, x = draw(n, k, std=0.02), draw(COUNTS[-1], k)
    own = DeterministicOps(DEVICE).linear(x, weight)
    report["bits_of_other_token_tiles"] = {  # 0: the tile's tokens could follow the step's
        label: int((DeterministicOps(DEVICE, TILES[label]).linear(x, weight) != own).sum())
        for label in ("128x64", "128x256")
    }
    say(f"numbers that differ from the own tile's: {report['bits_of_other_token_tiles']}")
    for label, tile in TILES.items():
        for name in ("gate_up", "down", "o"):
            try:
                found = {tokens: product_us(DeterministicOps(DEVICE, tile), name, tokens) for tokens in TIMED}
            except Exception as error:  # a tile may not fit this device
                rows[f"{label} {name}"] = repr(error)
                continue
            rows[f"{label} {name}"] = found
            say(f"tile {label:22} {name:8} " + ", ".join(f"{t}: {us:.1f} us" for t, us in found.items()))


def engine(report: dict[str, Any]) -> None:
    folder = model_folder("small" if GPU else "tiny")
    options: dict[str, Any] = {
        "load_format": "dummy", "max_model_len": 2048 if GPU else 128, "max_num_seqs": 8 if GPU else 2,
        "max_draft_tokens": 8, "kv_cache_memory": "1G" if GPU else "8M", "deterministic": True,
        "attention_backend": "triton",
    }  # fmt: skip
    base = LLM(folder, method="plain", **options)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for name, view in base.model.decoder.checkpoint_views().items():
        if "norm" not in name:
            view.normal_(0.0, 0.06, generator=generator)
    base.reset_prefix_cache()
    lengths = (1, 20, 63, 64, 65, 200, 700, 1500, 33, 900, 128, 1000) if GPU else (3, 20)
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 512, (n,), generator=g).tolist() for n in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=120 if GPU else 5, ignore_eos=True)

    def tokens(**changes: Any) -> tuple[list[list[int]], int, int]:
        outputs = LLM(folder, loaded=base.model, **{**options, **changes}).generate(prompts, params)
        stats = [o.metrics.speculative_decoding for o in outputs]
        counted = [sum(s[f"num_{what}_tokens"] for s in stats) for what in ("draft", "accepted_draft")]
        return [o.outputs[0].token_ids for o in outputs], counted[0], counted[1]

    fp8 = {"kv_cache_dtype": "fp8"}
    runs: dict[str, dict[str, Any]] = {
        "plain": {"method": "plain"},
        "plain, one at a time": {"method": "plain", "max_num_seqs": 1},
        "plain, eager, chunks of 100": {"method": "plain", "enforce_eager": True, "max_num_batched_tokens": 100},
        "aspire": {"method": "aspire", "budget": 128},
        "aspire, staggered": {"method": "aspire", "policy": "staggered", "draft_tokens": 5, "budget": 128},
        "vegas": {"method": "vegas", "budget": 128},
        "magicdec-window": {"method": "magicdec-window", "budget": 128},
        "plain, fp8 cache": {"method": "plain", **fp8},
        "aspire, fp8 cache": {"method": "aspire", "policy": "staggered", "budget": 128, **fp8},
        "aspire, not deterministic": {"method": "aspire", "policy": "staggered", "budget": 128, "deterministic": False},
    }
    if not GPU:
        runs = {name: runs[name] for name in ("plain", "aspire, staggered")}
    found: dict[str, list[list[int]]] = {}
    report["engine"] = rows = {}
    for name, changes in runs.items():
        found[name], drafted, accepted = tokens(**changes)
        expected = found["plain, fp8 cache" if "fp8" in name else "plain"]
        pairs = list(zip(found[name], expected, strict=True))
        rows[name] = {
            "equal": sum(a == b for a, b in pairs), "of": len(pairs), "drafted": drafted, "accepted": accepted,
            "first_difference": [
                next(i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q) for a, b in pairs if a != b
            ],
        }  # fmt: skip
        say(f"engine {name:28} {rows[name]}")


def steps(report: dict[str, Any]) -> None:
    shape = SHAPES[SHAPE]
    token_bytes = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * DTYPE.itemsize
    options: dict[str, Any] = {
        "load_format": "dummy", "method": "plain", "max_num_seqs": max(batch for batch, _ in CELLS),
        "max_model_len": max(length for _, length in CELLS) + 256, "attention_backend": "triton",
        "kv_cache_memory": max(batch * (length + 384) for batch, length in CELLS) * token_bytes,
    }  # fmt: skip
    report["step_ms"] = rows = {}
    loaded = None
    for deterministic in (False, True):
        llm = LLM(model_folder(SHAPE), loaded=loaded, deterministic=deterministic, **options)
        loaded = llm.model
        fill(llm)
        for batch, length in CELLS:
            llm.reset_prefix_cache()
            prompts = cached_prompts(llm, batch, length, batch)
            steady = decode_steadily(llm, prompts, 40 if GPU else 2, skip=8 if GPU else 1, longest=128).row()
            row = rows.setdefault(f"{batch}x{length}", {})
            row["deterministic" if deterministic else "plain"] = steady["step_ms"]
            say(f"steps {batch}x{length} deterministic={deterministic}: {steady['step_ms']:.2f} ms")
        del llm
        if GPU:
            torch.cuda.empty_cache()


def table(report: dict[str, Any]) -> list[str]:
    lines = []
    if "bits" in report:
        wrong = {name: row["differing"] for name, row in report["bits"].items() if row["differing"]}
        lines.append(f"bits that depend on the batch: {wrong or 'none'} (of {', '.join(report['bits'])})")
    for name in product_sizes() if "times_us" in report else ():
        cells = {t: report["times_us"].get(f"{name} {t}") for t in TIMED}
        text = "  ".join(
            f"{t}: {row['deterministic']:.0f}/{row['cublas']:.0f} us ({row['deterministic'] / row['cublas']:.2f})"
            for t, row in cells.items()
            if row
        )
        lines.append(f"{name:8} deterministic/cuBLAS at tokens  {text}")
    for name, row in report.get("engine", {}).items():
        lines.append(f"{name:28} equal {row['equal']}/{row['of']}  drafted {row['drafted']} accepted {row['accepted']}")
    for cell, row in report.get("step_ms", {}).items():
        if len(row) == 2:
            plain, ours = row["plain"], row["deterministic"]
            lines.append(f"step {cell}: {plain:.2f} ms, deterministic {ours:.2f} ms ({ours / plain:.2f}x)")
    if "failed" in report:
        lines.append(f"failed: {report['failed']}")
    return lines


def main() -> None:
    deadline = Deadline(float(sys.argv[1]) if len(sys.argv) > 1 else 85.0)
    parts = {"bits": bits, "engine": engine, "times": times, "steps": steps, "tiles": tiles}
    least = {"bits": 0.0, "engine": 0.0, "times": 5.0, "steps": 25.0, "tiles": 10.0}  # seconds worth beginning with
    wanted = sys.argv[2].split(",") if len(sys.argv) > 2 else list(parts)
    report = Report("deterministic")
    for name in parts:
        if name in wanted and deadline.left >= least[name]:
            with report.part(name):
                parts[name](report.data)
    say("\n" + "\n".join(table(report.data)))


if __name__ == "__main__":
    main()
