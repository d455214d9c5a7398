"""What an acceptance is worth: accepted tokens per unit of cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aspire_llm.policy.cost import CostModel, ReadModel


@dataclass(frozen=True, slots=True)
class Efficiency:
    """At the fixed draft length that is best. speedup: tokens per second over those of plain decoding."""

    draft_length: int
    accepted_length: float  # at that length, the verification's own token counted
    tokens_per_s: float  # of one request in the batch
    speedup: float


def efficiency(
    survival: Sequence[float], cost: CostModel, reads: ReadModel, length: int, batch_size: int
) -> Efficiency:
    """survival [K]: probability that the first k + 1 drafts are right. length: tokens of context.

    A cycle of g drafts makes 1 + survival[0] + … + survival[g - 1] tokens and costs a request of a batch

        g · (fixed / B + per_token) + fixed / B + (g + 1) · per_token + per_kv · KV tokens read + per_check · length;

    plain decoding costs fixed / B + per_token + per_kv · length a token. g = 0 is among the choices. What a step pays once for
    its verifications is left out: who shares it depends on the policy.
    """
    fixed = cost.fixed / batch_size
    per_token = cost.per_token * max(0.0, 1.0 - cost.free_tokens / (2 * batch_size))  # as policies charge it
    plain = fixed + per_token + cost.per_kv * reads.verify(length)
    best = Efficiency(0, 1.0, 1.0 / plain, 1.0)
    tokens, drafts = 1.0, 0.0
    for g, alive in enumerate(survival, 1):
        tokens += alive
        drafts += fixed + per_token + cost.per_kv * reads.draft(length + g, g)
        read = reads.verify(length + g + 1)
        verify = fixed + (g + 1) * per_token + (cost.per_kv + cost.per_check) * read
        rate = tokens / (drafts + verify)
        if rate > best.tokens_per_s:
            best = Efficiency(g, tokens, rate, rate * plain)
    return best
