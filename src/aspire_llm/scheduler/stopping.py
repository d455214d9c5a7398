"""When a request ends: checked token by token, so that an accepted run is cut at its earliest stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aspire_llm.request import Request


@dataclass(frozen=True, slots=True)
class Stop:
    reason: Literal["stop", "length"]
    detail: int | str | None = None  # the stop token or stop string; None for EOS and length, as in vLLM


def extend_output(request: Request, token_ids: Sequence[int]) -> tuple[int, Stop | None]:
    """Append `token_ids` to the request's output and text up to the first that ends it; how many that were, and why it ends.

    A stop string cuts the text; the tokens that made it stay in the token ids, as in vLLM.
    """
    params, stream, output = request.params, request.stream, request.output_token_ids
    eos = frozenset() if params.ignore_eos else request.eos_token_ids
    stop_token_ids, min_tokens = params.stop_token_ids, params.min_tokens
    before = len(output)
    if (
        (stream is None or not stream.seeks_stops)
        and eos.isdisjoint(token_ids)
        and not _any_of(stop_token_ids, token_ids)
    ):
        # Nothing but the length can end it: all at once.
        kept = token_ids[: request.output_limit - before]
        output.extend(kept)
        if stream is not None:
            stream.extend(kept)
        return len(kept), Stop("length") if len(output) >= request.output_limit else None
    for num_tokens, token in enumerate(token_ids, before + 1):
        output.append(token)
        long_enough = num_tokens >= min_tokens
        stop: Stop | None = None
        if long_enough and token in eos:
            stop = Stop("stop")
        elif long_enough and token in stop_token_ids:
            stop = Stop("stop", token)
        if stream is not None:
            matched = stream.push(token, ends=stop is not None, may_stop=long_enough)
            if matched is not None:
                stop = Stop("stop", matched)
        if stop is None and num_tokens >= request.output_limit:
            stop = Stop("length")
        if stop is not None:
            return num_tokens - before, stop
    return len(token_ids), None


def _any_of(sought: Sequence[int], token_ids: Sequence[int]) -> bool:
    return bool(sought) and not set(sought).isdisjoint(token_ids)
