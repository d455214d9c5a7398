"""The runner: the one place that touches the device. Carries out a StepPlan and says what came of it.

Per-request state lives in permanent rows (`SlotState`), updated on the device: after a verification the accepted count, the
next token and the new context set are settled there, so the next step needs nothing from the host. `launch` queues a step's
work and returns; `Launched.result` waits for it. On a GPU the next step may be launched in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aspire_llm.attention.backend import AttentionPlan, StoredScores
from aspire_llm.context.selectors import Selector
from aspire_llm.context.state import ContextState
from aspire_llm.engine.after import AfterForward, OnDevice
from aspire_llm.engine.columns import Bools, Columns, Ints
from aspire_llm.engine.finish import Finished
from aspire_llm.engine.forward import Described, Forward, Forwarded, describe
from aspire_llm.engine.launched import Launched, StepClock
from aspire_llm.engine.score_weights import ScoreWeights
from aspire_llm.engine.slot_ops import StepRows, settle
from aspire_llm.engine.slots import SlotState
from aspire_llm.engine.upload import Array, Uploader
from aspire_llm.models.decoder import Decoder
from aspire_llm.request import TokenLogprobs
from aspire_llm.sampling.batch import SampleBatch, SampleOutput
from aspire_llm.sampling.logprobs import token_logprobs
from aspire_llm.sampling.sampler import Sampler
from aspire_llm.scheduler.plan import PageWrite, StepPlan, StepResult

PLAIN_STEPS = (
    16  # a request that does not draft has its context renewed once in so many steps; the tail covers the others
)
KEPT_STEPS = (
    8  # descriptions of steps, those used last: what comes again is mostly the step in which every request drafts
)
PROMPT_LOGPROB_TOKENS = 64  # prompt tokens whose logits exist at once, when prompt logprobs are asked for


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a step's rows alone decide, on the host and on the device."""

    step: Described
    tail: AfterForward
    inputs: Sequence[Tensor]  # the arrays of `step`
    there: OnDevice


class Runner:
    """selector: None where nothing is drafted."""

    def __init__(
        self,
        decoder: Decoder,
        forward: Forward,
        sampler: Sampler,
        selector: Selector | None,
        contexts: ContextState,
        state: SlotState,
    ) -> None:
        self.decoder = decoder
        self.sampler = sampler
        self.selector = selector
        self.contexts = contexts
        self.state = state
        self.device = state.computed.device
        self._forward = forward
        self._uploader = Uploader(self.device)
        self._drafting = np.zeros(state.num_slots, dtype=bool)  # host: the request in this slot may draft
        # host: verifications without drafts since the context was renewed
        self._plain_steps = np.zeros(state.num_slots, dtype=np.int64)
        self._weights = None if selector is None else ScoreWeights(selector)
        self._prepared: dict[tuple[bytes, ...], Prepared] = {}  # by their rows
        self._prompt_logprobs: list[int | None] = [None] * state.num_slots  # host: how many, for prompt tokens
        self._prompt_ends = [0] * state.num_slots  # host

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Queue the step. The host waits for the device only if a request's sampling needs it (`Sampler.needs_host`) or asks
        for log-probabilities."""
        clock = StepClock(self.device)
        prompts = self._admit(plan)
        rows = Columns.of(plan.rows)
        updates = self._context_updates(rows)
        prepared, written = self._send(plan, rows, updates, [tokens for _, tokens in prompts])
        self._write(plan, [slot for slot, _ in prompts], written)
        tail, there = prepared.tail, prepared.there
        clock.begin()
        forwarded = self._forward.run(prepared.step, prepared.inputs)
        finished = self._finish(rows, prepared, forwarded)
        self._renew_contexts(rows, tail, there, forwarded.attention)
        scored = self._score_prompts(rows, forwarded.hidden)
        return Launched(plan, rows, finished, scored, self.decoder.config.num_layers, clock)

    # ---- before the forward

    def _admit(self, plan: StepPlan) -> list[tuple[int, Ints]]:
        """New tenants of slots: all that is known of them but their tokens, which are returned, by slot."""
        prompts = []
        for new in plan.admissions:
            prompts.append((new.slot, np.array(new.token_ids, dtype=np.int64)))
            self.state.computed[new.slot] = new.num_computed
            self.state.pending[new.slot] = 0
            self.sampler.admit(new.slot, new.params, new.seed, new.prompt_token_ids, new.eos_token_ids)
            self._drafting[new.slot] = self.selector is not None and new.params.draft
            self._prompt_logprobs[new.slot] = new.params.prompt_logprobs
            self._plain_steps[new.slot] = 0
            self._prompt_ends[new.slot] = len(new.prompt_token_ids)
        return prompts

    def _send(
        self, plan: StepPlan, rows: Columns, updates: Bools, prompts: Sequence[Ints]
    ) -> tuple[Prepared, Sequence[Tensor]]:
        """The step's rows, and what is to be written into slots: `page_entries` and the prompts, where there are any; on the
        device, in one copy. Rows that came before, as when every request drafts on, are there already."""
        pages = [*page_entries(plan.page_writes, self.state.page_table.shape[1])] if plan.page_writes else []
        written = [*pages, *prompts]
        key = (*(column.tobytes() for column in (rows.slots, rows.kinds, rows.counts, rows.samples)), updates.tobytes())
        known = self._prepared.pop(key, None)
        if known is not None:
            self._prepared[key] = known  # the newest is the last
            return known, self._uploader.send(written) if written else []
        weights = self._weights.of(rows, updates) if self._weights else np.zeros(rows.num_tokens, dtype=np.float32)
        pad_tokens = self._forward.padded(rows.num_tokens)
        step = describe(rows, weights, self._forward.pad_rows, pad_tokens, self.state.num_slots)
        tail = AfterForward.of(rows, updates, self._forward.padded)
        sent = self._uploader.send([*step.arrays, *tail.arrays, *written])
        first, last = len(step.arrays), len(step.arrays) + len(tail.arrays)
        prepared = Prepared(step, tail, sent[:first], tail.on_device(sent[first:last]))
        if not rows.prefills.any():  # where a prompt's chunk begins is told by its row alone
            if len(self._prepared) == KEPT_STEPS:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[key] = prepared
        return prepared, sent[last:]

    def _write(self, plan: StepPlan, slots: Sequence[int], written: Sequence[Tensor]) -> None:
        """New pages and new tenants' tokens into the slots. slots: of the tenants; written: as `_send` has it."""
        if plan.page_writes:
            places, pages, *written = written
            self.state.page_table.view(-1)[places] = pages
        for slot, tokens in zip(slots, written, strict=True):
            self.state.tokens[slot, : len(tokens)] = tokens

    def _context_updates(self, rows: Columns) -> Bools:
        """[R]: whether the row's attention updates its request's context. Plain decoding must stay as cheap as it
        is without a context, so its rows do so only now and then."""
        updates = self._drafting[rows.slots] & rows.samples
        plain = updates & rows.verifies & (rows.counts == 1)
        self._plain_steps[rows.slots[plain]] += 1
        updates &= ~(plain & (self._plain_steps[rows.slots] < PLAIN_STEPS))
        self._plain_steps[rows.slots[updates]] = 0
        return updates

    # ---- after the forward

    def _finish(self, rows: Columns, prepared: Prepared, forwarded: Forwarded) -> Finished:
        """Tokens of the rows that sample, and the slots as they are after the step."""
        tail, there = prepared.tail, prepared.there
        if forwarded.finish is not None and tail.all_sampled and self.sampler.runs_by_row(rows.slots):
            return forwarded.finish()
        sampled = self._sample(rows, tail, there, forwarded)
        settle(self.state, StepRows(*prepared.inputs[:-1]), there.places, sampled)
        return Finished.of(forwarded.attention, sampled)

    def _sample(self, rows: Columns, tail: AfterForward, there: OnDevice, forwarded: Forwarded) -> SampleOutput | None:
        """Logits of the rows that sample, and of no other token but padding; then tokens from them."""
        if not tail.num_logits:
            return None
        hidden, positions = forwarded.hidden, forwarded.positions
        if not tail.all_sampled:
            hidden, positions = hidden[there.sampled_tokens], positions[there.sampled_tokens]
        return self.sampler.run(
            SampleBatch(
                kinds=rows.kinds[rows.samples],
                slots=rows.slots[rows.samples],
                num_tokens=rows.num_logits[rows.samples],
                logits=self.decoder.logits(hidden)[: tail.num_logits],
                positions=positions[: tail.num_logits],
                history=self.state.tokens,
            )
        )

    def _renew_contexts(self, rows: Columns, tail: AfterForward, there: OnDevice, attention: AttentionPlan) -> None:
        if self.selector is None:
            return
        if len(tail.renewed):
            slots = there.renewed_slots
            ended: list[bool] = rows.prefills[tail.renewed].tolist()
            longest = int(rows.reaches[tail.renewed].max())
            self.selector.renew(
                self.contexts,
                slots,
                self.state.computed[slots],
                StoredScores(attention, there.renewed_rows, longest),
                ended,
            )
        if len(tail.refreshed):
            slots = there.refreshed_slots
            reach = int(rows.reaches[tail.refreshed].max())
            self.selector.refresh(
                self.contexts,
                slots,
                self.state.computed[slots],
                StoredScores(attention, there.refreshed_rows, reach),
            )

    def _score_prompts(self, rows: Columns, hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of prompt tokens, by row, for the rows that ask; logits of a few tokens at a time."""
        scored: dict[int, list[TokenLogprobs]] = {}
        for row in np.flatnonzero(rows.prefills).tolist():
            slot, offset, start = int(rows.slots[row]), int(rows.offsets[row]), int(rows.starts[row])
            top = self._prompt_logprobs[slot]
            if top is None:
                continue
            n = max(
                0, min(int(rows.counts[row]), self._prompt_ends[slot] - 1 - start)
            )  # each scores the token after it
            following = self.state.tokens[slot, start + 1 : start + 1 + n]
            parts = scored[row] = []
            for low in range(0, n, PROMPT_LOGPROB_TOKENS):
                high = min(n, low + PROMPT_LOGPROB_TOKENS)
                logits = self.decoder.logits(hidden[offset + low : offset + high])
                parts.extend(token_logprobs(logits, following[low:high], top))
        return scored


def page_entries(writes: Sequence[PageWrite], width: int) -> tuple[Array, Array]:
    """Where new pages belong in a flat page table of `width` entries a slot, int64; and the pages, int32. No place comes twice:
    of two tenants of a slot in one plan the later one's page counts."""
    entries = {write.slot * width + write.first + i: page for write in writes for i, page in enumerate(write.pages)}
    return np.fromiter(entries.keys(), np.int64, len(entries)), np.fromiter(entries.values(), np.int32, len(entries))
