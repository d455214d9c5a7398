"""Every Triton kernel once, at small ragged shapes: what compute-sanitizer is run on.

Usage: python benchmarks/sanitize.py            first alone: it compiles the kernels into Triton's cache, and checks the results
       PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python3 benchmarks/sanitize.py
       PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 9 python3 benchmarks/sanitize.py
(without torch's caching every tensor is an allocation of its own, so that a read past its end is seen), or --tool synccheck.
With words behind it, only the cases whose names have one of them.
On a CPU it runs under TRITON_INTERPRET=1.

Pages and positions that no row owns hold NaN, so that a finite output says that nothing else was read.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from aspire_llm.attention.triton.backend import TritonBackend, Tuning
from aspire_llm.attention.triton.read import SPAN, read
from aspire_llm.attention.triton.top_k import merge_sets, top_k, top_k_stored
from aspire_llm.bench.replay import ReplaySampler
from aspire_llm.engine.slot_ops import StepRows, gather, settle
from aspire_llm.engine.slots import SlotState
from aspire_llm.models.kernels import TritonOps
from aspire_llm.models.ops import LayerCache
from aspire_llm.models.stream import StreamOps
from aspire_llm.policy.trace import Draft, Trace
from aspire_llm.request import RowKind, SamplingParams
from aspire_llm.sampling.batch import SampleBatch, SampleOutput
from aspire_llm.sampling.sampler import DraftSampling, Sampler
from triton_oracle import RowSpec, make_scene

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter has no bfloat16
PREFILL, DRAFT, VERIFY = RowKind.PREFILL, RowKind.DRAFT, RowKind.VERIFY


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def ends(n: int) -> tuple[float, ...]:
    """Score weights of a verification of n tokens: its first and last."""
    return (1.0,) if n == 1 else (0.5, *([0.0] * (n - 2)), 0.5)


SPARSE = [
    RowSpec(DRAFT, 40, 1, 37, (0, 1, 5, 15, 16, 36), (1.0,)),
    RowSpec(DRAFT, 200, 1, 190, tuple(range(0, 189, 3)), (1.0,)),
    RowSpec(DRAFT, 3, 1, 0, (), (1.0,)),  # the tail is everything
    RowSpec(DRAFT, 70, 2, 68, (0, 9, 67), (0.5, 0.5)),
]
DENSE = [
    RowSpec(VERIFY, start, n, weights=ends(n))
    for start, n in ((0, 1), (63, 1), (64, 1), (130, 5), (90, 8), (250, 17), (20, 33))
]
MIXED = [*SPARSE, *DENSE, RowSpec(VERIFY, 0, 0), RowSpec(PREFILL, 0, 37), RowSpec(PREFILL, 65, 70)]
UNSCORED = [RowSpec(s.kind, s.start, s.num_tokens, s.tail_start, s.set_positions) for s in MIXED]
PROMPT = RowSpec(PREFILL, 10, 25, weights=(0.0,) * 20 + (0.2,) * 5)  # the last queries of a prompt


def attention(
    rows: list[RowSpec], *, heads: int = 8, kv_heads: int = 2, dim: int = 64, page: int = 64, layers: int = 1, dtype: torch.dtype = HALF,
    **options: Any,
) -> None:  # fmt: skip
    scene = make_scene(
        rows, num_heads=heads, kv_heads=kv_heads, dim=dim, page_size=page, num_layers=layers, padding=3, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "num_heads": heads, "scale": scene.scale, "windows": [None] * layers, "max_tokens": scene.q.shape[0] + 2,
        "max_rows": len(rows) + 2, "max_len": scene.batch.page_table.shape[1] * page,
        "tuning": Tuning(block_n=64 if dim <= 128 else 32, programs=24) if GPU else Tuning(block_n=16, programs=8),
    }  # fmt: skip
    backend = TritonBackend(scene.pool, **{**settings, **options})
    plan = backend.plan(scene.batch)
    outs = [backend.run(plan, layer, scene.q, scene.k, scene.v) for layer in range(layers)]
    assert all(bool(out.float().isfinite().all()) for out in outs), "an output is not finite"
    if scene.batch.scored_rows and backend.score_layers | backend.refresh_layers:
        rows_there = torch.tensor(scene.batch.scored_rows, device=DEVICE)
        lengths = [rows[row].start + rows[row].num_tokens for row in scene.batch.scored_rows]
        for layer in sorted(backend.score_layers & backend.refresh_layers):
            scores = plan.scores_of((layer,), rows_there, max(lengths))[0]
            sums = torch.stack([row[:n].sum() for row, n in zip(scores, lengths, strict=True)])
            assert bool(((sums - 1).abs() < 0.02).all()), f"scores of layer {layer} do not add up to 1: {sums.tolist()}"


def top_k_of(lengths: list[int], k: int, longest: int) -> None:
    scores = torch.rand(len(lengths), longest, device=DEVICE)
    out = torch.full((len(lengths), k), -1, dtype=torch.int32, device=DEVICE)
    counts = torch.full((len(lengths),), -1, dtype=torch.int32, device=DEVICE)
    top_k(
        scores,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        k,
        n_sinks=4,
        n_recent=16,
        out=out,
        counts=counts,
    )
    assert counts.tolist() == [min(k, n) for n in lengths]


def stored_top_k(longest: int) -> None:
    """As a step of the engine has it: rows and layers of what attention left, into slots."""
    scores = torch.rand(3, 5, longest + 3, device=DEVICE)
    layers, rows, slots = (torch.tensor(x, device=DEVICE) for x in ([2, 0], [4, 1, 3], [6, 0, 5]))
    lengths = torch.tensor([longest, 1, longest // 2], device=DEVICE)
    out = torch.full((2, 7, 40), -1, dtype=torch.int32, device=DEVICE)
    counts, tails = (torch.zeros(*shape, dtype=torch.int32, device=DEVICE) for shape in ((2, 7), (7,)))
    top_k_stored(
        scores, layers, rows, longest, lengths, 32, n_sinks=2, n_recent=3,
        out=out, counts=counts, out_layers=torch.tensor([1, 0], device=DEVICE), slots=slots, tails=tails,
    )  # fmt: skip
    assert tails[slots].tolist() == lengths.tolist()
    assert counts[:, slots].tolist() == [[32, 1, 32]] * 2
    best = out[1, 6, :32].sort().values  # of layer 2, row 4
    ranked = scores[2, 4, :longest].clone()
    ranked[:2], ranked[-3:] = 2.0, 2.0
    assert torch.equal(best.long(), ranked.topk(32).indices.sort().values)


def reading() -> None:
    numbers = torch.ones(2 * SPAN + 9, dtype=torch.int32, device=DEVICE)
    assert int(read(numbers).sum()) == 2 * SPAN


def merged() -> None:
    def ascending(*shape: int) -> torch.Tensor:
        return torch.rand(*shape[:-1], 300, device=DEVICE).topk(shape[-1], dim=-1).indices.sort(dim=-1).values.int()

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    first, second = ascending(3, 4, 100), ascending(1, 4, 60)
    out = torch.full((3, 4, 160), -1, dtype=torch.int32, device=DEVICE)
    out_lengths = torch.zeros(3, 4, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([[100, 0, 17, 99]] * 3, dtype=torch.int32, device=DEVICE)
    merge_sets(
        first, lengths, second, ints(60, 60, 0, 1).view(1, 4), ints(0, 0, 0), ints(0, 2, 3), ints(300, 300, 200, 7),
        out=out, out_lengths=out_lengths,
    )  # fmt: skip
    assert int(out_lengths.max()) <= 160


def element_wise(ops: TritonOps, tokens: int, width: int, heads: int, num_q: int, dim: int) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(HALF)

    ops.add_norm(draw(tokens, width), None, draw(width), 1e-6)
    ops.add_norm(draw(tokens, width), draw(tokens, width), draw(width), 1e-6)
    wide = draw(tokens, heads + 2, dim)  # queries and keys are part of a wider matrix
    ops.norm_rope(
        wide[:, :heads], num_q, draw(dim), draw(dim), draw(tokens, 1, dim // 2), draw(tokens, 1, dim // 2), 1e-6
    )
    ops.norm_rope(wide[:, :heads], num_q, None, None, draw(tokens, 1, dim // 2), draw(tokens, 1, dim // 2), 1e-6)
    num_kv = heads - num_q
    stored = LayerCache(
        draw(num_kv, tokens, dim), draw(num_kv, tokens, dim), torch.arange(tokens, device=DEVICE).flip(0) - 1, 1.0, 1.0
    )  # fmt: skip
    qkv, angle = draw(tokens, heads + num_kv, dim), draw(tokens, 1, dim // 2)
    ops.norm_rope_store(qkv, num_q, draw(dim), draw(dim), angle, angle, 1e-6, stored)
    out = ops.silu_mul(draw(tokens, 2 * width))
    assert bool(out.float().isfinite().all())


def deterministic_products() -> None:
    from aspire_llm.models.deterministic import DeterministicOps

    ops = DeterministicOps(torch.device(DEVICE))
    shapes = ((1, 200, 96), (17, 256, 704), (130, 64, 2048)) if GPU else ((1, 40, 96), (5, 64, 160))
    for tokens, rows, columns in shapes:
        x, weight = (torch.randn(n, columns, device=DEVICE).to(HALF) for n in (tokens, rows))
        for bias in (None, torch.randn(rows, device=DEVICE).to(HALF)):
            assert bool(ops.linear(x, weight, bias).float().isfinite().all())


def streamed_products() -> None:
    ops = StreamOps(8)
    for tokens in (1, 17, 50):
        x, wide = torch.randn(tokens, 256, device=DEVICE).to(HALF), torch.randn(tokens, 128, device=DEVICE).to(HALF)
        delta = ops.delta(x, torch.randn(128, 256, device=DEVICE).to(HALF))
        assert delta.dim() == 3  # parts of the sum: it was streamed
        normed, _ = ops.add_norm(wide, delta, torch.randn(128, device=DEVICE).to(HALF), 1e-6)
        gated = ops.gated(x, torch.randn(256, 256, device=DEVICE).to(HALF))
        assert bool(normed.float().isfinite().all() & gated.float().isfinite().all())


def slot_arithmetic() -> None:
    """A step of a draft, a verification and a prompt's end, and two padding rows in the last slot."""
    state = SlotState(4, 100, 4, 16, torch.device(DEVICE))
    state.on_kernels = True
    state.computed[:3], state.pending[:3] = 9, 2
    kinds = ints(DRAFT, VERIFY, *[PREFILL] * 3)
    rows = StepRows(ints(0, 1, 2, 4, 4), kinds, ints(0, 0, 5, 0, 0), ints(0, 1, 4, 40, 40, 40))
    gathered = gather(state, rows, 44)
    assert gathered.positions[:5].tolist() == [11, 9, 10, 11, 5]
    tokens = torch.ones(3, 3, dtype=torch.int64, device=DEVICE)
    emitted = torch.tensor([1, 3, 1], device=DEVICE)
    settle(state, rows, ints(0, 1, 2), SampleOutput(tokens, emitted, torch.zeros(3, device=DEVICE)))
    assert (state.computed[:3].tolist(), state.pending[:3].tolist()) == ([9, 12, 41], [3, 0, 0])


def sampling(mode: DraftSampling) -> None:
    """Greedy and sampled rows: a draft of each request, then its verification."""
    vocab_size = 5000 if GPU else 70
    sampler = Sampler(3, vocab_size, DEVICE, mode, max_draft_tokens=4)
    sampler.on_kernels = True
    for slot, parameters in enumerate(({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9})):
        sampler.admit(slot, SamplingParams(**parameters), slot, [1])
    history = torch.zeros(3, 40, dtype=torch.int64, device=DEVICE)
    for kind, count in ((DRAFT, 1), (VERIFY, 2)):
        places = torch.arange(10, 10 + count, device=DEVICE)
        logits = torch.randn(3 * count, vocab_size, device=DEVICE).to(HALF)
        out = sampler.run(SampleBatch((kind,) * 3, (0, 1, 2), (count,) * 3, logits, places.repeat(3), history))
        history[:, 11] = out.tokens[:, 0]
        assert bool((out.tokens < vocab_size).all() & (out.num_emitted >= 1).all() & out.confidence.isfinite().all())


def by_row() -> None:
    """A step's end as a graph holds it: a greedy draft, a sampled verification, a row of padding."""
    vocab_size = 5000 if GPU else 70
    sampler = Sampler(2, vocab_size, DEVICE, "coupled", max_draft_tokens=4)
    sampler.on_kernels = True
    for slot, temperature in enumerate((0.0, 0.8)):
        sampler.admit(slot, SamplingParams(temperature=temperature), slot, [1])
    history = torch.zeros(3, 40, dtype=torch.int64, device=DEVICE)
    places = torch.tensor([11, 9, 10, 11, 0, 0], device=DEVICE)
    logits = torch.randn(6, vocab_size, device=DEVICE).to(HALF)
    out = sampler.run_rows(ints(0, 1, 2), ints(DRAFT, VERIFY, PREFILL), ints(0, 1, 4, 4), logits, places, history)
    assert bool((out.tokens[:2] < vocab_size).all() & (out.num_emitted[:2] >= 1).all())


def replayed() -> None:
    draft = Draft(2, (0.5,) * 4)
    sampler = ReplaySampler(Trace("t", "window", 0, 4, ((draft, draft),)), 2, torch.device(DEVICE))
    for slot in range(2):
        sampler.admit(slot, SamplingParams(), slot, [1] * 9)
    history = torch.zeros(2, 40, dtype=torch.int64, device=DEVICE)
    places = torch.tensor([11, 9, 10, 11], device=DEVICE)
    sampler.run(SampleBatch((DRAFT, VERIFY), (0, 1), (1, 3), torch.randn(4, 70, device=DEVICE), places, history))


def cases() -> dict[str, Callable[[], None]]:
    both: dict[str, Any] = {"layers": 2, "refresh_layers": [0], "score_layers": [0, 1]}
    found: dict[str, Callable[[], None]] = {
        "attention, every kind of row": lambda: attention(UNSCORED),
        "attention, scored": lambda: attention(MIXED, **both),
        "attention, drafts scored alone": lambda: attention(SPARSE, **both),
        "attention, verifications scored alone": lambda: attention(DENSE, **both),
        "attention, prompt scored": lambda: attention([*DENSE[:2], PROMPT], max_scored_tokens=5, **both),
        "attention, windows": lambda: attention(UNSCORED, layers=2, windows=[8, 100]),
        "attention, 128 wide, groups of 4": lambda: attention(MIXED, heads=8, kv_heads=2, dim=128, **both),
        "attention, group of 7": lambda: attention(MIXED, heads=7, kv_heads=1, **both),
        "attention, deterministic": lambda: attention(UNSCORED, deterministic=True),
        "attention, pages of 16": lambda: attention(UNSCORED, page=16),
        "top-k, one chunk": lambda: top_k_of([0, 1, 20, 500, 999], 128, 1000),
        "top-k, several chunks": lambda: top_k_of([30000, 9000, 1] if GPU else [9000], 256, 30000 if GPU else 9000),
        "top-k, of stored scores": lambda: stored_top_k(1000),
        "top-k, of stored scores, several chunks": lambda: stored_top_k(30000 if GPU else 9000),
        "reading": reading,
        "union of sets": merged,
        "element-wise": lambda: element_wise(TritonOps(), 5, 320, 12, 9, 64),
        "element-wise, 96 wide heads": lambda: element_wise(TritonOps(), 3, 200, 5, 4, 96),
        "deterministic products": deterministic_products,
        "streamed products": streamed_products,
        "slot arithmetic": slot_arithmetic,
        **{f"sampling, {mode}": partial(sampling, mode) for mode in get_args(DraftSampling)},
        "sampling, by row": by_row,
        "replayed decisions": replayed,
    }  # fmt: skip
    if GPU:
        found |= {
            "attention, 96 wide": lambda: attention(UNSCORED, dim=96),
            "attention, 256 wide": lambda: attention(UNSCORED, dim=256),
            "attention, fp8 cache": lambda: attention(UNSCORED, dtype=torch.float8_e4m3fn),
        }
    return found


def main() -> int:
    failed = 0
    for name, case in cases().items():
        if sys.argv[1:] and not any(part in name for part in sys.argv[1:]):
            continue
        began = time.perf_counter()
        try:
            case()
            if GPU:
                torch.cuda.synchronize()
            outcome = "ran"
        except Exception as error:  # the other kernels are still worth checking
            traceback.print_exc()
            failed += 1
            outcome = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(f"{name:40} {time.perf_counter() - began:6.1f} s  {outcome}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
