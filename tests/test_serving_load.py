"""Many clients at once, a third of which go away: nothing leaks and probes are answered. And requests made of the server's
own description: none breaks it."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import psutil

from aspire_llm.serving.live import LiveMonitor
from serving_server import Served, engine, served, served_model

STREAMS = 500
SECONDS = 6.0
T = TypeVar("T")


class Load:
    """Clients that ask again until the time is over. A third of them leave in the middle."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.ended: Counter[str] = Counter()
        self.health: list[tuple[int, float]] = []  # status and seconds

    async def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        probe = asyncio.create_task(self._probe())
        await asyncio.gather(*(self._client(i, deadline) for i in range(STREAMS)))
        probe.cancel()

    async def _client(self, index: int, deadline: float) -> None:
        chance = random.Random(index)
        while time.monotonic() < deadline:
            leaves_after = chance.randint(0, 6) if chance.random() < 1 / 3 else None
            self.ended[await self._request(chance, leaves_after)] += 1

    async def _request(self, chance: random.Random, leaves_after: int | None) -> str:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "x" * chance.randint(1, 40)}],
                **{"stream": True, "max_tokens": chance.randint(1, 12), "n": chance.choice([1, 1, 1, 2])},
                "temperature": chance.choice([0.5, 1.0]),
            }
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            lines = 0
            last = b""
            while line := (await reader.readline()):
                last = line.strip() or last
                lines += line.startswith(b"data: ")
                if leaves_after is not None and lines >= leaves_after:
                    return "left"
            return "done" if last in (b"data: [DONE]", b"0") else f"broken {last!r}"
        finally:
            writer.close()

    async def _probe(self) -> None:
        while True:
            started = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            self.health.append((int(answer.split()[1]), time.monotonic() - started))
            await asyncio.sleep(0.1)


def on_loop(server: Served, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, server.loop).result(120)


async def tasks() -> int:
    return len(asyncio.all_tasks())


def test_five_hundred_streams_a_third_of_them_dropped() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    process = psutil.Process()
    llm = engine(served_model(), max_num_seqs=64, kv_cache_memory=16 << 20, max_num_batched_tokens=1024)
    monitor = LiveMonitor()
    with served(llm, monitor) as server:
        asyncio.run(Load(server.port).run(0.5))
        server.assert_idle(120)
        before = (process.num_fds(), threading.active_count(), on_loop(server, tasks()))
        memory = process.memory_info().rss
        load = Load(server.port)
        asyncio.run(load.run(SECONDS))
        server.assert_idle(120)
        deadline = time.monotonic() + 60
        while server.server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        after = (process.num_fds(), threading.active_count(), on_loop(server, tasks()))
        assert all(late <= early for early, late in zip(before, after, strict=True)), (before, after)
        assert set(load.ended) == {"done", "left"}, load.ended
        assert load.ended["left"] > STREAMS // 10
        assert [status for status, _ in load.health] == [200] * len(load.health)
        assert llm.engine.scheduler.pages.num_free == llm.engine.scheduler.pages.num_pages
        steps = llm.engine.scheduler._num_steps
        started = process.cpu_times()
        time.sleep(0.5)
        assert llm.engine.scheduler._num_steps == steps  # idle is idle
        used = process.cpu_times()
        slowest = sorted(seconds for _, seconds in load.health)
        print(
            f"{dict(load.ended)}; /health {len(slowest)} times, median {slowest[len(slowest) // 2] * 1e3:.0f} ms, most "
            f"{slowest[-1] * 1e3:.0f} ms; memory {(process.memory_info().rss - memory) / 2**20:+.1f} MiB; idle CPU "
            f"{(used.user + used.system - started.user - started.system) / 0.5:.1%}"
        )
    llm.shutdown()


def test_schemathesis_finds_no_server_error(tmp_path: Path) -> None:
    """Valid and invalid requests made of the OpenAPI document."""
    llm = engine(served_model(), max_model_len=64, max_num_seqs=16)
    with served(llm, max_queue=16) as server:
        done = subprocess.run(
            [
                *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json"),
                *("--checks", "not_a_server_error", "--max-examples", "12", "--phases", "examples,coverage,fuzzing"),
                *("--mode", "all", "--seed", "1", "--workers", "1", "--request-timeout", "20", "--no-color"),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        with server.http as client:
            assert client.get("/health").status_code == 200
            counted = [line for line in client.get("/metrics").text.splitlines() if "http_requests_total{" in line]
        statuses = {line.split('status="')[1][0] for line in counted}
        assert statuses == {"2", "4"}, counted  # some were valid, some were not, none broke anything
        assert any('path="/v1/chat/completions",status="200"' in line for line in counted)
        server.assert_idle()
    llm.shutdown()
