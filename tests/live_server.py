"""The real server around a tiny model with a load that a test can turn on and off, and Chromium to look at its page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aspire_llm import SamplingParams
from aspire_llm.engine.engine import Step
from aspire_llm.models.load import LoadedModel
from aspire_llm.serving.live import LiveMonitor
from serving_server import Served, engine, served, served_model
from tiny import FixedCost, always_draft_to

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


def drafting_model() -> LoadedModel:
    """A model that cares little for its context, so that sparse drafts are often right, and often not. It never ends."""
    model = served_model(eos=())
    for name, weights in model.decoder.checkpoint_views().items():
        if "o_proj" in name:
            weights.mul_(0.05)
    return model


class Live:
    """`load(n)` keeps n requests running until `load(0)`. `pace` is slept in every step, on the engine's thread."""

    def __init__(self, monitor: LiveMonitor) -> None:
        self.monitor = monitor
        self.pace = 0.0

    def serve(self, server: Served) -> None:
        self.server = server
        self.url = server.url + "/"
        self._clients: list[asyncio.Task[None]] = []

    def load(self, num_requests: int) -> None:
        async def change() -> None:
            for task in self._clients:
                task.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)
            self._clients = [asyncio.create_task(self._client(i)) for i in range(num_requests)]

        asyncio.run_coroutine_threadsafe(change(), self.server.loop).result(120)

    async def _client(self, number: int) -> None:
        for again in range(1000):
            prompt = f"{number} {again} " * (5 + 7 * ((number + again) % 5))
            tokens = [1 + ord(c) for c in prompt]
            params = SamplingParams(temperature=0.7 * (number % 2), max_tokens=600, seed=again, ignore_eos=True)
            async for _ in self.server.llm.generate(tokens, params, request_id=f"request-{number}-{again}"):
                pass


@contextmanager
def live_server(*, port: int = 0, settings: dict[str, Any] | None = None, **options: Any) -> Iterator[Live]:
    monitor = LiveMonitor()
    live = Live(monitor)

    def on_step(step: Step) -> None:
        monitor.on_step(step)
        time.sleep(live.pace)

    defaults: dict[str, Any] = {"method": "aspire", "draft_tokens": None, "cost": FixedCost(2e-4, 1e-5, 5e-4)}
    llm = engine(drafting_model(), on_step=on_step, **(defaults | options))
    if llm.engine.cost is not None:  # shown on the page; what it says must not decide how soon every kind of row comes
        llm.engine.scheduler.policy = always_draft_to(4)
    try:
        with served(llm, monitor, port=port, shutdown_grace=0, **(settings or {})) as server:
            live.serve(server)
            try:
                yield live
            finally:
                live.load(0)
    finally:
        llm.shutdown()


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser. Fails where there is none: a page that was not looked at is not tested."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("playwright is not installed: run `make test`, which installs it", pytrace=False)
    if not CHROMIUM.exists():
        pytest.fail(f"no Chromium at {CHROMIUM}: run `make test`, which installs it", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
