"""When requests are sent: at the arrivals of a Poisson process, with so many under way at once, or both."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx

from aspire_llm.bench.serve_client import Outcome, ask


@dataclass(frozen=True, slots=True)
class Load:
    """request_rate: arrivals a second, None for all at once. max_concurrency: requests under way, None for any number."""

    request_rate: float | None
    max_concurrency: int | None
    timeout_s: float
    seed: int = 0

    def arrivals(self, count: int) -> list[float]:
        """Seconds from the beginning, ascending; the first at 0."""
        if self.request_rate is None:
            return [0.0] * count
        rng = random.Random(self.seed)
        times, now = [], 0.0
        for _ in range(count):
            times.append(now)
            now += rng.expovariate(self.request_rate)
        return times


async def send_all(
    client: httpx.AsyncClient,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    load: Load,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Every body, once; outcomes in their order."""
    places = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency is not None else None
    began = time.perf_counter()

    async def one(index: int, at: float) -> Outcome:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        async with AsyncExitStack() as stack:
            if places is not None:
                await stack.enter_async_context(places)
            outcome = await ask(
                client, path, bodies[index], index=index, began=began, due=began + at, timeout_s=load.timeout_s
            )
        on_end(outcome)
        return outcome

    arrivals = load.arrivals(len(bodies))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index, at)) for index, at in enumerate(arrivals)]
    return [task.result() for task in tasks]
