"""The end of a step: tokens from hidden states, the slots as they are after it, and what the host is told.

Where every token of a step gets logits and no request asks for more than a temperature, that is the same work whatever the
step: `Finish`, which a CUDA graph can hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_llm.attention.backend import AttentionPlan
from aspire_llm.engine.download import Packed
from aspire_llm.engine.slot_ops import StepRows, settle
from aspire_llm.engine.slots import SlotState
from aspire_llm.models.decoder import Decoder
from aspire_llm.sampling.batch import SampleOutput
from aspire_llm.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Finished:
    """What a step leaves. Rows of `sampled` are those that sample, in their order; there may be more behind them."""

    sampled: SampleOutput | None  # None: no row samples
    for_host: Packed  # int64 [≥ R], KV tokens that each row read; then tokens, num_emitted and confidence of `sampled`

    @staticmethod
    def of(attention: AttentionPlan, sampled: SampleOutput | None) -> Finished:
        wanted = [attention.row_reads]
        if sampled is not None:
            wanted += [sampled.tokens, sampled.num_emitted, sampled.confidence]
        return Finished(sampled, Packed.of(wanted))


class Finish:
    """The end of a step all of whose rows sample from all of their tokens: drafts, verifications, and prompts of which one token
    was left. For a GPU's kernels."""

    def __init__(self, decoder: Decoder, sampler: Sampler, state: SlotState) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._state = state
        self._places = torch.arange(state.num_slots + 1, dtype=torch.int32, device=state.computed.device)

    def __call__(self, rows: StepRows, hidden: Tensor, positions: Tensor, attention: AttentionPlan) -> Finished:
        """rows: [R], with padding; hidden [T, hidden], positions int64 [T]: of its tokens, with padding; attention: as its
        forward left it. What is returned is good until the next call where a graph holds this one."""
        logits = self._decoder.logits(hidden)
        sampled = self._sampler.run_rows(rows.slots, rows.kinds, rows.offsets, logits, positions, self._state.tokens)
        padding = rows.offsets[1:] == rows.offsets[:-1]
        settle(self._state, rows, self._places[: len(padding)].masked_fill(padding, -1), sampled)
        return Finished.of(attention, sampled)
