"""Chooses tokens: samples, drafts and verifies a ragged batch at once, exactly.

Draft sampling (DraftSampling), for requests with a temperature; greedy requests are the limit of each:

- "rejection": a draft is drawn from q and accepted with probability min(1, p/q); after a rejection the token comes from
  normalise(max(p - q, 0)) (Leviathan et al. 2023, "Fast inference from transformers via speculative decoding"; Chen et al.
  2023). q is kept until the verification.
- "greedy": the draft is q's likeliest token. The target's token is sampled from p as plain decoding does; the draft is
  accepted if it is that token, so with probability p(draft). No q is kept.
- "coupled": as "greedy", but the draft is sampled from q with the very random numbers that the target's sampling will
  use: the Gumbel coupling (Daliri, Musco and Suresh 2025, "Coupling without communication and drafter-invariant
  speculative decoding"). It accepts with probability at least (1 - d) / (1 + d), d the total variation distance of p and q.

In the last two modes the tokens are those of plain decoding with the same seed, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from aspire_llm.errors import UserError
from aspire_llm.request import RowKind, SamplingParams, TokenLogprobs
from aspire_llm.sampling.acceptance import Sampled, couple, emitted, likeliest, reject
from aspire_llm.sampling.batch import SampleBatch, SampleOutput
from aspire_llm.sampling.filters import Filters
from aspire_llm.sampling.logits import LogitsEdits
from aspire_llm.sampling.logprobs import token_logprobs
from aspire_llm.sampling.proposals import Proposals
from aspire_llm.sampling.rows import Bools, Ints, LastSent, Rows, upload
from aspire_llm.sampling.structured import Grammars

DraftSampling = Literal["rejection", "greedy", "coupled"]


class Sampler:
    """Sampling state of every slot. The host waits for the device only for slots that `needs_host`.

    max_draft_tokens: the most drafts a request may have pending; grammars: for structured_outputs, None to refuse them.
    on_kernels: whether Triton kernels choose (by_kernel.py), as on a GPU; else torch operations do.
    """

    def __init__(
        self,
        max_slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        draft_sampling: DraftSampling = "coupled",
        *,
        max_draft_tokens: int = 16,
        grammars: Grammars | None = None,
    ) -> None:
        if draft_sampling not in get_args(DraftSampling):
            allowed = ", ".join(get_args(DraftSampling))
            raise UserError(f"draft_sampling = {draft_sampling!r}: must be one of {allowed}", "draft_sampling")
        self._device = torch.device(device)
        self._vocab_size = vocab_size
        self.on_kernels = self._device.type == "cuda"
        self._mode = draft_sampling
        self._max_drafts = max_draft_tokens
        self._grammars = grammars
        self._edits = LogitsEdits(max_slots, vocab_size, self._device)
        self._filters = Filters(max_slots, vocab_size, self._device)
        self._proposals = Proposals(max_slots, vocab_size, max_draft_tokens, self._device)
        self._seeds = torch.zeros(max_slots, dtype=torch.int64, device=self._device)
        self._greedy: Bools = np.ones(max_slots, dtype=bool)
        # 0: greedy. One more, for padding rows
        self._temperatures = torch.zeros(max_slots + 1, device=self._device)
        self._sender = LastSent(self._device)
        self._logprobs: dict[int, int] = {}  # slot -> how many of the likeliest

    def validate(self, params: SamplingParams) -> None:
        """UserError for what only the model can tell: token ids outside its vocabulary, a grammar that does not compile."""
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("stop_token_ids", params.stop_token_ids),
            ("bad_words_token_ids", [token for word in params.bad_words_token_ids for token in word]),
        ):
            for token in ids:
                if not 0 <= token < self._vocab_size:
                    raise UserError(f"{name} has token {token}: must be in [0, {self._vocab_size - 1}]", name)
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > self._vocab_size:
                raise UserError(f"{name} = {count}: must be in [-1, {self._vocab_size}], the vocabulary", name)
        if params.structured_outputs is not None:
            if self._grammars is None:
                raise UserError("structured_outputs: this engine was made without a tokenizer", "structured_outputs")
            self._grammars.matcher(params.structured_outputs)

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """A request takes the slot, at its beginning or after a preemption. seed: of its random numbers, modulo 2^64."""
        self.validate(params)
        self.release(slot)
        matcher = None
        if params.structured_outputs is not None and self._grammars is not None:
            matcher = self._grammars.matcher(params.structured_outputs)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self._edits.admit(slot, params, prompt_token_ids, stops, matcher)
        self._filters.admit(slot, params)
        self._seeds[slot] = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        self._greedy[slot] = params.greedy
        self._temperatures[slot] = 0.0 if params.greedy else params.temperature
        if params.logprobs is not None:
            self._logprobs[slot] = params.logprobs

    def release(self, slot: int) -> None:
        self._edits.release(slot)
        self._proposals.release(slot)
        self._greedy[slot] = True
        self._logprobs.pop(slot, None)

    def needs_host(self, slot: int) -> bool:
        """Whether rows of this slot make the host wait: logits processors, structured output, logprobs, and allowed tokens
        that other parameters may all ban."""
        return slot in self._logprobs or self._edits.needs_host(slot)

    def runs_by_row(self, slots: Ints) -> bool:
        """Whether `run_rows` does for slots [R]: their logits are neither edited nor filtered, no log-probabilities are asked
        for, and no proposal is to be kept."""
        if not self.on_kernels or self._edits.any[slots].any() or self._filters.needed[slots].any():
            return False
        if self._logprobs and not self._logprobs.keys().isdisjoint(slots.tolist()):
            return False
        return self._mode != "rejection" or bool(self._greedy[slots].all())

    def run_rows(
        self, slots: Tensor, kinds: Tensor, offsets: Tensor, logits: Tensor, positions: Tensor, history: Tensor
    ) -> SampleOutput:
        """As `run`, where `runs_by_row`, from what lies on the device: arguments as `by_row.choose_by_row` has them. Every row
        samples from all of its tokens. Rows of the output are as wide as any can be, and those of padding are among them."""
        from aspire_llm.sampling.by_row import choose_by_row

        chosen = choose_by_row(
            slots, kinds, offsets, self._temperatures, logits, positions, history, self._seeds, self._filters.no_logits,
            self._proposals, self._max_drafts + 1, likeliest_drafts=self._mode == "greedy",
        )  # fmt: skip
        return SampleOutput(*chosen)

    def set_draft_distribution(self, slot: int, position: int, q: Tensor) -> None:
        """Say which distribution [vocabulary] the pending draft at `position` was drawn from, for a draft that this sampler
        did not draw (one-hot for a fixed one). Matters in "rejection" mode only."""
        self._proposals.put(np.array([slot]), torch.tensor([position], device=self._device), q[None].to(self._device))

    def run(self, batch: SampleBatch) -> SampleOutput:
        rows = Rows.of(batch)
        if (rows.counts > self._max_drafts + 1).any():
            raise ValueError(f"a row has {rows.counts.max() - 1} drafts; the sampler was made for {self._max_drafts}")
        logits, failures = self._edits.apply(batch.logits, rows, batch.positions, batch.history)
        choose = self._choose_on_kernels if self.on_kernels else self._choose
        tokens, num_emitted, confidence = choose(batch, rows, logits)
        return SampleOutput(
            tokens=tokens,
            num_emitted=num_emitted,
            confidence=confidence,
            logprobs=self._find_logprobs(batch.logits, rows, tokens, num_emitted),
            errors=_emitted_failures(failures, rows, num_emitted),
        )

    def _choose(self, batch: SampleBatch, rows: Rows, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, num_emitted and confidence of the output. logits: the batch's, edited."""
        offsets, token_slots, counts, kinds = upload(
            self._device, rows.offsets, rows.token_slots, rows.counts, rows.kinds
        )
        places = batch.positions + 1  # of the tokens to be chosen
        # What stands there: the draft, for all but the last token of a row.
        drafts = batch.history[token_slots, places.clamp(max=batch.history.shape[1] - 1)]
        greedy = self._greedy[rows.token_slots]
        if greedy.all():
            chosen, confidence = likeliest(logits, rows.token_drafts)
            accepted = chosen == drafts
        else:
            chosen, accepted, confidence = self._sample(logits, rows, greedy, token_slots, places, drafts)
        return emitted(chosen, accepted, drafts, confidence, offsets, counts, kinds, int(rows.counts.max()))

    def _choose_on_kernels(self, batch: SampleBatch, rows: Rows, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from aspire_llm.sampling.by_kernel import choose

        greedy = self._greedy[rows.slots]
        widest = self._max_drafts + 1
        return choose(
            batch, rows, logits, greedy, self._filters, self._proposals, self._seeds, self._sender, self._mode, widest
        )

    def _sample(
        self, logits: Tensor, rows: Rows, greedy: Bools, token_slots: Tensor, places: Tensor, drafts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens [N] some or all of which are sampled: those chosen, whether the draft is accepted, confidences."""
        chosen = torch.empty_like(places)
        accepted = torch.zeros_like(places, dtype=torch.bool)
        confidence = torch.zeros(len(places), device=self._device)
        if greedy.any():
            (index,) = upload(self._device, np.flatnonzero(greedy))
            chosen[index], confidence[index] = likeliest(logits[index], rows.token_drafts[greedy])
            accepted[index] = chosen[index] == drafts[index]
        (index,) = upload(self._device, np.flatnonzero(~greedy))
        part = (logits[index] if greedy.any() else logits).float()
        sampled = Sampled(
            self._filters.apply(part, rows.token_slots[~greedy]),
            rows.select(~self._greedy[rows.slots]),
            self._seeds[token_slots[index]],
            places[index],
            drafts[index],
        )
        if self._mode == "rejection":
            choice = reject(sampled, self._proposals)
        else:
            choice = couple(sampled, likeliest_drafts=self._mode == "greedy")
        chosen[index], accepted[index], confidence[index] = choice.tokens, choice.accepted, choice.confidence
        return chosen, accepted, confidence

    def _find_logprobs(
        self, logits: Tensor, rows: Rows, tokens: Tensor, num_emitted: Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """Row -> log-probabilities of its emitted tokens, for rows that ask (waits for the device); drafts have none."""
        if not self._logprobs:
            return {}
        asking = [
            row
            for row, slot in enumerate(rows.slots.tolist())
            if slot in self._logprobs and rows.kinds[row] != RowKind.DRAFT
        ]
        if not asking:
            return {}
        emitted = num_emitted.tolist()
        index = torch.cat([torch.arange(emitted[row]) + int(rows.offsets[row]) for row in asking]).to(self._device)
        chosen = torch.cat([tokens[row, : emitted[row]] for row in asking])
        wanted = [self._logprobs[int(rows.slots[row])] for row in asking]
        widest = -1 if min(wanted) < 0 else max(wanted)
        found = iter(token_logprobs(logits[index], chosen, widest))
        return {
            row: [
                entry if top < 0 else replace(entry, top=entry.top[:top])
                for entry in (next(found) for _ in range(emitted[row]))
            ]
            for row, top in zip(asking, wanted, strict=True)
        }


def _emitted_failures(failures: dict[int, str], rows: Rows, num_emitted: Tensor) -> dict[int, str]:
    """Row -> what failed, for failures at tokens that are emitted: plain decoding would have met them too."""
    if not failures:
        return {}
    emitted = num_emitted.tolist()
    errors: dict[int, str] = {}
    for token, message in sorted(failures.items()):
        row = int(rows.token_rows[token])
        if rows.kinds[row] != RowKind.DRAFT and token - int(rows.offsets[row]) < emitted[row]:
            errors.setdefault(row, message)
    return errors
