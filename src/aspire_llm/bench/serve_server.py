"""What a server says of itself: its models, its version, its counters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from aspire_llm.bench.serve_stream import error_message
from aspire_llm.errors import UserError

SAMPLE = re.compile(r'^([A-Za-z_:][\w:]*)(\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?\s+(\S+)')
POSITION = re.compile(r'position="(\d+)"')
DRAFTS, DRAFT_TOKENS, ACCEPTED = (
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
)
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
COUNTERS = (
    *(DRAFTS, DRAFT_TOKENS, ACCEPTED, PER_POSITION),
    *("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions"),
    *("vllm:prompt_tokens", "vllm:generation_tokens"),
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    model: str
    max_model_len: int | None
    version: str | None


def root_of(base_url: str) -> str:
    """`base_url` without a /v1 at its end, as both forms are in use. Raises UserError."""
    try:
        parts = urlsplit(base_url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"--base-url {base_url!r}: must be a URL such as http://127.0.0.1:8000")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


async def ask_facts(client: httpx.AsyncClient, model: str | None) -> ServerFacts:
    """model: None for the only one that is served. Raises UserError where there is no server, or it wants a key."""
    try:
        response = await client.get("/v1/models", timeout=30)
    except httpx.HTTPError as error:
        raise UserError(f"--base-url {client.base_url}: no server answers there ({type(error).__name__})") from None
    if response.status_code in (401, 403):
        raise UserError(f"--api-key: the server answers {response.status_code} ({_message(response)})")
    served: dict[str, Any] = {}
    body = _json(response)
    for entry in body.get("data", []) if isinstance(body, dict) and isinstance(body.get("data"), list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            served[entry["id"]] = entry
    if model is None:
        if len(served) != 1:
            names = ", ".join(served) if served else f"no list of models (status {response.status_code})"
            raise UserError(f"--model is needed: the server gives {names}")
        model = next(iter(served))
    longest = served.get(model, {}).get("max_model_len")
    return ServerFacts(model, longest if isinstance(longest, int) else None, await _version(client))


async def _version(client: httpx.AsyncClient) -> str | None:
    try:
        body = _json(await client.get("/version", timeout=30))
    except httpx.HTTPError:
        return None
    return str(body["version"]) if isinstance(body, dict) and "version" in body else None


Counters = dict[
    str, dict[int | None, float]
]  # name -> position (None: no such label) -> value, summed over other labels


async def read_counters(client: httpx.AsyncClient) -> Counters | None:
    """The counters of /metrics that mean something here; None where the server has none of them."""
    try:
        response = await client.get("/metrics", timeout=30)
    except httpx.HTTPError:
        return None
    return parse_counters(response.text) if response.status_code == 200 else None


def parse_counters(text: str) -> Counters | None:
    """Of Prometheus' text format."""
    found: Counters = {}
    for line in text.split("\n"):
        match = SAMPLE.match(line)
        if match is None:
            continue
        name = match[1].removesuffix("_total")
        if name not in COUNTERS:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        position = POSITION.search(match[2] or "")
        place = int(position[1]) if position is not None else None
        found.setdefault(name, {})
        found[name][place] = found[name].get(place, 0.0) + value
    return found or None


def differences(before: Counters | None, after: Counters | None) -> dict[str, Any] | None:
    """What was counted between: {name: number}, by position a list. None where either is missing or a counter fell (the
    server began again)."""
    if before is None or after is None:
        return None
    result: dict[str, Any] = {}
    for name, values in after.items():
        change = {place: value - before.get(name, {}).get(place, 0.0) for place, value in values.items()}
        if min(change.values()) < 0:
            return None
        if None in change:
            result[name] = int(change[None])
        else:
            result[name] = [int(change.get(place, 0.0)) for place in range(1 + max(p for p in change if p is not None))]
    return result


def counted_speculation(change: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Speculation by the server's counters, all its clients included; None where it has none."""
    if change is None or any(name not in change for name in (DRAFTS, DRAFT_TOKENS, ACCEPTED)):
        return None
    return speculation_of(change[DRAFTS], change[DRAFT_TOKENS], change[ACCEPTED], change.get(PER_POSITION, []))


def speculation_of(drafts: int, draft_tokens: int, accepted: int, per_position: list[int]) -> dict[str, Any]:
    """Under vLLM's names; the bonus token counts: mean acceptance length = 1 + accepted / drafts."""
    return {
        "num_spec_steps": drafts,
        "num_draft_tokens": draft_tokens,
        "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": 1.0 + accepted / drafts if drafts else None,
        "draft_acceptance_rate": accepted / draft_tokens if draft_tokens else None,
        "acceptance_histogram": per_position,
    }


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _message(response: httpx.Response) -> str:
    body = _json(response)
    return error_message(body) if body is not None else response.text[:100]
