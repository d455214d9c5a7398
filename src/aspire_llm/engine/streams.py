"""Outputs on their way from the engine's thread to readers on event loops: only what is new goes over, once a step."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from aspire_llm.engine.outputs import request_metrics
from aspire_llm.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)

OutputKind = Literal["cumulative", "delta", "final_only"]
"""What a reader gets, as in vLLM: all there is so far; what is new since its last output (continuations without news are
left out); or all of it, once, at the end. Metrics of a delta may be a quarter of a second old; those of the last one are not."""

METRICS_SECONDS = 0.25  # they cost more than all else in a delta, which comes with every step
WAKES = 8  # readers woken in one turn of the event loop: so many at most stand before whatever else runs there


@dataclass(frozen=True, slots=True)
class News:
    """What a step brought the continuations of one prompt."""

    pieces: list[CompletionOutput]  # new text and tokens of those that changed
    metrics: RequestMetrics | None  # None: those told before will do
    finished: bool  # all of them are
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first token


@dataclass(slots=True)
class _Growing:
    """Pieces of one continuation, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, piece: CompletionOutput) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or ()
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class OutputStream:
    """The outputs of one prompt for one reader. `collect` is for the engine's thread, everything else for the reader's loop.

    Holds what the reader has not taken yet, so that one that stops reading costs no more than its output.
    """

    def __init__(
        self,
        name: str,
        prompt: str | None,
        requests: Sequence[Request],
        kind: OutputKind,
        loop: asyncio.AbstractEventLoop,
        deliveries: Deliveries,
    ) -> None:
        self.name = name
        self.requests = requests
        self.loop = loop
        self.deliveries = deliveries
        self._prompt = prompt
        self._kind = kind
        self._places = {request.key: i for i, request in enumerate(requests)}
        self._num_sent = [0] * len(requests)  # tokens, of each continuation: the engine's thread alone counts
        self._told_prompt = False  # its log-probabilities have been sent
        self._wants_logprobs = requests[0].params.logprobs is not None
        self._kept = {i: _Growing() for i in range(len(requests))} if kind != "delta" else {}
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._metrics: RequestMetrics | None = None  # the newest, for the reader
        self._metrics_due = 0.0  # when the engine's thread tells them next
        self._newest: News | None = None  # not taken yet
        self._ready = asyncio.Event()

    # ---- on the engine's thread

    def collect(self, changed: Iterable[Request]) -> News | None:
        """What is new of these requests. Costs as much as is new, not as there is."""
        finished = all(request.finished for request in self.requests)
        if self._kind == "final_only":
            if not finished:
                return None
            changed = self.requests
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        first = self.requests[0]
        if not self._told_prompt and first.params.prompt_logprobs is not None and (first.output_token_ids or finished):
            self._told_prompt = True
            prompt_logprobs = [None, *first.prompt_logprobs]  # nothing comes before the first token of a prompt
        return News(
            pieces=[self._piece(request) for request in changed],
            metrics=self._new_metrics(finished),
            finished=finished,
            error=next((request.error for request in self.requests if request.error is not None), None),
            prompt_logprobs=prompt_logprobs,
        )

    def _new_metrics(self, finished: bool) -> RequestMetrics | None:
        now = time.monotonic()
        if self._kind == "delta" and not finished and now < self._metrics_due:
            return None
        self._metrics_due = now + METRICS_SECONDS
        return request_metrics(self.requests)

    def _piece(self, request: Request) -> CompletionOutput:
        index = self._places[request.key]
        sent = self._num_sent[index]
        self._num_sent[index] = len(request.output_token_ids)
        return CompletionOutput(
            index=index,
            text=request.stream.new_text() if request.stream is not None else "",
            token_ids=request.output_token_ids[sent:],
            logprobs=request.logprobs[sent:] if self._wants_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

    # ---- on the reader's loop

    def put(self, news: News) -> bool:
        """Keep news until the reader takes it. True: there was none before, so the reader is to be woken."""
        for piece in news.pieces:
            self._kept.setdefault(piece.index, _Growing()).add(piece)
        if news.prompt_logprobs is not None:
            self._prompt_logprobs = news.prompt_logprobs
        if news.metrics is not None:
            self._metrics = news.metrics
        was_empty, self._newest = self._newest is None, news
        return was_empty

    def wake(self) -> None:
        if self._newest is not None:
            self._ready.set()

    async def get(self) -> RequestOutput:
        """The next output, as `kind` says; waits for news."""
        await self._ready.wait()
        self._ready.clear()
        news, self._newest = self._newest, None
        assert news is not None
        kept = sorted(self._kept.items())
        if self._kind == "delta":
            self._kept = {}
        return RequestOutput(
            request_id=self.name,
            prompt=self._prompt,
            prompt_token_ids=self.requests[0].prompt_token_ids,  # never changes, and may be long
            outputs=[self._output(index, growing) for index, growing in kept],
            finished=news.finished,
            prompt_logprobs=self._prompt_logprobs,
            metrics=self._metrics,
            error=news.error,
        )

    def _output(self, index: int, growing: _Growing) -> CompletionOutput:
        copy = self._kind == "cumulative"  # it grows on; else the reader's alone
        token_ids, logprobs = growing.token_ids, growing.logprobs
        return CompletionOutput(
            index=index,
            text=growing.text,
            token_ids=list(token_ids) if copy else token_ids,
            logprobs=(list(logprobs) if copy else logprobs) if self._wants_logprobs else None,
            finish_reason=growing.finish_reason,
            stop_reason=growing.stop_reason,
        )


class Deliveries:
    """Takes what a step brought to the readers of one event loop, and wakes them a few at a time."""

    def __init__(self) -> None:
        self._sleepers: deque[OutputStream] = deque()
        self._is_waking = False

    def put(self, batch: Sequence[tuple[OutputStream, News]]) -> None:
        """On the event loop."""
        self._sleepers.extend(stream for stream, news in batch if stream.put(news))
        if not self._is_waking:
            self._wake()

    def _wake(self) -> None:
        for _ in range(min(WAKES, len(self._sleepers))):
            self._sleepers.popleft().wake()
        self._is_waking = bool(self._sleepers)
        if self._is_waking:
            asyncio.get_running_loop().call_soon(self._wake)
