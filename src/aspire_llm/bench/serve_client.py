"""One request to an OpenAI server, timed, and what became of it: nothing raises, everything is counted."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from aspire_llm.bench.serve_stream import Answer, EventDecoder, StreamError, error_message

OK = "ok"
# what may become of a request besides, and `http STATUS`
FAULTS: Mapping[str, str] = {
    "no connection": "the server could not be reached",
    "no answer": "the connection ended before any text",
    "timeout": "not finished within --request-timeout",
    "error event": "an error object in the middle of a stream",
    "truncated": "the stream broke off without a finish_reason",
    "malformed": "events that are not JSON or not of OpenAI's form",
    "not a stream": "an answer in one piece where a stream was asked for",
    "empty": "a whole answer without any text",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times in seconds; starts are counted from the beginning of the run. None: did not happen, or was not told."""

    index: int
    kind: str  # OK, a key of FAULTS, or `http STATUS`
    detail: str  # of a fault
    start: float
    end: float
    waited: float  # from the time it was due to when it was sent
    ttft: float | None  # to the first text
    itl: tuple[float, ...]  # from each chunk of text to the next, however many tokens it holds
    text: str
    prompt_tokens: int | None
    output_tokens: int  # as the server counts them; where it does not: chunks of text
    tokens_counted: bool  # the server counted
    finish_reason: str | None
    speculation: dict[str, Any] | None  # metrics.speculative_decoding of the answer

    @property
    def ok(self) -> bool:
        return self.kind == OK

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first text; None of a single token."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


async def ask(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    *,
    index: int,
    began: float,
    due: float,
    timeout_s: float,
) -> Outcome:
    """Send one request and read its stream to the end. began: of the run; due: when it was to be sent; both on
    time.perf_counter."""
    answer = Answer()
    kind, detail = OK, ""
    start = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            async with client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    kind, detail = f"http {response.status_code}", _said(await response.aread())
                elif "text/event-stream" not in response.headers.get("content-type", ""):
                    kind = "not a stream"
                    detail = f"content type {response.headers.get('content-type', 'none')}"
                else:
                    decoder = EventDecoder()
                    async for piece in response.aiter_bytes():
                        now = time.perf_counter()
                        for data in decoder.feed(piece):
                            answer.add(data, now)
    except TimeoutError:
        kind, detail = "timeout", f"after {timeout_s:g} s"
    except StreamError as fault:
        kind, detail = fault.kind, str(fault)
    except UnicodeDecodeError:
        kind, detail = "malformed", "not UTF-8"
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        kind, detail = "no connection", f"{type(error).__name__}: {error}"
    except httpx.HTTPError as error:  # the connection broke
        kind, detail = ("truncated" if answer.text_times else "no answer"), f"{type(error).__name__}: {error}"
    ended = time.perf_counter()
    if kind == OK and not answer.complete:
        kind, detail = "truncated", f"{len(answer.text_times)} chunks, no finish_reason"
    elif kind == OK and not answer.text_times:
        kind, detail = "empty", f"finish_reason {answer.finish_reason}"
    if kind == OK:  # what a server says after the last word (usage, [DONE]) is not waited for by a reader
        ended = max(answer.text_times[-1], answer.finished_at or 0.0)
    times = answer.text_times
    return Outcome(
        index=index,
        kind=kind,
        detail=" ".join(detail.split())[:200],
        start=start - began,
        end=ended - began,
        waited=max(0.0, start - due),
        ttft=times[0] - start if times else None,
        itl=tuple(b - a for a, b in itertools.pairwise(times)),
        text=answer.text,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.completion_tokens if answer.completion_tokens is not None else len(times),
        tokens_counted=answer.completion_tokens is not None,
        finish_reason=answer.finish_reason,
        speculation=answer.speculation,
    )


def _said(content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    try:
        return error_message(json.loads(text))
    except ValueError:
        return " ".join(text.split())[:200]
