"""What `ReplaySampler` decides for the rows of a step: in torch, and as one kernel on a GPU, where twenty small operations a
step would be a part of what is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire_llm.request import RowKind


@dataclass(frozen=True, slots=True)
class TraceState:
    """A trace of R requests with S starts of K drafts each, and where each slot is in it. All on the device."""

    stride: int  # tokens between two starts
    accepted: Tensor  # int64 [R, S]
    confidence: Tensor  # float32 [R, S, K]
    requests: Tensor  # int64 [slots]: of the trace
    begins: Tensor  # int64 [slots]: position that stands for the trace's first start
    cycles: Tensor  # int64 [slots]: where the slot's present cycle began


Decided = tuple[Tensor, Tensor, Tensor]
"""tokens int64 [R, widest], num_emitted int64 [R], confidence float32 [R], as in SampleOutput."""


def decide_in_torch(
    trace: TraceState,
    counts: Tensor,
    offsets: Tensor,
    slots: Tensor,
    kinds: Tensor,
    best: Tensor,
    positions: Tensor,
    history: Tensor,
    widest: int,
) -> Decided:
    """counts, offsets, slots, kinds: int64 [R], of the rows; best, positions: int64 [N], of their tokens; history as in
    SampleBatch. Moves `trace.cycles` on."""
    first = positions[offsets]  # of each row's first token; the others follow it
    verifies, drafts = kinds == RowKind.VERIFY, kinds == RowKind.DRAFT
    cycles = torch.where(drafts, trace.cycles[slots], first)
    request, output = trace.requests[slots], (cycles - trace.begins[slots]).clamp(min=0)
    start = output // trace.stride % trace.accepted.shape[1]
    held = torch.minimum(trace.accepted[request, start], counts - 1) * verifies
    step = torch.arange(widest, device=slots.device)
    places = (first[:, None] + step + 1).clamp(max=history.shape[1] - 1)
    tokens = torch.where(step < held[:, None], history[slots[:, None], places], best[offsets + held][:, None])
    # a draft's place in its cycle: how far its position is from the newest committed token's
    depth = (first - cycles).clamp(min=0, max=trace.confidence.shape[2] - 1)
    confidence = trace.confidence[request, start, depth] * drafts
    # the next cycle begins at the token that a verification, or the end of the prompt, just gave
    trace.cycles[slots] = torch.where(drafts, cycles, first + held + 1)
    return tokens.masked_fill(step > held[:, None], 0), held + 1, confidence


def decide_by_kernel(
    trace: TraceState,
    counts: Tensor,
    offsets: Tensor,
    slots: Tensor,
    kinds: Tensor,
    best: Tensor,
    positions: Tensor,
    history: Tensor,
    widest: int,
) -> Decided:
    """As `decide_in_torch`."""
    from aspire_llm.bench.replay_kernel import decide_kernel

    rows = len(counts)
    tokens = torch.empty(rows, widest, dtype=torch.int64, device=counts.device)
    num_emitted = torch.empty(rows, dtype=torch.int64, device=counts.device)
    confidence = torch.empty(rows, dtype=torch.float32, device=counts.device)
    decide_kernel[(rows,)](
        counts, offsets, slots, kinds, best, positions, history,
        trace.accepted, trace.confidence, trace.requests, trace.begins, trace.cycles, tokens, num_emitted, confidence,
        history.stride(0), history.shape[1], widest, trace.stride, *trace.confidence.shape[1:],
        BLOCK=32, num_warps=1,  # of one warp: a slot's cycle is read by all of it before it is overwritten
    )  # fmt: skip
    return tokens, num_emitted, confidence
