"""A client that measures an OpenAI server under load: completions or chat, streamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from aspire_llm.bench import environment
from aspire_llm.bench.datasets import Dataset
from aspire_llm.bench.serve_client import OK, Outcome
from aspire_llm.bench.serve_figures import figures
from aspire_llm.bench.serve_load import Load, send_all
from aspire_llm.bench.serve_prompts import choose_prompts
from aspire_llm.bench.serve_server import ask_facts, counted_speculation, differences, read_counters, root_of
from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.errors import UserError

OnProgress = Callable[[str, int, int], None]  # (stage, requests ended, of how many)


@dataclass(frozen=True, slots=True)
class ServeRun:
    """What to ask of which server. model: None for the only one served. count: requests, None for the dataset's own
    number. inputs: the model's tokenizer, None to send rows as they are. goodput: targets in seconds."""

    base_url: str
    model: str | None
    dataset: Dataset
    load: Load
    inputs: InputProcessor | None = None
    endpoint: str | None = None
    count: int | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0
    warm_ups: int = 1
    api_key: str | None = None
    goodput: Mapping[str, float] | None = None


async def run_serve(run: ServeRun, command: str, started: str, on_progress: OnProgress) -> dict[str, Any]:
    """Send every request and report them all. started: the time, ISO 8601.

    Raises UserError where there is no server, or the dataset does not fit."""
    headers = {"Authorization": f"Bearer {run.api_key}"} if run.api_key is not None else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=root_of(run.base_url), headers=headers, limits=limits, timeout=httpx.Timeout(None, connect=30)
    ) as client:
        facts = await ask_facts(client, run.model)
        room = facts.max_model_len - run.max_tokens if facts.max_model_len is not None else None
        if room is not None and room < 1:
            raise UserError(f"--max-tokens {run.max_tokens}: the server's context is {facts.max_model_len} tokens")
        prompts = choose_prompts(run.dataset, run.inputs, run.count, endpoint=run.endpoint, room=room, seed=run.seed)
        bodies = [_body(run, facts.model, content) for content in prompts.contents]
        warm_ups = [bodies[i % len(bodies)] for i in range(run.warm_ups)]
        on_progress("warming up", 0, len(warm_ups))
        one_by_one = Load(None, 1, run.load.timeout_s)
        warmed = await send_all(client, prompts.endpoint, warm_ups, one_by_one)
        before = await read_counters(client)
        ended: list[Outcome] = []

        def on_end(outcome: Outcome) -> None:
            ended.append(outcome)
            on_progress("requests", len(ended), len(bodies))

        on_progress("requests", 0, len(bodies))
        outcomes = await send_all(client, prompts.endpoint, bodies, run.load, on_end)
        after = await read_counters(client)
    split, split_into = _splitter(run.inputs)
    change = differences(before, after)
    return {
        "kind": "serve",
        "replayed": False,
        "environment": environment.report(command, started),
        "server": {"base_url": _without_user(run.base_url), "endpoint": prompts.endpoint, **asdict(facts)},
        "workload": {
            "dataset": run.dataset.name,
            "format": run.dataset.format,
            "requests": len(bodies),
            "max_tokens": run.max_tokens,
            "ignore_eos": run.ignore_eos,
            "temperature": run.temperature,
            "seed": run.seed,
            "skipped": prompts.skipped,
        },
        "load": {
            "request_rate": run.load.request_rate,  # null: all at once
            "max_concurrency": run.load.max_concurrency,  # null: any number
            "request_timeout": run.load.timeout_s,
        },
        "warm_ups": {"requests": len(warmed), "ok": sum(outcome.kind == OK for outcome in warmed)},
        **figures(outcomes, run.goodput, split),
        "distinct_of": split_into,
        "counters": change,  # the server's, over the run, all its clients included
        "counted_speculation": counted_speculation(change),
    }


def _body(run: ServeRun, model: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Only what the run asks for: servers refuse fields they do not know."""
    body: dict[str, Any] = {
        "model": model,
        **content,
        "max_tokens": run.max_tokens,
        "temperature": run.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if run.ignore_eos:
        body["ignore_eos"] = True
    if run.temperature > 0:
        body["seed"] = run.seed
    return body


def _splitter(inputs: InputProcessor | None) -> tuple[Callable[[str], Sequence[Any]], str]:
    if inputs is None or inputs.tokenizer is None:
        return str.split, "words"
    tokenizer = inputs.tokenizer
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]), "tokens"


def _without_user(url: str) -> str:
    """A URL may hold a password, which no result file needs."""
    return str(httpx.URL(url).copy_with(userinfo=b""))
