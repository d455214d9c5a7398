"""Log-probabilities of the model's own distribution, before temperature, penalties and masks (vLLM's `raw_logprobs`)."""

from __future__ import annotations

import torch
from torch import Tensor

from aspire_llm.request import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Tensor, top: int) -> list[TokenLogprobs]:
    """One for each row of logits [n, vocabulary] and its token of int64 [n]; waits for the device.

    top: how many of the most likely tokens to list; -1: all. Of equally likely ones the smaller id comes first; rank is
    1 + the number of likelier tokens. For prompt_logprobs give the logits of positions 0 … n - 1 and tokens 1 … n.
    """
    if not len(token_ids):
        return []
    logprobs = (logits.double() - torch.logsumexp(logits.double(), dim=1, keepdim=True)).float()
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(1) + 1
    width = logprobs.shape[1] if top < 0 else min(top, logprobs.shape[1])
    if width == logprobs.shape[1]:
        values, indices = logprobs.sort(dim=1, descending=True, stable=True)
    else:
        values, indices = logprobs.topk(width, dim=1)
    return [
        TokenLogprobs(
            token, logprob, rank, tuple(sorted(zip(ids, best, strict=True), key=lambda pair: (-pair[1], pair[0])))
        )
        for token, logprob, rank, ids, best in zip(
            token_ids.tolist(), chosen[:, 0].tolist(), ranks.tolist(), indices.tolist(), values.tolist(), strict=True
        )
    ]
