"""Sampling, and accepting drafts, for requests with a temperature. The modes are described in sampler.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aspire_llm.request import RowKind
from aspire_llm.sampling.filters import top_probability
from aspire_llm.sampling.proposals import Proposals
from aspire_llm.sampling.random import Purpose, exponential, keys, uniform
from aspire_llm.sampling.rows import Bools, Rows, upload

_CHUNK = 1 << 24  # random numbers made at a time, which bounds the memory they take


@dataclass(frozen=True, slots=True)
class Sampled:
    """n tokens of rows that sample."""

    logits: Tensor  # float32 [n, vocabulary]; their softmax is p, or q in DRAFT rows
    rows: Rows
    seeds: Tensor  # int64 [n]
    places: Tensor  # int64 [n]: position of the token to be chosen
    drafts: Tensor  # int64 [n]: the draft at that position


@dataclass(frozen=True, slots=True)
class Choice:
    tokens: Tensor  # int64 [n]
    accepted: Tensor  # bool [n]: whether the draft at this place is accepted; meaningless where no draft follows
    confidence: Tensor  # float32 [n]: of DRAFT rows' tokens, else 0


def likeliest(logits: Tensor, wanted: Bools) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row of logits [n, vocabulary], int64 [n]; its probability where `wanted` [n], float32 [n]."""
    probability = torch.zeros(len(logits), device=logits.device)
    if wanted.all():
        probability = top_probability(logits)
    elif wanted.any():
        (index,) = upload(logits.device, np.flatnonzero(wanted))
        probability[index] = top_probability(logits[index])
    return logits.argmax(1), probability


def emitted(
    chosen: Tensor,
    accepted: Tensor,
    drafts: Tensor,
    confidence: Tensor,
    offsets: Tensor,
    counts: Tensor,
    kinds: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What rows of tokens emit: their drafts up to the first that was not accepted, and the token chosen there.

    chosen, drafts: int64 [N]; accepted: bool [N]; confidence: float32 [N]; offsets, counts, kinds: int64 [R], the row's first
    token, its tokens, and its RowKind. width: of the widest row. Returns tokens int64 [R, width], padded with 0, the number
    that is emitted int64 [R], and of DRAFT rows the confidence of their token, else 0, float32 [R].
    """
    step = torch.arange(width, device=chosen.device)
    grid = (offsets[:, None] + step).clamp(max=len(chosen) - 1)  # [R, width]
    has_draft = step < counts[:, None] - 1
    taken = (accepted[grid] & has_draft).long().cumprod(1)
    num_emitted = taken.sum(1) + 1
    tokens = torch.where(taken.bool(), drafts[grid], chosen[grid]).masked_fill(step >= num_emitted[:, None], 0)
    return tokens, num_emitted, confidence[offsets] * (kinds == RowKind.DRAFT)


def race(log_weights: Tensor, key: Tensor) -> Tensor:
    """Samples one index a row of log weights [n, m], with the random numbers of int64 keys [n]: int64 [n].

    The exponential race (Gumbel-max trick): argmin E_i / w_i over independent exponentials E_i.
    """
    size = max(1, _CHUNK // log_weights.shape[1])
    chosen = [
        (weights.double() - exponential(part, log_weights.shape[1]).log()).argmax(1)
        for weights, part in zip(log_weights.split(size), key.split(size), strict=True)  # type: ignore[no-untyped-call]
    ]
    return torch.cat(chosen)


def couple(tokens: Sampled, likeliest_drafts: bool) -> Choice:
    """Every token is the one that plain decoding would sample from these logits; a draft is accepted if it is that token.

    likeliest_drafts: DRAFT rows take the most likely token instead, and their confidence is its probability. Else the
    confidence is the winner's share of softmax(log q + Gumbel noise): the target's race has the same noise, so what
    decides is by how much the draft won (measured: docs/sampling.md).
    """
    key = keys(tokens.seeds, tokens.places, Purpose.TARGET)
    chosen = torch.empty_like(tokens.places)
    confidence = torch.zeros_like(tokens.places, dtype=torch.float32)
    is_draft = tokens.rows.token_drafts
    if is_draft.any():
        (index,) = upload(tokens.logits.device, np.flatnonzero(is_draft))
        logits = tokens.logits[index]
        if not likeliest_drafts:
            logits = logits.double() - exponential(key[index], logits.shape[1]).log()
        chosen[index] = logits.argmax(1)
        confidence[index] = top_probability(logits).float()
    if not is_draft.all():
        (index,) = upload(tokens.logits.device, np.flatnonzero(~is_draft))
        chosen[index] = race(tokens.logits[index], key[index])
    return Choice(chosen, chosen == tokens.drafts, confidence)


def reject(tokens: Sampled, proposals: Proposals) -> Choice:
    """Rejection sampling. A draft d is accepted if u q(d) < p(d); the token at the first rejected draft is drawn from
    normalise(max(p - q, 0)), the one after the last draft from p. Other chosen tokens of a row are meaningless."""
    chosen = torch.zeros_like(tokens.places)
    accepted = torch.zeros_like(tokens.places, dtype=torch.bool)
    confidence = torch.zeros_like(tokens.places, dtype=torch.float32)
    device, rows = tokens.logits.device, tokens.rows
    if rows.token_drafts.any():
        (index,) = upload(device, np.flatnonzero(rows.token_drafts))
        logits, places = tokens.logits[index], tokens.places[index]
        chosen[index] = race(logits, keys(tokens.seeds[index], places, Purpose.DRAFT))
        proposals.put(rows.token_slots[rows.token_drafts], places, torch.softmax(logits, dim=1))
        confidence[index] = top_probability(logits)
    verified = np.flatnonzero(rows.kinds != RowKind.DRAFT)
    if not len(verified):
        return Choice(chosen, accepted, confidence)

    counts, offsets = rows.counts[verified], rows.offsets[verified]
    within = np.arange(len(rows.token_rows)) - rows.offsets[rows.token_rows]
    pending = np.flatnonzero(within < rows.counts[rows.token_rows] - 1)  # tokens with a draft after them
    if len(pending):
        slots = rows.token_slots[pending]
        proposals.require(slots)
        (index,) = upload(device, pending)
        logits, places, drafts = tokens.logits[index], tokens.places[index], tokens.drafts[index]
        p = torch.exp(logits.gather(1, drafts[:, None])[:, 0] - torch.logsumexp(logits, dim=1))
        q = proposals.probability(slots, places, drafts)
        accepted[index] = uniform(keys(tokens.seeds[index], places, Purpose.ACCEPT)) * q < p

    first, last = upload(device, offsets, offsets + counts - 1)  # [r]
    ends = first
    if len(pending):
        step = torch.arange(int(counts.max()), device=device)
        grid = torch.minimum(first[:, None] + step, last[:, None])
        taken = accepted[grid] & (first[:, None] + step < last[:, None])
        ends = first + taken.long().cumprod(1).sum(1)  # the token whose choice ends the row
    logits, places, seeds = tokens.logits[ends], tokens.places[ends], tokens.seeds[ends]
    weights = torch.softmax(logits.double(), dim=1)
    purpose = torch.full_like(ends, Purpose.TARGET)
    if len(pending):
        q = proposals.distribution(rows.slots[verified], places).double()
        is_bonus = ends == last
        residual = (weights - q).clamp(min=0)
        # All zero only where p and q agree but for rounding.
        use_p = is_bonus | (residual.sum(1) == 0)
        weights = torch.where(use_p[:, None], weights, residual)
        purpose = torch.where(is_bonus, Purpose.TARGET, Purpose.RESIDUAL)
    chosen[ends] = race(weights.log(), keys(seeds, places, purpose))
    return Choice(chosen, accepted, confidence)
