"""How long a kernel takes, and what the device could do: its read bandwidth and its product rate, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

BANDWIDTH_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}  # of the sum that measures it: far beyond any cache
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}  # rows and columns of the product that measures the rate
SMALL_CACHE = 32 << 20  # where the system does not tell the size of its last cache
SHORTEST = 0.01  # seconds of one measurement on the CPU: calls are repeated until it is reached


@dataclass(frozen=True, slots=True)
class Case:
    """Something to be timed. bytes, flops: the least that one call must move and compute. body makes `calls` calls."""

    name: str
    group: str
    bytes: int
    flops: int
    body: Callable[[], object]
    calls: int = 1
    capture: bool = True  # False: the host takes part in every call, so that it cannot be replayed from a graph
    footprint: int = 0  # bytes that the calls of one body touch together; 0: bytes × calls

    @property
    def touched(self) -> int:
        return self.footprint or self.bytes * self.calls


def timings(case: Case, device: torch.device, repeats: int) -> list[float]:
    """Seconds of one call, one entry a repeat. On a GPU from replays of a graph, where the case can be captured."""
    case.body()
    if device.type == "cuda":
        return [seconds / case.calls for seconds in _cuda_timings(case.body, repeats, capture=case.capture)]
    started = time.perf_counter()
    case.body()
    times = max(1, min(1000, int(SHORTEST / max(time.perf_counter() - started, 1e-9))))
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(times):
            case.body()
        found.append((time.perf_counter() - started) / times / case.calls)
    return found


def _cuda_timings(body: Callable[[], object], repeats: int, *, capture: bool) -> list[float]:
    torch.cuda.synchronize()
    run = body
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        run = graph.replay
    run()
    found = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3)
    return found


def read_bandwidths(device: torch.device, repeats: int) -> list[float]:
    """Bytes/s of a large sum: reads only. On a GPU by a kernel of our own, since torch's sum reads slower than attention does
    (3.9 TB/s on an H200)."""
    numbers = torch.ones(BANDWIDTH_BYTES[device.type] // 4, device=device)
    body: Callable[[], object] = numbers.sum
    if device.type == "cuda":
        from aspire_llm.attention.triton.read import read

        body = partial(read, numbers)
    case = Case("sum", "device", numbers.nbytes, 0, body)
    return [case.bytes / seconds for seconds in timings(case, device, repeats)]


def product_rates(device: torch.device, dtype: torch.dtype, repeats: int) -> list[float]:
    """FLOP/s of a large square product."""
    n = PRODUCT_SIZE[device.type]
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    case = Case("product", "device", 3 * a.nbytes, 2 * n**3, lambda: a @ b)
    return [case.flops / seconds for seconds in timings(case, device, repeats)]


def cache_bytes(device: torch.device) -> int:
    """The device's last cache: what fits in it is not read from memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [SMALL_CACHE]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)
