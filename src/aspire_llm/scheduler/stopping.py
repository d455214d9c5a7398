"""When a request ends: checked token by token, so that an accepted run is cut at its earliest stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aspire_llm.request import Request


@dataclass(frozen=True, slots=True)
class Stop:
    reason: Literal["stop", "length"]
    detail: int | str | None = None  # the stop token or stop string; None for EOS and length, as in vLLM


def find_stop(request: Request, token: int, output_limit: int) -> Stop | None:
    """Whether `token`, just appended to the output, ends the request. Also extends its text.

    A stop string cuts the text; the tokens that made it stay in the token ids, as in vLLM.
    """
    params = request.params
    long_enough = len(request.output_token_ids) >= params.min_tokens
    stop: Stop | None = None
    if long_enough and not params.ignore_eos and token in request.eos_token_ids:
        stop = Stop("stop")
    elif long_enough and token in params.stop_token_ids:
        stop = Stop("stop", token)
    if request.stream is not None:
        matched = request.stream.push(token, ends=stop is not None, may_stop=long_enough)
        if matched is not None:
            stop = Stop("stop", matched)
    if stop is None and len(request.output_token_ids) >= output_limit:
        stop = Stop("length")
    return stop
