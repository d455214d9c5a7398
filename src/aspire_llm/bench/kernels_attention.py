"""Attention over a paged cache, and what turns its scores into context sets, as cases to be timed.

One body goes through every layer of the pool, so that a cache far larger than the device's own holds nothing for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from aspire_llm.bench.kernels_batch import BackendName, Rows, make_backend, make_batch
from aspire_llm.bench.kernels_shape import Shape
from aspire_llm.bench.kernels_timing import Case
from aspire_llm.cache.pool import KVPool
from aspire_llm.context.ranking import forced_counts, top_positions

SHORT_CALLS = 10
AfterLayer = Callable[[Any, int], None]  # (plan, layer): what follows a layer's attention


def attention_case(
    name: str,
    backend_name: BackendName,
    shape: Shape,
    pool: KVPool,
    groups: Sequence[Rows],
    *,
    group: str = "attention",
    only_kernel: bool = False,
    weighted: bool = False,
    refresh: bool = False,
    after: AfterLayer | None = None,
    **options: Any,
) -> Case:
    """One layer: the kernel and its combination, scores if weighted, and what follows them.

    refresh: DRAFT rows read everything. only_kernel: Triton, without the combination of split rows. The reference stores
    the step's K and V too, which its backend does not do apart. options: of the backend.
    """
    page = pool.page_size
    max_len = -(-max(rows.length for rows in groups) // page) * page
    batch = make_batch(groups, pool, max_len, weighted=weighted)
    layers = range(len(pool.k))
    backend = make_backend(
        backend_name, shape, pool, batch, max_len, refresh_layers=layers if refresh else (),
        score_layers=layers if weighted else (), **options,
    )  # fmt: skip
    plan = backend.plan(batch)
    tokens, device = batch.positions.shape[0], pool.k[0].device
    q = torch.randn(tokens, shape.num_heads, shape.head_dim, device=device, dtype=shape.dtype)
    k = torch.randn(tokens, shape.num_kv_heads, shape.head_dim, device=device, dtype=shape.dtype)
    out = torch.empty_like(q)
    if backend_name == "triton":
        plan.layers_run.extend(layers)

    def body() -> None:
        for layer in layers:
            if backend_name == "reference":
                backend.run(plan, layer, q, k, k)
            elif only_kernel:
                backend._attend(batch, layer, q, out, weighted)
            else:
                backend.attend(plan, layer, q, out)
            if after is not None:
                after(plan, layer)

    return Case(
        name,
        group,
        bytes=sum(rows.kv_bytes(shape, dense=refresh) for rows in groups) + 2 * q.nbytes,
        flops=sum(rows.flops(shape, dense=refresh) for rows in groups),
        body=body,
        calls=len(pool.k),
    )


def top_k_case(
    name: str,
    backend_name: BackendName,
    num_rows: int,
    length: int,
    k: int,
    device: torch.device,
    *,
    forced: bool = True,
) -> Case:
    """The k best of each row's scores. forced: sinks and recent positions are always among them."""
    sinks, recent = forced_counts(k) if forced else (0, 0)
    scores = torch.rand(num_rows, length, device=device) ** 8 / length
    lengths = torch.full((num_rows,), length, dtype=torch.int32, device=device)
    moved = scores.nbytes + num_rows * k * 4
    if backend_name == "reference":
        case = Case(name, "selection", moved, 0, lambda: top_positions(scores, lengths, k, sinks=sinks, recent=recent))
        return repeated(case, device)
    from aspire_llm.attention.triton.top_k import top_k

    out = torch.zeros(num_rows, k, dtype=torch.int32, device=device)
    counts = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def ours() -> None:
        top_k(scores, lengths, k, n_sinks=sinks, n_recent=recent, out=out, counts=counts)

    return repeated(Case(name, "selection", moved, 0, ours), device)


def merge_case(name: str, width: int, num_layers: int, num_slots: int, device: torch.device) -> Case:
    """Triton: the union of two lists of `width` positions for every layer and slot."""
    from aspire_llm.attention.triton.top_k import merge_sets

    first = torch.arange(width, dtype=torch.int32, device=device).expand(num_layers, num_slots, -1).contiguous() * 3
    second = torch.arange(width, dtype=torch.int32, device=device).expand(1, num_slots, -1).contiguous() * 2
    lengths = torch.full((num_layers, num_slots), width, dtype=torch.int32, device=device)
    out = torch.zeros(num_layers, num_slots, 2 * width, dtype=torch.int32, device=device)
    out_lengths = torch.zeros(num_layers, num_slots, dtype=torch.int32, device=device)
    slots = torch.arange(num_slots, dtype=torch.int32, device=device)
    source = torch.zeros(num_layers, dtype=torch.int32, device=device)
    limits = torch.full((num_slots,), 2**30, dtype=torch.int32, device=device)

    def body() -> None:
        merge_sets(
            first, lengths, second, lengths[:1], source, slots, limits, out=out, out_lengths=out_lengths
        )  # fmt: skip

    return repeated(Case(name, "selection", first.nbytes + second.nbytes + out.nbytes, 0, body), device)


def plan_case(
    name: str, backend_name: BackendName, shape: Shape, pool: KVPool, rows: Rows, num_layers: int, **options: Any
) -> Case:
    """Work lists of every layer of a step."""
    device, page = pool.k[0].device, pool.page_size
    max_len = -(-rows.length // page) * page
    batch = make_batch([rows], pool, max_len)
    deep = KVPool(num_layers, shape.num_kv_heads, shape.head_dim, 1, page, shape.dtype, device)
    lengths = torch.zeros(num_layers, rows.count, dtype=torch.int32, device=device)
    sets = batch.sets[:1].expand(num_layers, -1, -1)
    batch = replace(batch, set_lengths=lengths, sets=sets)
    backend = make_backend(backend_name, shape, deep, batch, max_len, **options)
    moved = batch.row_offsets.nbytes + batch.slots.nbytes + batch.starts.nbytes + batch.positions.nbytes
    on_host = backend_name == "reference"
    case = Case(name, "plan", moved + lengths.nbytes, 0, lambda: backend.plan(batch), capture=not on_host)
    return repeated(case, device)


def store_case(name: str, backend_name: BackendName, shape: Shape, pool: KVPool, rows: Rows, **options: Any) -> Case:
    """K and V of a step written into the cache."""
    page = pool.page_size
    max_len = -(-rows.length // page) * page
    batch = make_batch([rows], pool, max_len)
    backend = make_backend(backend_name, shape, pool, batch, max_len, **options)
    plan = backend.plan(batch)
    k = torch.randn(
        batch.positions.shape[0], shape.num_kv_heads, shape.head_dim, device=pool.k[0].device, dtype=shape.dtype
    )

    def body() -> None:
        if backend_name == "reference":
            pool.write(0, plan.write_places, k, k)
        else:
            backend.store(0, k, k)

    return repeated(Case(name, "store", 4 * k.nbytes, 0, body), k.device)  # K and V read, and written


def repeated(case: Case, device: torch.device) -> Case:
    """For kernels shorter than a launch: several calls in one body, so that they can be told apart from the launch of a graph.
    They find their inputs in the device's cache. On a CPU `timings` repeats what is short."""
    calls = SHORT_CALLS if device.type == "cuda" else 1

    def body() -> None:
        for _ in range(calls):
            case.body()

    return replace(case, body=body, calls=calls, footprint=case.bytes)
