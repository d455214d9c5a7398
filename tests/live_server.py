"""A server on loopback around a tiny model, in a thread: for tests that need a real socket and a browser."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from aspire_llm import AsyncLLM, SamplingParams
from aspire_llm.serving.live import LiveMonitor, live_router
from tiny import FixedCost

OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "kv_cache_memory": 4 << 20,
    "budget": 48,
    "cost": FixedCost(0.02, 0.001, 0.05),
}


def chat_app(llm: AsyncLLM, monitor: LiveMonitor) -> FastAPI:
    app = FastAPI()
    app.include_router(live_router(llm, monitor))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "tiny", "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> StreamingResponse:
        async def chunks() -> AsyncIterator[str]:
            sent, output = "", None
            params = SamplingParams(temperature=body["temperature"], max_tokens=body["max_tokens"])
            async for output in llm.chat(body["messages"], params):
                text = output.outputs[0].text
                choice = {"index": 0, "delta": {"content": text[len(sent) :]}, "finish_reason": output.outputs[0].finish_reason}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
                sent = text
            assert output is not None and output.metrics is not None
            usage = {"completion_tokens": len(output.outputs[0].token_ids)}
            metrics = {"speculative_decoding": output.metrics.speculative_decoding}
            yield f"data: {json.dumps({'choices': [], 'usage': usage, 'metrics': metrics})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return app


class LiveServer:
    """`load(n)` keeps n requests running until `load(0)`."""

    def __init__(self, model: Path | str, weak: float = 0.02, **options: Any) -> None:
        self.monitor = LiveMonitor()
        self.llm = AsyncLLM(str(model), on_step=self.monitor.on_step, **(OPTIONS | options))
        for name, weights in self.llm._llm.model.decoder.checkpoint_views().items():
            if "o_proj" in name:
                weights.mul_(weak)  # a model that cares less for its context, so that sparse drafts are often right
        config = uvicorn.Config(
            chat_app(self.llm, self.monitor), host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._clients: list[asyncio.Task[None]] = []
        self._thread.start()
        wait_for(lambda: self._server.started, "the server to start")
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/"

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve()

        asyncio.run(serve())

    def load(self, num_requests: int) -> None:
        async def change() -> None:
            for task in self._clients:
                task.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)
            self._clients = [asyncio.create_task(self._client(i)) for i in range(num_requests)]

        asyncio.run_coroutine_threadsafe(change(), self._loop).result(30)

    async def _client(self, number: int) -> None:
        for again in range(1000):
            prompt = f"{number} " + "tell me more of this, and then of that; " * (1 + (number + again) % 5)
            params = SamplingParams(temperature=0.0 if number % 2 else 0.7, max_tokens=700, seed=again, ignore_eos=True)
            async for _ in self.llm.generate(prompt, params, request_id=f"req-{number}-{again}"):
                pass

    def stop(self) -> None:
        self.load(0)
        self.monitor.close()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server does not end"
        if self.llm.is_running:
            self.llm.shutdown()


def wait_for(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
