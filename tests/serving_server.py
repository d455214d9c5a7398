"""A real server on loopback, in this process, over a tiny model that reads bytes: for tests."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aspire_llm import AsyncLLM
from aspire_llm.models.load import LoadedModel
from aspire_llm.serving.app import create_app
from aspire_llm.serving.server import Server, listen
from aspire_llm.serving.settings import make_settings
from tiny import FixedCost, tiny_model

NAME = "tiny"
END = "<end>"
# Qwen's and Hermes' form, short
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> <tool_call>{}</tool_call>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'user' and m['content'] == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m['role'] }}> {{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}<think>{% endif %}{% endif %}"
)


def byte_chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([END, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    made.chat_template = TEMPLATE
    return made


def served_model(**changes: Any) -> LoadedModel:
    model = tiny_model(**{"vocab_size": 257, "eos": (0,), "max_position_embeddings": 2048, **changes})
    return replace(model, tokenizer=byte_chat_tokenizer())


def engine(model: LoadedModel, **options: Any) -> AsyncLLM:
    settings: dict[str, Any] = {
        "loaded": model,
        "cost": FixedCost(1.0, 0.01, 0.05),
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "kv_cache_memory": 8 << 20,
        "method": "sparsespec",  # drafts whatever it costs here
    }
    if "method" not in options:
        settings |= {"budget": 32, "draft_tokens": 4}
    return AsyncLLM(NAME, **{**settings, **options})


@dataclass(frozen=True)
class Served:
    url: str
    port: int
    app: FastAPI
    llm: AsyncLLM
    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    def assert_idle(self, seconds: float = 60.0) -> None:
        """Nothing runs, waits, or holds pages, places or ids, soon."""
        state = self.app.state.server
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (
            state.running or state.places_taken or self.llm.engine.has_work or self.llm._running
        ):
            time.sleep(0.02)
        assert not state.running
        assert state.places_taken == 0
        assert not self.llm._running
        assert not self.llm.engine.has_work
        self.llm.engine.check()


@contextmanager
def served(llm: AsyncLLM, monitor: Any = None, *, send_buffer: int | None = None, **settings: Any) -> Iterator[Served]:
    """Leaves nothing behind, and checks that."""
    made = make_settings(**{"port": 0, "served_model_name": NAME, "log_level": "warning", **settings})
    app = create_app(llm, made, monitor)
    listener = listen(made)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = Server(app, made)
    started: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        started.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="server")
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = listener.getsockname()[1]
        yield Served(f"http://127.0.0.1:{port}", port, app, llm, server, started[0])
    finally:
        server.should_exit = True
        thread.join(60)
        app.state.server.close()
        assert not thread.is_alive()


def raw_request(port: int, data: bytes, seconds: float = 10.0) -> bytes:
    """Send bytes as they are; all that comes back until the server closes or is silent for so long."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(data)
        received = b""
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except TimeoutError:
            pass
        except ConnectionResetError:
            pass
    return received
