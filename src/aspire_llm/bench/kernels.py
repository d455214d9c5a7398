"""Every kernel of a decoding step against the roofline of its device.

The floor of a kernel is the longer of two times: its bytes over the read bandwidth of a large sum, and its operations over
the rate of a large product, both measured in the same run, before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from aspire_llm.bench import environment
from aspire_llm.bench.kernels_attention import (
    attention_case,
    merge_case,
    plan_case,
    store_case,
    top_k_case,
)
from aspire_llm.bench.kernels_batch import BackendName, Rows, make_pool
from aspire_llm.bench.kernels_check import CHECKED, SMALL, check, pages_of
from aspire_llm.bench.kernels_model import elementwise_cases, make_ops, product_case, sampler_cases
from aspire_llm.bench.kernels_shape import Shape
from aspire_llm.bench.kernels_timing import Case, cache_bytes, product_rates, read_bandwidths, timings
from aspire_llm.bench.statistics import bootstrap_interval
from aspire_llm.cache.pool import KVPool
from aspire_llm.errors import UserError
from aspire_llm.request import RowKind

GROUPS = ("attention", "mixes", "scores", "selection", "plan", "store", "element-wise", "product", "sampler")
COLD = 4  # a cache's worth of data read so many times over between two uses of the same bytes
D, V, P = RowKind.DRAFT, RowKind.VERIFY, RowKind.PREFILL


@dataclass(frozen=True, slots=True)
class KernelRun:
    """What to measure. cells: (requests, tokens of each). verify_tokens: of VERIFY rows, in order. token_counts: of products
    and element-wise steps."""

    backend: BackendName
    shape_name: str
    shape: Shape
    device: torch.device
    cells: Sequence[tuple[int, int]]
    budget: int
    verify_tokens: Sequence[int] = (1, 8, 17)
    token_counts: Sequence[int] = (1, 16, 64, 160)
    prefill_tokens: int = 512
    page_size: int = 64
    pool_layers: int = 4
    plan_layers: int = 36
    repeats: int = 11
    groups: Sequence[str] = GROUPS

    def __post_init__(self) -> None:
        unknown = [group for group in self.groups if group not in GROUPS]
        if unknown:
            raise UserError(f"--groups: {unknown[0]!r} is unknown; known: {', '.join(GROUPS)}")
        shortest = min(length for _, length in self.cells)
        if self.budget + 32 > shortest:
            raise UserError(
                f"--budget {self.budget}: a cell of {shortest} tokens holds a set of at most {shortest - 32}"
            )
        if max(self.verify_tokens) > shortest:
            raise UserError(f"--verify-tokens {max(self.verify_tokens)}: a cell has {shortest} tokens")


def run_kernels(
    run: KernelRun, command: str, started: str, on_case: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """started: the time, ISO 8601. A kernel that fails is reported with its error, and the others go on. Raises UserError."""
    bandwidths = read_bandwidths(run.device, run.repeats)
    rates = product_rates(run.device, run.shape.dtype, run.repeats)
    makers = [maker for group in run.groups for maker in MAKERS[group](run)]
    kernels, failed = [], []
    pool = _pool(run)
    cache = cache_bytes(run.device)
    for name, make in makers:
        on_case(name)
        try:
            case = make(pool)
            kernels.append(_measured(case, timings(case, run.device, run.repeats), cache))
        except Exception as error:  # out of memory, a kernel that does not compile: whatever it is, the others go on
            failed.append({"name": name, "error": _brief(error)})
    on_case("checking")
    # once more: a device that changed speed meanwhile shows in the interval
    bandwidths += read_bandwidths(run.device, run.repeats)
    rates += product_rates(run.device, run.shape.dtype, run.repeats)
    bandwidth, rate = median(bandwidths), median(rates)
    return {
        "kind": "kernels",
        "environment": environment.report(command, started),
        "backend": run.backend,
        "device": run.device.type,
        "shape": {"name": run.shape_name, **asdict(run.shape), "dtype": str(run.shape.dtype).removeprefix("torch.")},
        "cells": [f"{count}x{length}" for count, length in run.cells],
        "budget": run.budget,
        "read_bytes_per_s": bandwidth,
        "read_bytes_per_s_interval": bootstrap_interval(bandwidths),
        "flops_per_s": rate,
        "flops_per_s_interval": bootstrap_interval(rates),
        "cache_bytes": cache,
        "repeats": run.repeats,
        "kernels": [kernel | _against_roofline(kernel, bandwidth, rate) for kernel in kernels],
        "failed": failed,
        "relative_errors": _errors(run),
    }


def _measured(case: Case, times: list[float], cache: int) -> dict[str, Any]:
    return {
        "name": case.name,
        "group": case.group,
        "bytes": case.bytes,
        "flops": case.flops,
        "seconds": median(times),
        "seconds_interval": bootstrap_interval(times),  # 95 %, over the repeats; null for one
        "in_cache": case.touched < cache,  # its bytes may never leave the cache: memory is no floor
        "host_in_time": not case.capture,
    }


def _against_roofline(kernel: dict[str, Any], bandwidth: float, rate: float) -> dict[str, Any]:
    from_memory, from_products = kernel["bytes"] / bandwidth, kernel["flops"] / rate
    floor = max(from_memory, from_products)
    interval = kernel["seconds_interval"]
    return {
        "floor_seconds": floor,
        "bound": "memory" if from_memory >= from_products else "compute",
        "share_of_roofline": floor / kernel["seconds"],
        "share_interval": (floor / interval[1], floor / interval[0]) if interval is not None else None,
    }


def _errors(run: KernelRun) -> dict[str, float] | str:
    """Of a small batch with every kind of row, against plain float32 attention."""
    groups = CHECKED if run.device.type == "cuda" else SMALL
    pages = pages_of(groups, run.page_size)
    try:
        pool = make_pool(run.shape, 2, pages, run.page_size, run.device)
        return check(run.backend, run.shape, pool, groups)
    except Exception as error:
        return _brief(error)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _pool(run: KernelRun) -> KVPool:
    pages = max(pages_of([Rows(V, count, length)], run.page_size) for count, length in run.cells)
    return make_pool(run.shape, run.pool_layers, pages, run.page_size, run.device)


Maker = tuple[str, Callable[[KVPool], Case]]


def _attention(run: KernelRun) -> Iterator[Maker]:
    for count, length in run.cells:
        cell = f"{count}x{length}"
        groups = {f"verify {n}": Rows(V, count, length, n) for n in run.verify_tokens}
        groups[f"draft {run.budget}"] = Rows(D, count, length, 1, run.budget)
        groups[f"prefill {min(run.prefill_tokens, length)}"] = Rows(P, 1, length, min(run.prefill_tokens, length))
        for name, rows in groups.items():
            yield _attention_maker(run, f"{cell} {name}", [rows], "attention")


def _mixes(run: KernelRun) -> Iterator[Maker]:
    count, length = run.cells[0]
    wide = sorted(run.verify_tokens)[len(run.verify_tokens) // 2]
    most, half = max(1, count * 7 // 8), max(1, count // 2)
    for drafts in dict.fromkeys((most, half)):
        if count - drafts < 1:
            continue
        rows = [Rows(D, drafts, length, 1, run.budget), Rows(V, count - drafts, length, wide)]
        name = f"{count}x{length} {drafts} draft {run.budget}, {count - drafts} verify {wide}"
        yield _attention_maker(run, name, rows, "mixes")


def _scores(run: KernelRun) -> Iterator[Maker]:
    count, length = run.cells[0]
    for n in run.verify_tokens:
        name = f"{count}x{length} verify {n}, scored"
        yield _attention_maker(run, name, [Rows(V, count, length, n)], "scores", weighted=True)
    rows = Rows(D, count, length, 1, min(16, run.budget))
    yield _attention_maker(run, f"{count}x{length} refresh layer", [rows], "scores", refresh=True)
    yield _attention_maker(
        run, f"{count}x{length} refresh layer, scored", [rows], "scores", refresh=True, weighted=True
    )


def _attention_maker(run: KernelRun, name: str, rows: list[Rows], group: str, **options: Any) -> Maker:
    return name, lambda pool: attention_case(name, run.backend, run.shape, pool, rows, group=group, **options)


def _selection(run: KernelRun) -> Iterator[Maker]:
    for count, length in run.cells:
        name = f"top-{run.budget} of {count}x{length}"
        yield (
            name,
            lambda pool, c=count, n=length, name=name: top_k_case(  # type: ignore[misc]
                name, run.backend, c, n, run.budget, run.device
            ),
        )
    if run.backend == "triton":
        count, half = run.cells[0][0], max(1, run.budget // 2)
        merge = f"merge {half}+{half}, {run.plan_layers} layers x {count} rows"
        yield merge, lambda pool: merge_case(merge, half, run.plan_layers, count, run.device)


def _plan(run: KernelRun) -> Iterator[Maker]:
    count, length = run.cells[0]
    name = f"plan, {run.plan_layers} layers x {count} rows of {run.verify_tokens[0]}"
    rows = Rows(V, count, length, run.verify_tokens[0])
    yield name, lambda pool: plan_case(name, run.backend, run.shape, pool, rows, run.plan_layers)


def _store(run: KernelRun) -> Iterator[Maker]:
    count, length = run.cells[0]
    widest = max(run.verify_tokens)
    name = f"store {count * widest} tokens"
    yield name, lambda pool: store_case(name, run.backend, run.shape, pool, Rows(V, count, length, widest))


def _elementwise(run: KernelRun) -> Iterator[Maker]:
    ops = make_ops(run.backend, run.device, run.shape.dtype)
    for tokens in run.token_counts:
        for case in elementwise_cases(ops, run.shape, tokens, run.device):
            yield case.name, lambda pool, case=case: case  # type: ignore[misc]


def _product(run: KernelRun) -> Iterator[Maker]:
    like = torch.empty(0, dtype=run.shape.dtype, device=run.device)
    cold = COLD * cache_bytes(run.device)
    for part, size in run.shape.products.items():
        for tokens in run.token_counts:
            name = f"{part}{' and silu' if part == 'gate_up' else ''} {size[0]}x{size[1]}, {tokens} tokens"
            yield (
                name,
                lambda pool, n=name, p=part, s=size, t=tokens: product_case(  # type: ignore[misc]
                    n, p, make_ops(run.backend, run.device, run.shape.dtype), s, t, like, cold
                ),
            )


def _sampler(run: KernelRun) -> Iterator[Maker]:
    drafts = max(run.verify_tokens) - 1
    rows = max(1, min(run.cells[0][0], 256 // (drafts + 1)))
    for case in sampler_cases(run.shape, rows, drafts, run.device):
        yield case.name, lambda pool, case=case: case  # type: ignore[misc]


MAKERS: dict[str, Callable[[KernelRun], Iterator[Maker]]] = {
    "attention": _attention,
    "mixes": _mixes,
    "scores": _scores,
    "selection": _selection,
    "plan": _plan,
    "store": _store,
    "element-wise": _elementwise,
    "product": _product,
    "sampler": _sampler,
}
