"""The report of a start-up: what calibration found, and on a GPU how near that is to what the device can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from aspire_llm.cache.pool import KVPool
from aspire_llm.models.decoder import Decoder
from aspire_llm.policy.cost import CostModel

READ_BYTES = 2 << 30  # that are read to measure the bandwidth, where the pool is so large; far beyond any cache
LEAST_READ_BYTES = 256 << 20
PRODUCT_SIZE = 4096  # of the square product that measures the rate of operations
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    read_bytes_per_s: float  # of a kernel that does nothing else
    operations_per_s: float  # of a large product, in the model's type


def measure_ceilings(pool: KVPool, dtype: torch.dtype) -> Ceilings | None:
    """Of the pool's GPU, in about 20 ms: keys are read, whatever they are. None on a CPU, and where the pool fits into caches."""
    device = pool.k[0].device
    keys = pool.k[: -(-READ_BYTES // pool.k[0].nbytes)]
    size = sum(layer.nbytes for layer in keys)
    if device.type != "cuda" or size < LEAST_READ_BYTES:
        return None
    from aspire_llm.attention.triton.read import read  # there is no GPU engine without Triton

    def seconds(call: Callable[[], object]) -> float:
        call()
        found: list[float] = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            call()  # what is timed is queued behind it, so that the device does not wait for the host
            begin.record()
            call()
            end.record()
            end.synchronize()
            found.append(float(begin.elapsed_time(end)) / 1e3)
        return median(found)

    try:
        a, b = (torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=dtype, device=device) for _ in range(2))
        with torch.cuda.device(device):
            reading, product = seconds(lambda: [read(layer) for layer in keys]), seconds(lambda: a @ b)
    except torch.cuda.OutOfMemoryError:  # 100 MB: an engine that fits but for this report is welcome
        return None
    return Ceilings(size / reading, 2 * PRODUCT_SIZE**3 / product)


def startup_report(cost: CostModel, decoder: Decoder, pool: KVPool, ceilings: Ceilings | None) -> tuple[str, ...]:
    """Lines for the log: the cost model's terms, and the least that each could be."""
    terms = (
        f"calibrated: {shown(cost.fixed)} a step, {shown(cost.per_token)} a token, {shown(cost.per_kv)} a KV token and "
        f"{shown(cost.per_check)} more a checked one, {shown(cost.verify_step)} where drafts are verified"
    )
    if ceilings is None:
        return (terms,)
    parameters = step_parameters(decoder)
    weights = sum(p.numel() * p.element_size() for p in parameters)
    operations = 2 * sum(p.numel() for p in parameters)
    kv_bytes = decoder.config.kv_bytes_per_token(pool.dtype)
    bandwidth, rate = ceilings.read_bytes_per_s, ceilings.operations_per_s
    floors = (
        f"roofline: reads {bandwidth / 1e12:.3g} TB/s, products {rate / 1e12:.3g} TFLOP/s; so at least "
        f"{shown(weights / bandwidth)} for {weights / 1e9:.3g} GB of weights, {shown(operations / rate)} for the "
        f"{operations / 1e9:.3g} GFLOP of a token, {shown(kv_bytes / bandwidth)} for a KV token's {kv_bytes / 1e3:.3g} kB"
    )
    reached = (
        f"reached: {weights / bandwidth / cost.fixed:.0%} of that reading weights, {kv_bytes / bandwidth / cost.per_kv:.0%} "
        f"reading K and V, {kv_bytes / bandwidth / (cost.per_kv + cost.per_check):.0%} in verifications of drafts"
        if min(cost.fixed, cost.per_kv) > 0.0
        else "reached: not known, a term of the calibration is 0"
    )
    return terms, floors, reached


def shown(seconds: float) -> str:
    """In the largest unit of which there is one; three digits."""
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e3, "ms"), (1e6, "us")) if seconds * s >= 1.0), (1e9, "ns"))
    return f"{seconds * scale:.3g} {unit}"


def step_parameters(decoder: Decoder) -> list[torch.Tensor]:
    """What a step of any size reads whole: all but an embedding that is not the head too."""
    return [p for name, p in decoder.named_parameters() if name != "embedding" or decoder.head is decoder.embedding]
