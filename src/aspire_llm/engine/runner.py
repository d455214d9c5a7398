"""The runner: the one place that touches the device. Carries out a StepPlan and says what came of it.

Per-request state lives in permanent rows (`SlotState`), updated on the device: after a verification the accepted count, the
next token and the new context set are settled there, so the next step needs nothing from the host. `launch` queues a step's
work and returns; `Launched.result` waits for it. On a GPU the next step may be launched in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aspire_llm.attention.backend import AttentionPlan
from aspire_llm.context.selectors import Selector
from aspire_llm.context.state import ContextState
from aspire_llm.engine.after import AfterForward, OnDevice
from aspire_llm.engine.columns import Bools, Columns
from aspire_llm.engine.forward import Floats, Forward, describe
from aspire_llm.engine.launched import Launched, StepClock
from aspire_llm.engine.slots import SlotState
from aspire_llm.engine.upload import Array, Uploader
from aspire_llm.models.decoder import Decoder
from aspire_llm.request import RowKind, TokenLogprobs
from aspire_llm.sampling.batch import SampleBatch, SampleOutput
from aspire_llm.sampling.logprobs import token_logprobs
from aspire_llm.sampling.sampler import Sampler
from aspire_llm.scheduler.plan import Row, StepPlan, StepResult

PLAIN_STEPS = (
    16  # a request that does not draft has its context renewed once in so many steps; the tail covers the others
)
KEPT_WEIGHTS = 64  # tokens of the longest row whose score weights are kept
PROMPT_LOGPROB_TOKENS = 64  # prompt tokens whose logits exist at once, when prompt logprobs are asked for


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
        self._weights: dict[tuple[int | None, int], Floats] = {}
        self._prompt_logprobs: list[int | None] = [None] * state.num_slots  # host: how many, for prompt tokens
        self._prompt_ends = [0] * state.num_slots  # host

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Queue the step. The host waits for the device only if a request's sampling needs it (`Sampler.needs_host`) or asks
        for log-probabilities."""
        clock = StepClock(self.device)
        rows = plan.rows
        self._stage(plan)
        columns = Columns.of(rows)
        updates = self._context_updates(columns)
        step = describe(
            columns,
            self._query_weights(columns, updates),
            self._forward.pad_rows,
            self._forward.padded(int(columns.counts.sum())),
            self.state.num_slots,
        )
        tail = AfterForward.of(columns, updates)
        arrays = self._uploader.send([*step.arrays, *tail.arrays])
        hidden, attention = self._forward.run(step, arrays[: len(step.arrays)])
        there = tail.on_device(arrays[len(step.arrays) :])
        sampled = self._sample(columns, there, hidden)
        self._settle(there, sampled)
        self._renew_contexts(columns, tail, there, attention)
        prompts = self._score_prompts(rows, hidden)
        return Launched(plan, sampled, attention.row_reads, prompts, self.decoder.config.num_layers, clock)

    # ---- before the forward

    def _stage(self, plan: StepPlan) -> None:
        """Write what the scheduler gave: new tenants of slots, new pages."""
        state = self.state
        writes: list[tuple[Tensor, Array]] = []
        for new in plan.admissions:
            known = np.array(new.token_ids, dtype=np.int64)
            writes.append((state.tokens[new.slot, : len(known)], known))
            state.computed[new.slot] = new.num_computed
            state.pending[new.slot] = 0
            self.sampler.admit(new.slot, new.params, new.seed, new.prompt_token_ids, new.eos_token_ids)
            self._drafting[new.slot] = self.selector is not None and new.params.draft
            self._prompt_logprobs[new.slot] = new.params.prompt_logprobs
            self._plain_steps[new.slot] = 0
            self._prompt_ends[new.slot] = len(new.prompt_token_ids)
        for write in plan.page_writes:
            place = state.page_table[write.slot, write.first : write.first + len(write.pages)]
            writes.append((place, np.array(write.pages, dtype=np.int32)))
        if writes:
            for (place, _), values in zip(writes, self._uploader.send([values for _, values in writes]), strict=True):
                place.copy_(values)

    def _context_updates(self, rows: Columns) -> Bools:
        """[R]: whether the row's attention renews or refreshes its request's context. Plain decoding must stay as cheap as it
        is without a context, so its rows do so only now and then."""
        updates = self._drafting[rows.slots] & rows.samples
        plain = updates & rows.verifies & (rows.counts == 1)
        self._plain_steps[rows.slots[plain]] += 1
        updates &= ~(plain & (self._plain_steps[rows.slots] < PLAIN_STEPS))
        self._plain_steps[rows.slots[updates]] = 0
        return updates

    def _query_weights(self, rows: Columns, updates: Bools) -> list[Floats]:
        """Score weights of each row's tokens."""
        return [
            self._weights_of(kind if update else None, count)
            for kind, count, update in zip(rows.kinds.tolist(), rows.counts.tolist(), updates.tolist(), strict=True)
        ]

    def _weights_of(self, kind: int | None, num_tokens: int) -> Floats:
        """kind: None for a row that needs no scores. Kept, but for the many lengths of prompt chunks."""
        known = self._weights.get((kind, num_tokens))
        if known is not None:
            return known
        if self.selector is None or kind is None:
            weights = np.zeros(num_tokens, dtype=np.float32)
        else:
            weights = np.array(self.selector.query_weights(RowKind(kind), num_tokens), dtype=np.float32)
        if num_tokens <= KEPT_WEIGHTS:
            self._weights[kind, num_tokens] = weights
        return weights

    # ---- after the forward

    def _sample(self, rows: Columns, there: OnDevice, hidden: Tensor) -> SampleOutput | None:
        """Logits of the rows that sample, and of no other token; then tokens from them."""
        if not rows.samples.any():
            return None
        state, slots = self.state, there.token_slots
        # a token's position follows from its slot's counters: the newest committed token stands at `computed`
        first = torch.where(there.token_kinds == RowKind.DRAFT, state.pending[slots], 0)
        positions = torch.where(
            there.token_kinds == RowKind.PREFILL, there.token_places, state.computed[slots] + first + there.token_places
        )
        return self.sampler.run(
            SampleBatch(
                kinds=rows.kinds[rows.samples],
                slots=rows.slots[rows.samples],
                num_tokens=np.where(rows.prefills, 1, rows.counts)[rows.samples],
                logits=self.decoder.logits(hidden[there.sampled_tokens]),
                positions=positions,
                history=state.tokens,
            )
        )

    def _settle(self, there: OnDevice, sampled: SampleOutput | None) -> None:
        """Counters and tokens of every slot as they are after this step. All on the device."""
        state = self.state
        if there.prefill_slots.numel():
            state.computed[there.prefill_slots] = there.prefill_ends
        if sampled is None:
            return
        slots = there.slots
        drafts, verifies = there.kinds == RowKind.DRAFT, there.kinds == RowKind.VERIFY
        # the first new token stands right behind the newest committed token, or behind the last draft
        first = state.computed[slots] + torch.where(drafts, state.pending[slots] + 1, verifies.long())
        columns = torch.arange(sampled.tokens.shape[1], device=self.device)
        places = (first[:, None] + columns).masked_fill(columns >= sampled.num_emitted[:, None], state.nowhere)
        state.tokens[slots[:, None], places] = sampled.tokens
        state.computed[slots] += sampled.num_emitted * verifies
        state.pending[slots] = (state.pending[slots] + 1) * drafts

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
                lambda layers: attention.scores_of(layers, there.renewed_rows, longest),
                ended,
            )
        if len(tail.refreshed):
            slots = there.refreshed_slots
            reach = int(rows.reaches[tail.refreshed].max())
            self.selector.refresh(
                self.contexts,
                slots,
                self.state.computed[slots],
                lambda layers: attention.scores_of(layers, there.refreshed_rows, reach),
            )

    def _score_prompts(self, rows: Sequence[Row], hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of prompt tokens, for the rows that ask; logits of a few tokens at a time."""
        scored: dict[int, list[TokenLogprobs]] = {}
        offset = 0
        for i, row in enumerate(rows):
            top = self._prompt_logprobs[row.slot]
            if row.kind is RowKind.PREFILL and top is not None:
                n = max(
                    0, min(row.num_tokens, self._prompt_ends[row.slot] - 1 - row.start)
                )  # each scores the token after it
                following = self.state.tokens[row.slot, row.start + 1 : row.start + 1 + n]
                parts = scored[i] = []
                for low in range(0, n, PROMPT_LOGPROB_TOKENS):
                    high = min(n, low + PROMPT_LOGPROB_TOKENS)
                    logits = self.decoder.logits(hidden[offset + low : offset + high])
                    parts.extend(token_logprobs(logits, following[low:high], top))
            offset += row.num_tokens
        return scored
