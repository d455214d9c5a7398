"""Replayed acceptance, for shapes whose weights are not at hand: the engine does all of its work (drafting, scores, top-k,
verifying, rolling back), and only the accept decision and the draft confidence are read from a recorded trace.

Elsewhere this is called synthetic acceptance. Tokens stay the model's own: real drafts, and the verifier's token behind them.
Every result made with it must say "replayed".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aspire_llm.policy.trace import Trace
from aspire_llm.request import RowKind, SamplingParams
from aspire_llm.sampling.batch import SampleBatch, SampleOutput


def place_in_trace(seed: int, requests: int, starts: int) -> tuple[int, int]:
    """The request of a trace that a request with this seed takes, and the start from which it does. Requests that share one
    of the trace begin at different starts of it."""
    return seed % requests, seed // requests * 5 % starts


class ReplaySampler:
    """Stands in for `Sampler`: greedy, and deaf to every other parameter.

    The n-th token of a request's output is decided by the trace's draft from position n of one of its requests, chosen by
    the request's seed: give requests the seeds 0, 1, 2, … and each has the same fate under every method, whatever slot it
    gets; seeds beyond the trace's requests take the same ones again, from other positions. A trace that is too short begins
    again.
    """

    def __init__(self, trace: Trace, num_slots: int, device: torch.device) -> None:
        accepted = np.array([[draft.accepted for draft in request] for request in trace.drafts], dtype=np.int64)
        confidence = np.array([[draft.confidences for draft in request] for request in trace.drafts], dtype=np.float32)
        self._stride = trace.stride
        self._accepted = torch.from_numpy(accepted).to(device)  # [R, S]
        self._confidence = torch.from_numpy(confidence).to(device)  # [R, S, K]
        self._rows = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)  # slot -> request of the trace
        self._begins = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)  # slot -> tokens of its prompt
        self._cycle = torch.zeros(
            num_slots + 1, dtype=torch.int64, device=device
        )  # slot -> where its present cycle began

    def validate(self, params: SamplingParams) -> None:
        pass

    def admit(
        self, slot: int, params: SamplingParams, seed: int, prompt_token_ids: Sequence[int], eos: Any = ()
    ) -> None:
        request, start = place_in_trace(seed, *self._accepted.shape)
        self._rows[slot] = request
        self._begins[slot] = len(prompt_token_ids) - self._stride * start
        self._cycle[slot] = len(prompt_token_ids)

    def release(self, slot: int) -> None:
        pass

    def needs_host(self, slot: int) -> bool:
        return False

    def run(self, batch: SampleBatch) -> SampleOutput:
        device = batch.logits.device
        counts_host = np.asarray(batch.num_tokens, dtype=np.int64)
        packed = np.concatenate(
            [
                counts_host,
                np.cumsum(counts_host) - counts_host,
                np.asarray(batch.slots),
                np.asarray(batch.kinds, dtype=np.int64),
            ]
        )
        sent = torch.from_numpy(packed)
        sent = sent.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else sent
        counts, offsets, slots, kinds = sent.view(4, -1)
        best = batch.logits.argmax(1)
        first = batch.positions[offsets]  # of each row's first token
        verifies, drafts = kinds == RowKind.VERIFY, kinds == RowKind.DRAFT
        self._cycle[slots] = torch.where(drafts, self._cycle[slots], first)
        request, start = self._rows[slots], self._start(slots)
        held = torch.minimum(self._accepted[request, start], counts - 1) * verifies
        step = torch.arange(int(counts_host.max()), device=device)
        grid = (offsets[:, None] + step).clamp(max=len(best) - 1)
        places = (batch.positions[grid] + 1).clamp(max=batch.history.shape[1] - 1)
        tokens = torch.where(step < held[:, None], batch.history[slots[:, None], places], best[grid])
        # a draft's place in its cycle: how far its position is from the newest committed token's
        depth = (first - self._cycle[slots]).clamp(min=0, max=self._confidence.shape[2] - 1)
        confidence = self._confidence[request, start, depth] * drafts
        # the next cycle begins at the token that a verification, or the end of the prompt, just gave
        self._cycle[slots] = torch.where(drafts, self._cycle[slots], first + held + 1)
        return SampleOutput(tokens.masked_fill(step > held[:, None], 0), held + 1, confidence)

    def _start(self, slots: Tensor) -> Tensor:
        """Index of the recorded start that stands for each slot's present cycle."""
        output = (self._cycle[slots] - self._begins[slots]).clamp(min=0)
        return output // self._stride % self._accepted.shape[1]
