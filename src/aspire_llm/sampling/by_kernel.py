"""What `Sampler.run` chooses, by Triton kernels: which row goes which way through them, and one upload that says so.

Rows with a greedy request or a temperature alone are read from the logits as they are, whatever their type. Only rows with
top-k, top-p or min-p go through `Filters`, which makes a float32 copy of their logits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aspire_llm.request import RowKind
from aspire_llm.sampling.batch import SampleBatch
from aspire_llm.sampling.filters import Filters
from aspire_llm.sampling.kernels import Column, Step, Way, emit, read
from aspire_llm.sampling.proposals import Proposals
from aspire_llm.sampling.rejection_kernels import keep_proposals, replace_rejected
from aspire_llm.sampling.rows import Bools, Ints, LastSent, Rows, upload

NO_ROWS: Bools = np.zeros(0, dtype=bool)


def choose(
    batch: SampleBatch,
    rows: Rows,
    logits: Tensor,
    greedy: Bools,
    filters: Filters,
    proposals: Proposals,
    seeds: Tensor,
    sender: LastSent,
    mode: str,
    widest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, num_emitted and confidence of `SampleOutput`.

    logits: the batch's, edited. greedy: [R]. seeds: int64 [slots]. sender: of what is packed for the kernels.
    mode: DraftSampling. widest: the most tokens of a row.
    """
    num_rows, num_tokens = len(rows.counts), len(rows.token_rows)
    packed = np.empty(len(Column) * num_rows + num_tokens, dtype=np.int32)
    columns = packed[: len(Column) * num_rows].reshape(len(Column), num_rows)
    columns[Column.OFFSET] = rows.offsets
    columns[Column.COUNT] = rows.counts
    columns[Column.SLOT] = rows.slots
    columns[Column.KIND] = rows.kinds
    columns[Column.WAY] = Way.LIKELIEST
    columns[Column.FILTERED] = -1
    columns[Column.BLOCK] = 0
    temperatures = columns[Column.TEMPERATURE].view(np.float32)
    temperatures[:] = 1
    packed[columns.size :] = rows.token_rows
    filtered = filters.no_logits
    ways = columns[Column.WAY]
    if not greedy.all():
        sampled = ~greedy
        ways[sampled] = ways_of(rows.kinds[sampled], rows.counts[sampled], mode)
        temperatures[sampled] = filters.temperature[rows.slots[sampled]]
        if filters.needed[rows.slots].any():
            part = filters.needed[rows.slots] & sampled
            columns[Column.FILTERED], filtered = filter_rows(rows, part, logits, filters)
            temperatures[part] = 1  # applied
    proposing = verifying = NO_ROWS
    if mode == "rejection":
        proposing, verifying = ways == Way.PROPOSE, ways == Way.VERIFY
        proposals.reserve(rows.slots[proposing])
        proposals.require(rows.slots[verifying])
        columns[Column.BLOCK] = proposals.blocks(rows.slots)
    sent = sender.send(packed)
    step = Step(
        logits=logits,
        filtered=filtered,
        columns=sent[: columns.size].view(columns.shape),
        token_rows=sent[columns.size :],
        positions=batch.positions,
        history=batch.history,
        seeds=seeds,
    )
    parts = read(step)
    if proposing.any():
        keep_proposals(step, parts, proposals)
    tokens, num_emitted, confidence = emit(
        step, parts, proposals, int(rows.counts.max()), widest, rejects=mode == "rejection"
    )
    if verifying.any():
        replace_rejected(step, parts, proposals, tokens, num_emitted)
    return tokens, num_emitted, confidence


def ways_of(kinds: Ints, counts: Ints, mode: str) -> NDArray[np.int64]:
    """Of rows that sample, [n]."""
    drafts = kinds == RowKind.DRAFT
    if mode == "rejection":
        # without drafts there is nothing to reject, and the token is the one of plain decoding
        return np.where(drafts, Way.PROPOSE, np.where(counts > 1, Way.VERIFY, Way.RACE))
    return np.where(drafts & (mode == "greedy"), Way.LIKELIEST, Way.RACE)


def filter_rows(rows: Rows, part: Bools, logits: Tensor, filters: Filters) -> tuple[Ints, Tensor]:
    """Where the tokens of each row begin among the filtered logits, [R], -1 for rows not in `part` [R]; and these logits."""
    chosen = part[rows.token_rows]
    if not chosen.all():
        (index,) = upload(logits.device, np.flatnonzero(chosen))
        logits = logits[index]
    counts = np.where(part, rows.counts, 0)
    return np.where(part, np.cumsum(counts) - counts, -1), filters.apply(logits, rows.token_slots[chosen])
