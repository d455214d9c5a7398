"""Log-probabilities in the shapes of completions and of chats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from aspire_llm.request import TokenLogprobs
from aspire_llm.sampling.detokenize import TokenBytes

LEAST = -9999.0  # stands for minus infinity, which JSON does not have


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


class TokenText:
    """Tokens as text."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table

    def raw(self, token_id: int) -> bytes:
        return self._table[token_id]

    def text(self, token_id: int) -> str:
        return self.raw(token_id).decode("utf-8", "replace")

    def unique(self, token_id: int) -> str:
        """As OpenAI's completions write it: pieces of a character as "bytes:…", so that they stay apart."""
        raw = self.raw(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokens: TokenText, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokens.text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokens.raw(token_id)),
        }

    content = [
        {**entry(at.token_id, at.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in at.top]}
        for at in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: TokenText, positions: Sequence[TokenLogprobs | None], token_ids: Sequence[int], start: int
) -> dict[str, Any]:
    """positions: of each of token_ids; None for the first token of a prompt. start: characters before the first."""
    offsets = []
    for token_id in token_ids:
        offsets.append(start)
        start += len(tokens.text(token_id))
    return {
        "text_offset": offsets,
        "tokens": [tokens.unique(token_id) for token_id in token_ids],
        "token_logprobs": [finite(at.logprob) if at is not None else None for at in positions],
        "top_logprobs": [_top(tokens, at) if at is not None else None for at in positions],
    }


def _top(tokens: TokenText, at: TokenLogprobs) -> dict[str, float]:
    top = {tokens.unique(token): finite(logprob) for token, logprob in at.top}
    return {**top, tokens.unique(at.token_id): finite(at.logprob)}


def prompt_logprobs(
    tokens: TokenText, positions: Sequence[TokenLogprobs | None] | None
) -> list[dict[str, Any] | None] | None:
    """As vLLM gives them: at each position token id -> {logprob, rank, decoded_token}."""
    if positions is None:
        return None
    made: list[dict[str, Any] | None] = []
    for at in positions:
        if at is None:
            made.append(None)
            continue
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(at.top, start=1)}
        ranked[at.token_id] = (at.logprob, at.rank)
        made.append(
            {
                str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokens.text(token)}
                for token, (logprob, rank) in ranked.items()
            }
        )
    return made
