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

from aspire_llm.bench.replay_decide import TraceState, decide_by_kernel, decide_in_torch
from aspire_llm.engine.columns import Ints
from aspire_llm.engine.upload import Uploader
from aspire_llm.policy.trace import Trace
from aspire_llm.request import SamplingParams
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
        self._uploader = Uploader(device)
        self._trace = TraceState(
            stride=trace.stride,
            accepted=torch.from_numpy(accepted).to(device),
            confidence=torch.from_numpy(confidence).to(device),
            requests=torch.zeros(num_slots + 1, dtype=torch.int64, device=device),
            begins=torch.zeros(num_slots + 1, dtype=torch.int64, device=device),
            cycles=torch.zeros(num_slots + 1, dtype=torch.int64, device=device),
        )

    def validate(self, params: SamplingParams) -> None:
        pass

    def admit(
        self, slot: int, params: SamplingParams, seed: int, prompt_token_ids: Sequence[int], eos: Any = ()
    ) -> None:
        state = self._trace
        state.requests[slot], start = place_in_trace(seed, *state.accepted.shape)
        state.begins[slot] = len(prompt_token_ids) - state.stride * start
        state.cycles[slot] = len(prompt_token_ids)

    def release(self, slot: int) -> None:
        pass

    def needs_host(self, slot: int) -> bool:
        return False

    def runs_by_row(self, slots: Ints) -> bool:
        return False

    def run(self, batch: SampleBatch) -> SampleOutput:
        num_tokens = np.asarray(batch.num_tokens, dtype=np.int64)
        counts, offsets, slots, kinds = self._uploader.send(
            [
                num_tokens,
                np.cumsum(num_tokens) - num_tokens,
                np.asarray(batch.slots, dtype=np.int64),
                np.asarray(batch.kinds, dtype=np.int64),
            ]
        )
        best, widest = batch.logits.argmax(1), int(num_tokens.max())
        decide = decide_by_kernel if best.is_cuda else decide_in_torch
        decided = decide(self._trace, counts, offsets, slots, kinds, best, batch.positions, batch.history, widest)
        return SampleOutput(*decided)
