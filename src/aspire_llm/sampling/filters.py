"""From processed logits to the distribution that is sampled: temperature, min-p, top-k, top-p, in vLLM's order.

Each filter keeps every token at or above a threshold, ties included, so that the result depends neither on the order of
tokens nor on the batch: min-p on the tempered distribution, top-k on what min-p left, top-p on what both left, renormalised.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aspire_llm.request import SamplingParams
from aspire_llm.sampling.rows import Bools, Ints, send, upload


class Filters:
    """Temperature and filters of every slot."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._values = torch.zeros(max_slots, 3, dtype=torch.float64, device=device)  # temperature, log min-p, top-p
        self._top_k: Ints = np.full(max_slots, vocab_size, dtype=np.int64)
        self._has_min_p: Bools = np.zeros(max_slots, dtype=bool)
        self._has_top_p: Bools = np.zeros(max_slots, dtype=bool)
        self.temperature = np.ones(max_slots, dtype=np.float32)  # 1 for greedy requests
        self.no_logits = torch.empty(0, vocab_size, device=device)
        self.needed: Bools = np.zeros(max_slots, dtype=bool)  # whether there is more than a temperature

    def admit(self, slot: int, params: SamplingParams) -> None:
        temperature = 1.0 if params.greedy else params.temperature
        min_p = float(np.log(params.min_p)) if params.min_p > 0 else float("-inf")
        values = torch.tensor([temperature, min_p, params.top_p], dtype=torch.float64)
        self._values[slot] = send(self._device, values)
        self._top_k[slot] = min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        self._has_min_p[slot] = params.min_p > 0
        self._has_top_p[slot] = params.top_p < 1
        self.temperature[slot] = temperature
        filters = self._has_min_p[slot] or self._has_top_p[slot] or self._top_k[slot] < self._vocab_size
        self.needed[slot] = filters and not params.greedy

    def apply(self, logits: Tensor, token_slots: Ints) -> Tensor:
        """logits: [n, vocabulary], of any float type, not changed; token_slots: [n]. Returns float32 logits whose softmax is the
        distribution to sample from; filtered tokens are -inf."""
        (slots,) = upload(self._device, token_slots)
        temperature, min_p, top_p = self._values[slots].unbind(1)
        logits = logits / temperature[:, None].float()
        if self._has_min_p[token_slots].any():
            floor = logits.amax(1, keepdim=True).double() + min_p[:, None]
            logits = logits.masked_fill(logits.double() < floor, float("-inf"))
        top_k = self._top_k[token_slots]
        has_top_k, has_top_p = top_k < self._vocab_size, self._has_top_p[token_slots]
        filtered = has_top_k | has_top_p
        if not filtered.any():
            return logits
        index, sizes = upload(self._device, np.flatnonzero(filtered), top_k[filtered])
        part = logits if filtered.all() else logits[index]
        # With top-k everywhere only the largest k need sorting.
        widest = int(top_k[filtered].max())
        best = (
            part.topk(widest, dim=1).values if widest < self._vocab_size else part.sort(dim=1, descending=True).values
        )
        threshold = best.gather(1, sizes[:, None] - 1)
        part = part.masked_fill(part < threshold, float("-inf"))
        if has_top_p.any():
            best = best.masked_fill(best < threshold, float("-inf"))
            total = torch.logsumexp(part.double(), dim=1, keepdim=True)
            mass = torch.exp(best.double() - total)
            before = mass.cumsum(1) - mass  # of all more likely tokens
            limit = top_p[index][:, None]
            kept = (before < limit).sum(1, keepdim=True).clamp(min=1)  # a prefix, since `before` grows
            lowest = best.gather(1, kept - 1)
            part = part.masked_fill((part < lowest) & (limit < 1), float("-inf"))
        return part if filtered.all() else logits.index_copy(0, index, part)


def top_probability(logits: Tensor) -> Tensor:
    """The largest probability of each row of logits [n, vocabulary]: float32 [n]."""
    return torch.exp(logits.amax(1) - torch.logsumexp(logits, dim=1))
